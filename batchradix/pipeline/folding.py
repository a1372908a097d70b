"""What brings the results of a job together where a row of its table has several."""

from __future__ import annotations

import numpy as np

from batchradix.jobs.base import JobSource
from batchradix.pipeline.intake import Intake
from batchradix.row_options import LongRows
from batchradix.schema.answer_format import ValueColumn
from batchradix.schema.questions import QuestionFormats
from batchradix.sink.chunks import Chunks
from batchradix.sink.combine import Rules
from batchradix.sink.fold import Fold
from batchradix.sink.question_columns import Questions
from batchradix.sink.samples import Samples
from batchradix.types import I64


def folds_of(
    source: JobSource | None, values: ValueColumn | None, long_rows: LongRows, rows: Intake | None
) -> tuple[Fold, ...]:
    """The folds of a job in the order in which they apply: samples of a request, or the parts of a
    text and then the questions about it. Without ``rows``, those of a table without any.

    Raises `OptionError` for rules of combining that the values have no use for.
    """
    if source is not None and source.starts is not None:
        return (Samples(source.starts),)
    found: list[Fold] = []
    questions = values if isinstance(values, QuestionFormats) else None
    names = () if questions is None else questions.names
    are_texts = () if questions is None else tuple(one is None for one in questions.formats)
    starts: I64 = np.zeros(1, dtype=np.int64)
    if rows is not None and rows.part_starts is not None:
        starts = rows.part_starts
    if long_rows.chunks:
        rules = Rules(dict(long_rows.combine))
        field = None if values is None else values.arrow_field("value")
        texts = [name for name, is_text in zip(names, are_texts, strict=True) if is_text]
        rules.check(None if field is None else field.type, texts)
        found.append(
            Chunks(starts, rules, field, has_ask=long_rows.asks, names=names, are_texts=are_texts)
        )
    if questions is not None:
        found.append(Questions((len(starts) - 1) // len(names), names, are_texts))
    return tuple(found)
