"""OpenAI batch files: a request a line, with an id, an endpoint and a body of parameters."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from batchradix.errors import InputError, RowError
from batchradix.jobs.base import BATCH_BYTES, DEFAULT_BATCH_ROWS
from batchradix.jobs.openai_request import (
    REQUEST_FIELDS,
    BadRequest,
    kind_of,
    read_request,
    seed_of_choice,
)
from batchradix.jobs.records import Record, RecordSource, clean_text, kinds_of_columns
from batchradix.scratch import Scratch
from batchradix.types import I64, Row

_LISTED = 5  # faults that a message lists at most
_BATCH = 1 << 14

NamedRecords = Callable[[], Iterator[tuple[str, Record]]]
"""All records from the beginning, each with the name of its file."""


def is_request(fields: Any) -> bool:
    """Whether a record has the shape of a request."""
    return isinstance(fields, dict) and fields.keys() >= set(REQUEST_FIELDS)


class OpenAIBatchSource(RecordSource):
    """Requests as rows of prompts and settings; a request that wants ``n`` answers is ``n`` rows.

    Ids are the requests' ``custom_id``. `batches` yields what requests ask for as columns
    (``messages``, ``prompt``, ``max_tokens``, ``tools``, ...), `own_batches` and the columns
    passed through are those of the lines. A request that cannot be run is a row with an error.

    `scan` raises `InputError`, with file and lines, where a custom_id is missing, empty, no text or
    there twice, and where requests name different models.
    """

    is_requests = True

    def __init__(
        self,
        name: str,
        records: NamedRecords,
        *,
        id_column: str | None = None,
        limit: int | None = None,
    ) -> None:
        super().__init__(name, id_column="custom_id", limit=limit)
        if id_column not in (None, "custom_id"):
            raise InputError(
                f"{name} is an OpenAI batch file, whose ids are its custom_ids; leave out the id "
                f"column {id_column!r}"
            )
        self._named_records = records
        self._asked: dict[str, None] = {}
        self._starts: I64 | None = None

    def _records(self) -> Iterator[Record]:
        return (record for _, record in self._named_records())

    def _limited(self) -> Iterator[tuple[str, Record]]:
        return islice(self._named_records(), self._limit)

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Those of the lines, then what bodies ask for."""
        if self._kinds is None:
            return None
        return tuple(dict.fromkeys([*self._kinds, *self._asked]))

    @property
    def id_column(self) -> str | None:
        return "custom_id"

    @property
    def starts(self) -> I64 | None:
        self.scan()
        return self._starts

    def scan(self) -> None:
        if self._kinds is not None:
            return
        kinds: dict[str, int] = {}
        look = _Look()
        num_choices = Scratch().column(np.int32)
        counts = array("i")
        for file, record in self._limited():
            count = 1
            if not isinstance(record.fields, RowError):
                kinds_of_columns(record.fields, kinds)
                look.at(file, record)
                try:
                    values, count = read_request(record.fields)
                    self._asked |= dict.fromkeys(values)
                except BadRequest:
                    pass
            counts.append(count)
            if len(counts) >= _BATCH:
                num_choices.append(np.frombuffer(counts, dtype=np.int32))
                counts = array("i")
        num_choices.append(np.frombuffer(counts, dtype=np.int32))
        sizes = num_choices.finish()
        look.refuse(self.name, self._limited)
        if not {"messages", "prompt"} & self._asked.keys():
            self._asked["prompt"] = None  # there is nothing to run, and so nothing to refuse
        self.requested_model = look.model
        self._num_rows = len(sizes)
        if (sizes > 1).any():
            self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
        self._kinds = kinds

    def batches(
        self, columns: Collection[str] | None, batch_rows: int = DEFAULT_BATCH_ROWS
    ) -> Iterator[list[Row]]:
        self.scan()
        wanted = None if columns is None else frozenset(columns)
        rows: list[Row] = []
        num_bytes = index = 0
        for number, (_, record) in enumerate(self._limited()):
            for row in self._choices(index, number, record, wanted):
                rows.append(row)
                index += 1
                num_bytes += record.num_bytes
                if len(rows) >= batch_rows or num_bytes >= BATCH_BYTES:
                    yield rows
                    rows, num_bytes = [], 0
        if rows:
            yield rows

    def input_batches(
        self, columns: Collection[str] | None, batch_rows: int = DEFAULT_BATCH_ROWS
    ) -> Iterator[list[Row]]:
        return super().batches(columns, batch_rows)

    def kind_batches(self) -> Iterator[pa.RecordBatch]:
        """One column, ``request``: what kind of response each request wants (`kind_of`)."""
        for rows in self.input_batches(None):
            kinds = [kind_of(row.values) if row.error is None else None for row in rows]
            yield pa.RecordBatch.from_arrays([pa.array(kinds, pa.string())], names=["request"])

    def _choices(
        self, index: int, number: int, record: Record, wanted: frozenset[str] | None
    ) -> Iterator[Row]:
        """The rows of a request, ``index`` being the number of the first."""
        row = replace(self._row(number, record, "custom_id", None), index=index, number=number)
        if row.error is not None:
            yield replace(row, values={})
            return
        try:
            values, count = read_request(row.values)
        except BadRequest as problem:
            message = clean_text(f"{row.place}: {problem.sentence}")
            yield replace(row, values={}, error=RowError(problem.code, message))
            return
        if wanted is not None:
            values = {name: value for name, value in values.items() if name in wanted}
        seed = values.get("seed")
        for choice in range(count):
            mine = values if seed is None else {**values, "seed": seed_of_choice(seed, choice)}
            yield replace(row, index=index + choice, values=mine)

    def _known_columns(self) -> tuple[str, ...]:
        self.scan()
        assert self._kinds is not None
        return tuple(self._kinds)


