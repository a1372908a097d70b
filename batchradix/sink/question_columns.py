"""The answers to several questions about one row as one value, with a field for each."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchradix.schema.answers import json_text, pointer_step
from batchradix.sink.fold import CUT_TOKENS, TOTALS, null_where, put_column, put_totals, shown
from batchradix.types import I64, Status

QUESTIONS = "questions"
_PARTS = (
    "status",
    "cut",
    "text",
    "reasoning",
    "error",
    "finish_reason",
    "completion_tokens",
    "reasoning_tokens",
    "parts",
)


class Questions:
    """A `Fold` of the answers to ``names``, one each, in this order.

    ``value`` has the answers that are there, whatever became of the others; those of questions
    marked in ``are_texts`` are the texts. The row is as bad as the worst answer, whose error it
    has. ``text`` is a JSON object of all texts, tokens are those of all prompts and answers.
    """

    def __init__(self, num_rows: int, names: Sequence[str], are_texts: Sequence[bool]) -> None:
        self._names, self._are_texts = tuple(names), tuple(are_texts)
        self.identity = json.dumps([self._names, self._are_texts])
        self.starts: I64 = np.arange(num_rows + 1, dtype=np.int64) * len(self._names)

    def field(self, columns: pa.Schema) -> pa.Field:
        """What became of each question, beside the result columns ``columns``."""
        fields = [columns.field(name) for name in _PARTS if name in columns.names]
        return pa.field(QUESTIONS, pa.struct([pa.field(n, pa.struct(fields)) for n in self._names]))

    def fold(self, batch: pa.RecordBatch, offsets: I64, first: int) -> pa.RecordBatch:
        """As `Fold.fold`."""
        out, place, _ = shown(batch, offsets)
        answers = [
            batch.take(pa.array(offsets[:-1] + number)) for number in range(len(self._names))
        ]
        out = put_totals(out, batch, offsets, TOTALS)
        if CUT_TOKENS in batch.schema.names:
            most = np.maximum.reduceat(batch.column(CUT_TOKENS).to_numpy(), offsets[:-1])
            out = put_column(out, CUT_TOKENS, pa.array(most))
        out = put_column(out, "value", self._value(answers, out))
        out = put_column(out, "text", self._text(answers))
        named = (place - offsets[:-1]).tolist()
        out = put_column(out, "error", self._errors(out, named))
        if "cut" in out.schema.names:
            cuts = [
                None if cut is None else pointer_step("", self._names[number]) + cut
                for number, cut in zip(named, out.column("cut").to_pylist(), strict=True)
            ]
            out = put_column(out, "cut", pa.array(cuts, pa.string()))
        field = self.field(batch.schema)
        parts = [
            pa.StructArray.from_arrays(
                [answer.column(part.name) for part in child.type], fields=list(child.type)
            )
            for answer, child in zip(answers, field.type, strict=True)
        ]
        return out.append_column(field, pa.StructArray.from_arrays(parts, fields=list(field.type)))

    def _value(self, answers: Sequence[pa.RecordBatch], out: pa.RecordBatch) -> pa.Array:
        type_ = out.schema.field("value").type
        arrays = []
        for number, answer in enumerate(answers):
            if self._are_texts[number]:
                is_error = pc.equal(answer.column("status"), Status.ERROR.value)
                array = null_where(answer.column("text"), is_error)
            else:
                array = answer.column("value").flatten()[number]
            arrays.append(array.cast(type_.field(number).type))
        is_error = pc.equal(out.column("status"), Status.ERROR.value)
        nothing = is_error
        for array in arrays:
            nothing = pc.and_(nothing, array.is_null())
        return pa.StructArray.from_arrays(arrays, fields=list(type_), mask=nothing)

    def _text(self, answers: Sequence[pa.RecordBatch]) -> pa.Array:
        texts = zip(*(answer.column("text").to_pylist() for answer in answers), strict=True)
        return pa.array(
            [json_text(dict(zip(self._names, row, strict=True))) for row in texts],
            pa.large_string(),
        )

    def _errors(self, out: pa.RecordBatch, named: Sequence[int]) -> pa.Array:
        errors = out.column("error").to_pylist()
        for number, error in zip(named, errors, strict=True):
            if error is not None:
                name = json.dumps(self._names[number], ensure_ascii=False)
                error["message"] = f"question {name}: {error['message']}"
        return pa.array(errors, out.schema.field("error").type)
