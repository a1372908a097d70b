"""Arrow arrays to JSON texts, column by column, with every digit and character kept.

Integers and decimals are written with all their digits. NaN and infinities, which JSON has
not, become null. Characters beyond ASCII stay as they are. Binary becomes base64, dates and
times ISO 8601 (a timestamp with a zone carries its offset), durations ISO 8601 seconds
(``PT1.5S``), maps with string keys objects and other maps lists of ``{"key", "value"}``.
Columns of type ``arrow.json``, and strings whose field says that they hold JSON text (as
`schema.arrow_types` marks them), are embedded, not quoted. A null field of a struct is written
as ``null``, never left out (answers themselves are not: see `sink.jsonl`).
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
from collections.abc import Sequence
from json.encoder import encode_basestring as quote
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from batchradix.schema.arrow_types import holds_json


def json_texts(array: pa.Array, field: pa.Field | None = None) -> list[str]:
    """One JSON text (a single line) an element; ``"null"`` for nulls. ``field`` is the one the
    array stands under, whose metadata may say that strings are JSON already."""
    type_ = array.type
    if field is not None and holds_json(field):
        return [embedded(x) for x in array.to_pylist()]
    if isinstance(type_, pa.BaseExtensionType):
        storage = array.storage
        if type_.extension_name == "arrow.json":
            return [embedded(x) for x in storage.to_pylist()]
        return json_texts(storage)
    if pa.types.is_dictionary(type_):
        return json_texts(array.cast(type_.value_type))
    if pa.types.is_run_end_encoded(type_):
        return json_texts(pc.run_end_decode(array))
    if pa.types.is_list_view(type_) or pa.types.is_large_list_view(type_):
        parts = [x.values for x in array]
        return ["null" if x is None else f"[{','.join(json_texts(x))}]" for x in parts]
    if pa.types.is_struct(type_):
        return _structs(array)
    if pa.types.is_map(type_):
        return _maps(array)
    if pa.types.is_fixed_size_list(type_):
        size = type_.list_size
        used = array.values.slice(array.offset * size, len(array) * size)
        inner = json_texts(used, type_.value_field)
        starts: Sequence[int] = (
            range(0, len(array) * size + 1, size) if size else [0] * (len(array) + 1)
        )
        return _joined(array, starts, inner)
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        starts, first, last = _starts(array)
        used = array.values.slice(first, last - first)
        return _joined(array, starts, json_texts(used, type_.value_field))
    return _scalars(array)


def _scalars(array: pa.Array) -> list[str]:
    type_ = array.type
    if pa.types.is_boolean(type_):
        words = {True: "true", False: "false", None: "null"}
        return [words[x] for x in array.to_pylist()]
    if pa.types.is_integer(type_):
        return ["null" if x is None else str(x) for x in array.to_pylist()]
    if pa.types.is_floating(type_):
        return [_number(x) for x in _floats(array)]
    if pa.types.is_decimal(type_):
        return ["null" if x is None else format(x, "f") for x in array.to_pylist()]
    return ["null" if x is None else quote(x) for x in plain_texts(array)]


def plain_texts(array: pa.Array) -> list[str | None]:
    """The elements of a flat column as bare text, None for nulls: strings as they are, dates
    and times ISO 8601, binary base64, other types as Python writes them."""
    type_ = array.type
    if pa.types.is_timestamp(type_):
        return [None if x is None else _iso(x) for x in _timestamps(array)]
    if pa.types.is_date(type_) or pa.types.is_time(type_):
        return list(array.cast(pa.string()).to_pylist())
    if pa.types.is_duration(type_):
        factor = {"s": 0, "ms": 3, "us": 6, "ns": 9}[type_.unit]
        counts = array.cast(pa.int64()).to_pylist()
        return [None if x is None else _duration(x, factor) for x in counts]
    items = array.to_pylist()
    if any(isinstance(x, bytes) for x in items):
        return [None if x is None else base64.b64encode(x).decode("ascii") for x in items]
    return [x if x is None or isinstance(x, str) else str(x) for x in items]


def _timestamps(array: pa.Array) -> list[str | None]:
    """Arrow's spelling; in UTC where the zone's rules cannot be had on this machine."""
    if array.type.tz not in (None, "UTC", "Z", "+00:00"):
        with contextlib.suppress(pa.ArrowException):
            return list(array.cast(pa.string()).to_pylist())
    naive = array.cast(pa.int64()).cast(pa.timestamp(array.type.unit))
    mark = "" if array.type.tz is None else "Z"
    return [None if x is None else x + mark for x in naive.cast(pa.string()).to_pylist()]


def _floats(array: pa.Array) -> list[Any]:
    if pa.types.is_float64(array.type):
        return list(array.to_pylist())
    # numpy scalars print the shortest text that reads back as the same narrow float
    values = array.fill_null(0).to_numpy(zero_copy_only=False)
    valid = array.is_valid().to_pylist()
    return [x if ok else None for x, ok in zip(values, valid, strict=True)]


def _number(x: Any) -> str:
    return "null" if x is None or not math.isfinite(x) else str(x)


def _iso(text: str) -> str:
    """Arrow's ``2024-01-02 03:04:05+0100`` as ISO 8601 ``2024-01-02T03:04:05+01:00``."""
    text = text.replace(" ", "T", 1)
    return f"{text[:-2]}:{text[-2:]}" if text[-5:-4] in ("+", "-") and "T" in text[:-5] else text