class _Look:
    """What the requests of a file are looked at for that no single one of them shows."""

    def __init__(self) -> None:
        self.model: str | None = None
        self._models: dict[str, str] = {}  # the place where each is named first
        self._unnamed: list[str] = []  # what is wrong with custom_ids
        self._num_unnamed = 0
        self._batch = array("q")
        self._hashes = Scratch().column(np.int64)

    def at(self, file: str, record: Record) -> None:
        """Takes note of a record that is an object."""
        fields = record.fields
        assert isinstance(fields, Mapping)
        custom_id = fields.get("custom_id")
        fault = _id_fault(custom_id)
        if fault is not None:
            self._num_unnamed += 1
            if len(self._unnamed) < _LISTED:
                self._unnamed.append(f"{_place(file, record)} {fault}")
            return
        self._batch.append(hash(custom_id))
        if len(self._batch) >= _BATCH:
            self._flush()
        body = fields.get("body")
        model = body.get("model") if isinstance(body, Mapping) else None
        if isinstance(model, str) and len(self._models) <= _LISTED:
            self._models.setdefault(model, _place(file, record))
            self.model = self.model or model

    def refuse(self, name: str, records: NamedRecords) -> None:
        """Raises `InputError` for what was found; ``records`` once more, to find the lines."""
        if self._num_unnamed:
            raise InputError(
                f"every request of {name} needs a custom_id of its own: "
                f"{_listing(self._unnamed, self._num_unnamed)}; give one to each"
            )
        if len(self._models) > 1:
            shown = [f"{model!r} in {place}" for model, place in self._models.items()]
            raise InputError(
                f"the requests of {name} name different models, and a run has one: "
                f"{_listing(shown, len(shown))}; give each model a file of its own"
            )
        self._flush()
        hashes = np.sort(self._hashes.finish())
        repeated = set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())
        if repeated:
            _refuse_twins(name, records, repeated)

    def _flush(self) -> None:
        self._hashes.append(np.frombuffer(self._batch, dtype=np.int64))
        self._batch = array("q")


def _refuse_twins(name: str, records: NamedRecords, hashes: set[int]) -> None:
    places: dict[str, list[str]] = {}
    for file, record in records():
        fields = record.fields
        custom_id = fields.get("custom_id") if isinstance(fields, Mapping) else None
        if isinstance(custom_id, str) and hash(custom_id) in hashes:
            places.setdefault(custom_id, []).append(_place(file, record))
    twins = {custom_id: found for custom_id, found in places.items() if len(found) > 1}
    if not twins:  # two ids of one hash
        return
    shown = [
        f"{custom_id!r} in {_listing(found, len(found), ' and ')}"
        for custom_id, found in twins.items()
    ]
    raise InputError(
        f"custom_ids of {name} stand in more than one line, so that answers could not be told "
        f"apart: {_listing(shown, len(shown))}; make them differ"
    )


def _id_fault(custom_id: Any) -> str | None:
    if custom_id is None:
        return "has none"
    if not isinstance(custom_id, str):
        return f"has {str(custom_id)[:40]!r}, which is no text"
    if not custom_id:
        return "has an empty one"
    if clean_text(custom_id) is not custom_id:
        return "has half a character (a lone surrogate) in it"
    return None


def _place(file: str, record: Record) -> str:
    return f"line {record.line} of {file}" if record.line is not None else f"a record of {file}"


def _listing(texts: list[str], count: int, separator: str = "; ") -> str:
    shown = separator.join(texts[:_LISTED])
    more = count - len(texts[:_LISTED])
    return f"{shown} and {more:,} more" if more > 0 else shown
