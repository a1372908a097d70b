"""Polars: ``import batchradix.integrations.polars`` adds ``.batchradix`` to frames.

>>> import polars as pl
>>> import batchradix.integrations.polars
>>> frame.batchradix.run(template="{{ text }}", fields="topic: str")  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl
import pyarrow as pa

from batchradix.errors import OptionError
from batchradix.integrations.answerer import Answerer
from batchradix.report.progress import choose_progress

__all__ = ["FrameNamespace", "LazyNamespace"]


@pl.api.register_dataframe_namespace("batchradix")
class FrameNamespace:
    """``frame.batchradix``: answers to the rows of a `polars.DataFrame`."""

    def __init__(self, frame: pl.DataFrame) -> None:
        self._frame = frame

    def run(
        self,
        *,
        unnest: bool = False,
        result_columns: Sequence[str] | None = None,
        show_progress: bool = False,
        **options: Any,
    ) -> pl.DataFrame:
        """The frame with the columns of the answers behind its own, rows in their order.

        All rows are planned at once, and weights are freed at the end. Options and columns are
        those of `batchradix.Extractor`. Raises what `batchradix.run` raises.
        """
        answerer = Answerer(unnest=unnest, result_columns=result_columns, **options)
        progress = choose_progress(quiet=not show_progress)
        answers = answerer.run(self._frame.to_arrow(), self._frame.columns, progress=progress)
        assert answers is not None
        return _beside(self._frame, answers)


@pl.api.register_lazyframe_namespace("batchradix")
class LazyNamespace:
    """``lazy.batchradix``: answers to the rows of a `polars.LazyFrame`, batch after batch."""

    def __init__(self, frame: pl.LazyFrame) -> None:
        self._frame = frame

    def run(
        self,
        *,
        batch_rows: int = 1024,
        unnest: bool = False,
        result_columns: Sequence[str] | None = None,
        **options: Any,
    ) -> pl.LazyFrame:
        """A lazy frame with the columns of the answers behind its own, rows in their order.

        Nothing runs before it is collected or written. Rows are then taken and answered
        ``batch_rows`` at a time, so that neither they nor their answers have to fit the memory;
        prefixes stay in the cache from batch to batch, and the weights as long as this lazy frame
        is there. Rows whose prompts begin alike should stand together; where they do not, collect
        and run the frame as a whole. Options and columns are those of `batchradix.Extractor`.
        Raises `OptionError` for what cannot be.
        """
        if batch_rows < 1:
            raise OptionError(f"`batch_rows` must be at least 1, not {batch_rows}")
        if not hasattr(pl.LazyFrame, "collect_batches"):
            raise OptionError("lazy frames need Polars 1.34 or later; collect() the frame first")
        from polars.io.plugins import register_io_source

        answerer = Answerer(unnest=unnest, result_columns=result_columns, **options)
        frame, schema = self._frame, self._frame.collect_schema()
        answers = pl.DataFrame(answerer.answer_schema(schema.names()).empty_table()).schema

        def batches(
            with_columns: list[str] | None,
            predicate: pl.Expr | None,
            n_rows: int | None,
            batch_size: int | None,
        ) -> Iterator[pl.DataFrame]:
            del batch_size  # a hint, and the user has said it
            lazy = frame if n_rows is None else frame.head(n_rows)
            for rows in lazy.collect_batches(chunk_size=batch_rows, maintain_order=True):
                found = _beside(rows, answerer.answers(rows.to_arrow()))
                if predicate is not None:
                    found = found.filter(predicate)
                yield found if with_columns is None else found.select(with_columns)

        return register_io_source(batches, schema={**schema, **answers})


def _beside(frame: pl.DataFrame, answers: pa.Table) -> pl.DataFrame:
    return frame.hstack(pl.DataFrame(answers).get_columns())
