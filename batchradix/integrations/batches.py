"""What `datasets.Dataset.map` hands to a function, as rows; and answers in the same kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from batchradix.errors import OptionError

_NOT_ARROW = (pa.ArrowException, TypeError, ValueError, OverflowError)


class TypedColumn(list[Any]):
    """A list that knows its Arrow type, so that a column which begins with nulls has it too.

    pyarrow asks any sequence for ``__arrow_array__``, and `datasets` makes its columns with it.
    """

    def __init__(self, column: pa.ChunkedArray) -> None:
        super().__init__(column.to_pylist())
        self._type = column.type

    def __arrow_array__(self, type: pa.DataType | None = None) -> pa.Array:
        return pa.array(list(self), type or self._type)


def rows_of(batch: Any) -> pa.Table | list[dict[str, Any]]:
    """The rows of a batch as a table, or as dicts where Arrow has no type for a column.

    A batch is a mapping of columns (lists, arrays, tensors), a ``pa.Table``, or a pandas or
    Polars frame. Raises `OptionError` for a single row, and for columns without names.
    """
    if isinstance(batch, pa.Table):
        return batch
    lazy = getattr(batch, "pa_table", None)  # of a datasets.formatting.LazyBatch, not decoded
    if isinstance(lazy, pa.Table) and type(batch).__name__ == "LazyBatch":
        return lazy
    if isinstance(batch, Mapping):
        return _table({name: _listed(name, column) for name, column in batch.items()})
    if hasattr(batch, "to_arrow"):  # Polars
        return batch.to_arrow()
    if hasattr(batch, "iloc"):  # pandas
        return pa.Table.from_pandas(batch, preserve_index=False)
    raise OptionError(
        f"a batch of columns by name was expected, not {type(batch).__name__}; map with "
        f"`batched=True` and without `input_columns`"
    )


def _listed(name: str, column: Any) -> list[Any]:
    if isinstance(column, (str, bytes, Mapping)) or not hasattr(column, "__len__"):
        raise OptionError(
            f"the column {name!r} is a single {type(column).__name__}, so this is a row and no "
            f"batch; map with `batched=True`"
        )
    if hasattr(column, "tolist"):
        column = column.tolist()
    return [part.tolist() if hasattr(part, "tolist") else part for part in column]


def _table(columns: dict[str, list[Any]]) -> pa.Table | list[dict[str, Any]]:
    lengths = {len(column) for column in columns.values()}
    if len(lengths) > 1:
        raise OptionError(
            "the columns are of different lengths, so this is a row and no batch; map with "
            "`batched=True`"
        )
    try:
        return pa.table({name: pa.array(column) for name, column in columns.items()})
    except _NOT_ARROW:
        names = list(columns)
        return [
            dict(zip(names, cells, strict=True)) for cells in zip(*columns.values(), strict=True)
        ]


def answered(batch: Any, answers: pa.Table) -> Any:
    """What a mapped function returns for ``batch``: of a mapping the new columns, which
    `datasets` adds to it; of a table or frame all of it with the new columns behind."""
    if isinstance(batch, pa.Table):
        for field, column in zip(answers.schema, answers.columns, strict=True):
            batch = batch.append_column(field, column)
        return batch
    if isinstance(batch, Mapping):
        columns = zip(answers.column_names, answers.columns, strict=True)
        return {name: TypedColumn(column) for name, column in columns}
    if hasattr(batch, "to_arrow"):
        import polars as pl

        return batch.hstack(pl.DataFrame(answers))
    import pandas as pd

    frame = answers.to_pandas(types_mapper=pd.ArrowDtype)
    return pd.concat([batch, frame.set_index(batch.index)], axis=1)
