"""A table's answers held against the right ones in a column of its input."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pyarrow as pa

from batchradix.errors import InputError, OptionError, SinkError
from batchradix.pipeline.parts import Parts
from batchradix.pipeline.table import Table
from batchradix.report.gold import WHOLE, GoldKind, GoldScores
from batchradix.schema.arrow_types import holds_json
from batchradix.sink.durable import write_durably
from batchradix.sink.folder import RunFolder
from batchradix.sink.json_text import json_texts
from batchradix.types import Status

SUFFIX = ".gold.json"
"""What the name of the file ends in that has the scores, beside the output's whole name."""


def check_gold(parts: Parts, column: str) -> None:
    """Raises `InputError` where the input has no such column and `OptionError` where answers are
    not compared with it, or prompts show it."""
    source = parts.source
    if source.is_requests:
        raise OptionError(
            f"`gold` is for tables of rows, and {source.name} is an OpenAI batch file, which has "
            f"no column of right answers; compare its answers by their custom_id"
        )
    columns = source.columns
    if columns and column not in columns:
        raise InputError(
            f"{source.name} has no column {column!r} of right answers; its columns are: "
            f"{', '.join(columns)}"
        )
    if column in parts.prompts.required_columns:
        raise OptionError(
            f"the prompts are made of the column {column!r}, and `gold` says that it holds the "
            f"right answers; leave it out of the prompts, or name another"
        )


def score(parts: Parts, table: Table, column: str) -> GoldScores:
    """The scores of a finished table. Streams answers and right ones in input order.

    Raises `InputError` when the input has changed, and `SinkError`.
    """
    values = parts.values
    field = None if values is None else values.arrow_field("value")
    type_ = None if field is None else field.type
    kind: GoldKind = "any" if field is not None and holds_json(field) else _kind(type_)
    scores = GoldScores(column=column, kind=kind, labelled=_labelled(type_))
    for batch, beside in table.results(column):
        answers = _json(batch.column("text" if field is None else "value"), field)
        golds = _json(beside.column(0), beside.schema.field(0))
        statuses = batch.column("status").to_pylist()
        rows = batch.column("row").to_pylist()
        for row, status, answer, gold in zip(rows, statuses, answers, golds, strict=True):
            is_ok = status == Status.OK
            scores.add(row, answer if is_ok else None, gold, is_ok=is_ok)
    return scores


def write_scores(folder: RunFolder, scores: GoldScores) -> None:
    """Writes them beside the output. Raises `SinkError`."""
    path = folder.output.with_name(folder.output.name + SUFFIX)
    data = json.dumps(scores.to_json(), ensure_ascii=False, indent=1).encode(
        errors="backslashreplace"
    )
    try:
        write_durably(data, folder.tmp / "gold.json", path)
    except OSError as error:
        raise SinkError(
            f"the scores cannot be written to {path}: {error.strerror or error}; the table itself "
            f"is finished"
        ) from error


def _json(array: pa.Array, field: pa.Field | None) -> Iterator[Any]:
    for text in json_texts(array, field):
        yield json.loads(text, parse_float=Decimal)


def _kind(type_: pa.DataType | None) -> GoldKind:
    if type_ is None:
        return "text"
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
    if pa.types.is_struct(type_) or pa.types.is_map(type_):
        return "object"
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return "array"
    if pa.types.is_boolean(type_):
        return "boolean"
    if pa.types.is_integer(type_) or pa.types.is_floating(type_) or pa.types.is_decimal(type_):
        return "number"
    if isinstance(type_, pa.BaseExtensionType):
        return "any"
    return "string"


def _labelled(type_: pa.DataType | None) -> frozenset[str]:
    """The fields whose values are out of a few."""
    if type_ is None:
        return frozenset()

    def is_label(one: pa.DataType) -> bool:
        return bool(pa.types.is_dictionary(one) or pa.types.is_boolean(one))

    if pa.types.is_struct(type_):
        fields = (type_.field(i) for i in range(type_.num_fields))
        return frozenset(field.name for field in fields if is_label(field.type))
    return frozenset([WHOLE]) if is_label(type_) else frozenset()
