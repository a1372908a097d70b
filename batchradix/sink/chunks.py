"""The answers to the parts of a text, brought together: one answer, and those of the parts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from batchradix.schema.arrow_types import holds_json
from batchradix.sink.combine import Rules
from batchradix.sink.fold import PART_COLUMNS, TOTALS, null_where, put_column, put_totals, shown
from batchradix.sink.json_text import json_texts
from batchradix.types import I64, Status

PARTS = "parts"


class Chunks:
    """A `Fold` of the answers to the parts of a row's text.

    Where ``starts`` has one result for a row, that is its own and ``parts`` is null. Where it has
    several they are combined by ``rules``, and ``parts`` lists them; with ``has_ask`` the last of
    them is what the model said of the others. ``field`` is that of the finished values, None for
    any text; with ``names`` rows take turns to be answers to these questions, each in its own field
    of the value, of which those marked in ``are_texts`` are any text. A row is as bad as its worst
    part, and has no value then.
    """

    def __init__(
        self,
        starts: I64,
        rules: Rules,
        field: pa.Field | None,
        *,
        has_ask: bool,
        names: Sequence[str] = (),
        are_texts: Sequence[bool] = (),
    ) -> None:
        self.starts = starts
        self._rules, self._field, self._has_ask = rules, field, has_ask
        self._names, self._are_texts = tuple(names), tuple(are_texts)
        self.identity = json.dumps(sorted(rules.by_path.items()))

    def field(self, columns: pa.Schema) -> pa.Field:
        """The column of parts beside the result columns ``columns``."""
        fields = [columns.field(name) for name in self._shown_columns(columns)]
        return pa.field(PARTS, pa.list_(pa.struct(fields)))

    def _shown_columns(self, columns: pa.Schema) -> list[str]:
        # Of a question the text says it all; the value would be an object with its field alone.
        left_out = {"value"} if self._names else set()
        return [n for n in PART_COLUMNS if n in columns.names and n not in left_out]

    def fold(self, batch: pa.RecordBatch, offsets: I64, first: int) -> pa.RecordBatch:
        """As `Fold.fold`."""
        out = put_totals(shown(batch, offsets).batch, batch, offsets, TOTALS)
        sizes = np.diff(offsets)
        groups = np.flatnonzero(sizes > 1)
        if len(groups):
            out = self._combined(out, batch, offsets, groups, first)
        return out.append_column(self.field(batch.schema), self._parts(batch, offsets))

    def _combined(
        self, out: pa.RecordBatch, batch: pa.RecordBatch, offsets: I64, groups: I64, first: int
    ) -> pa.RecordBatch:
        """``out`` with one value and text for each of ``groups`` that has several results."""
        rows = np.concatenate([np.arange(offsets[g], offsets[g + 1]) for g in groups])
        several = batch.take(pa.array(rows))
        texts = several.column("text").to_pylist()
        statuses = out.column("status").to_pylist()
        values = None
        if self._field is not None:
            values = several.column("value").to_pylist()
        found: list[Any] = []
        said: list[str | None] = []
        start = 0
        for group in groups.tolist():
            stop = start + int(offsets[group + 1] - offsets[group])
            value, text = None, None
            if statuses[group] == Status.OK:
                number = (first + group) % len(self._names) if self._names else None
                own = values[start:stop] if values is not None else None
                value, text = self._one(own, texts[start:stop], number)
            found.append(value)
            said.append(text)
            start = stop
        place = np.arange(len(sizes := np.diff(offsets)))
        place[groups] = len(sizes) + np.arange(len(groups))
        columns: dict[str, pa.Array] = {"text": pa.array(said, pa.large_string())}
        if self._field is not None:
            columns["value"] = pa.array(found, out.schema.field("value").type)
        for name, column in columns.items():
            both = pa.concat_arrays([out.column(name), column])
            out = put_column(out, name, both.take(pa.array(place)))
        return self._with_texts(out, groups, first)

    def _one(
        self, values: list[Any] | None, texts: list[str], number: int | None
    ) -> tuple[Any, str | None]:
        """The combined value of one row, and its text where that is not to be made of the value."""
        last = len(texts) - 1 if self._has_ask else len(texts)
        name = "" if number is None else self._names[number]
        is_text = self._field is None if number is None else self._are_texts[number]
        if is_text:
            asked = texts[-1] if self._has_ask else None
            return None, self._rules.text(texts[:last], asked, name)
        assert values is not None
        assert self._field is not None
        asked = values[-1] if self._has_ask else None
        type_ = self._field.type
        if number is None:
            return self._rules.value(values[:last], asked, type_), None
        inner = [value[name] for value in values]
        asked = inner[-1] if self._has_ask else None
        child = type_.field(name).type
        return {name: self._rules.value(inner[:last], asked, child, name)}, None

    def _with_texts(self, out: pa.RecordBatch, groups: I64, first: int) -> pa.RecordBatch:
        """``out`` with the texts of combined values: their JSON, or the text that a value is."""
        if self._field is None:
            return out
        texts = out.column("text").to_pylist()
        statuses = out.column("status").to_pylist()
        kinds = len(self._names) or 1
        for kind in range(kinds):
            mine = groups[(first + groups) % kinds == kind]
            if not len(mine) or (self._names and self._are_texts[kind]):
                continue
            array = out.column("value").take(pa.array(mine))
            field = self._field
            if self._names:
                array, field = array.flatten()[kind], field.type.field(kind)
            is_plain = pa.types.is_string(array.type) and not holds_json(field)
            written = array.to_pylist() if is_plain else json_texts(array, field)
            for group, text in zip(mine.tolist(), written, strict=True):
                if statuses[group] == Status.OK:
                    texts[group] = text
        return put_column(out, "text", pa.array(texts, pa.large_string()))

    def _parts(self, batch: pa.RecordBatch, offsets: I64) -> pa.Array:
        """The list of each row's parts, null for a row that is whole."""
        sizes = np.diff(offsets)
        is_whole = sizes == 1
        keep = np.repeat(~is_whole, sizes)
        if self._has_ask:
            keep[offsets[1:][~is_whole] - 1] = False
        fields = list(self.field(batch.schema).type.value_type)
        items = batch.take(pa.array(np.flatnonzero(keep)))
        arrays = [items.column(field.name) for field in fields]
        ends = np.zeros(len(sizes) + 1, dtype=np.int64)
        np.cumsum(np.add.reduceat(keep.astype(np.int64), offsets[:-1]), out=ends[1:])
        lists = pa.ListArray.from_arrays(
            pa.array(ends, pa.int32()),
            pa.StructArray.from_arrays(arrays, fields=fields),
            type=pa.list_(pa.struct(fields)),
        )
        return null_where(lists, is_whole)