def _duration(count: int, factor: int) -> str:
    sign, digits = ("-" if count < 0 else ""), str(abs(count)).rjust(factor + 1, "0")
    whole, part = (digits[:-factor], digits[-factor:].rstrip("0")) if factor else (digits, "")
    return f"{sign}PT{whole}{'.' + part if part else ''}S"


def embedded(text: str | None) -> str:
    """A JSON text within a line of JSON; quoted where it is not JSON after all."""
    if text is None:
        return "null"
    if not is_json(text):
        return quote(text)
    # valid JSON has line ends only between its tokens
    return text.replace("\n", " ").replace("\r", " ")


def is_json(text: str | None) -> bool:
    """Whether a text is strict JSON."""
    if text is None:
        return False
    try:
        json.loads(text, parse_constant=_refuse)
    except ValueError:
        return False
    return True


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def _structs(array: pa.Array) -> list[str]:
    fields = [array.type.field(i) for i in range(array.type.num_fields)]
    names = [quote(field.name) for field in fields]
    children = [json_texts(array.field(i), field) for i, field in enumerate(fields)]
    rows = object_texts(names, children, len(array))
    if not array.null_count:
        return rows
    return [r if ok else "null" for r, ok in zip(rows, array.is_valid().to_pylist(), strict=True)]


def object_texts(
    quoted_names: Sequence[str], columns: Sequence[Sequence[str]], num_rows: int
) -> list[str]:
    """One JSON object a row from columns of JSON texts of equal length."""
    if not columns:
        return ["{}"] * num_rows
    heads = [f"{',' if i else '{'}{name}:" for i, name in enumerate(quoted_names)]
    return [
        "".join([part for pair in zip(heads, cells, strict=True) for part in pair]) + "}"
        for cells in zip(*columns, strict=True)
    ]


def _starts(array: pa.Array) -> tuple[list[int], int, int]:
    """Offsets of a list array from 0 on, and which part of its values it uses."""
    offsets = array.offsets
    first, last = offsets[0].as_py(), offsets[-1].as_py()
    return pc.subtract(offsets, offsets[0]).to_pylist(), first, last


def _joined(array: pa.Array, starts: Sequence[int], inner: list[str]) -> list[str]:
    return [
        f"[{','.join(inner[starts[i] : starts[i + 1]])}]" if ok else "null"
        for i, ok in enumerate(array.is_valid().to_pylist())
    ]


def _maps(array: pa.Array) -> list[str]:
    starts, first, last = _starts(array)
    keys, items = (x.slice(first, last - first) for x in (array.keys, array.items))
    item_texts = json_texts(items)
    if pa.types.is_string(keys.type) or pa.types.is_large_string(keys.type):
        pairs = [f"{quote(k)}:{v}" for k, v in zip(keys.to_pylist(), item_texts, strict=True)]
        opening, closing = "{", "}"
    else:
        pairs = object_texts(['"key"', '"value"'], [json_texts(keys), item_texts], len(keys))
        opening, closing = "[", "]"
    return [
        opening + ",".join(pairs[starts[i] : starts[i + 1]]) + closing if ok else "null"
        for i, ok in enumerate(array.is_valid().to_pylist())
    ]
