"""Arrow types of a schema, and the conversion of parsed answers into them.

====================================  =======================================================
schema                                Arrow
====================================  =======================================================
object with ``properties``            struct in property order, every field nullable
array                                 list of the items' type
string; formats uuid, email, ...      string
format date, time, date-time          date32, time64[us] (in UTC), timestamp[us, UTC]
integer                               int64; decimal128(38, 0) where bounds pass int64
number, boolean, null                 float64, bool, null
two or more texts to choose from      dictionary of int32 and string (null beside them or not)
other enums and const                 the type of their values (with or without null)
a type or null                        the type, nullable
anything else                         JSON text in a string column
====================================  =======================================================

Anything else is: other unions, parts that refer to themselves, objects whose names are open
(``additionalProperties``, ``patternProperties``), tuples of several types. A cell of JSON text
tells ``7``, ``"7"`` and ``null`` apart; its field has the metadata ``batchradix.encoding: json``.
(Arrow's own ``arrow.json`` extension type is not used, nor its mark on the field, which readers
take for the same: Polars before 1.36 cannot read it, and later ones, 2.1 included, can neither
compare it with text nor write it to Parquet.)

In a struct an absent optional property and a null one are both null, except in JSON text,
where null is the text ``null``. Every type follows from the schema alone.
"""

from __future__ import annotations

import datetime
import decimal
import re
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from batchradix.errors import RowErrorCode
from batchradix.schema.answers import InvalidAnswer, json_text, pointer_step
from batchradix.schema.grammar import INT64_MAX, INT64_MIN, is_beyond_int64
from batchradix.schema.merge import Node
from batchradix.schema.normalise import Normalised

JSON_METADATA = {b"batchradix.encoding": b"json"}
_MAX_DECIMAL = 10**38 - 1
_MAX_REFERENCES = 50  # followed one after the other
_FINE_FRACTION = re.compile(r"\.\d{6}0*[1-9]")


class Codec(Protocol):
    """One Arrow type and the way into it."""

    @property
    def type(self) -> Any:
        """The ``pa.DataType``."""
        ...

    def convert(self, value: Any, pointer: str) -> Any:
        """What pyarrow turns into a cell of the type; None for null.

        Raises `InvalidAnswer` (``not_representable``) for a value the type does not hold.
        """
        ...


def _misfit(value: Any, kind: str, pointer: str) -> InvalidAnswer:
    text = json_text(value)
    short = text if len(text) <= 60 else f"{text[:57]}..."
    return InvalidAnswer(
        RowErrorCode.NOT_REPRESENTABLE, f"{short} does not fit the column's type {kind}", pointer
    )


@dataclass(frozen=True, slots=True)
class JsonCodec:
    """JSON text; nothing is lost."""

    @property
    def type(self) -> Any:
        return pa.string()

    def convert(self, value: Any, pointer: str) -> Any:
        return json_text(value)


@dataclass(frozen=True, slots=True)
class ScalarCodec:
    """``kind``: null, boolean, string, choice (a string out of a few), int64, decimal, float64,
    date, time or date-time."""

    kind: str

    @property
    def type(self) -> Any:
        return {
            "null": pa.null(),
            "boolean": pa.bool_(),
            "string": pa.string(),
            "choice": pa.dictionary(pa.int32(), pa.string()),
            "int64": pa.int64(),
            "decimal": pa.decimal128(38, 0),
            "float64": pa.float64(),
            "date": pa.date32(),
            "time": pa.time64("us"),
            "date-time": pa.timestamp("us", tz="UTC"),
        }[self.kind]

    def convert(self, value: Any, pointer: str) -> Any:
        if value is None:
            return None
        fitting = _fit_scalar(self.kind, value)
        if fitting is None:
            raise _misfit(value, str(self.type), pointer)
        return fitting


def _fit_scalar(kind: str, value: Any) -> Any:
    """The value for pyarrow, None where it does not fit."""
    if kind in ("boolean", "string", "choice"):
        return value if isinstance(value, bool if kind == "boolean" else str) else None
    if kind in ("date", "time", "date-time"):
        return _fit_time(kind, value) if isinstance(value, str) else None
    if kind == "null" or isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if kind == "float64":
        # An integer that float64 would round is refused rather than changed.
        try:
            return float(value) if float(value) == value else None
        except OverflowError:
            return None
    if isinstance(value, float):
        if not value.is_integer():
            return None
        value = int(value)
    if kind == "int64":
        return value if INT64_MIN <= value <= INT64_MAX else None
    return decimal.Decimal(value) if abs(value) <= _MAX_DECIMAL else None


def _fit_time(kind: str, text: str) -> Any:
    if _FINE_FRACTION.search(text):  # finer than a microsecond
        return None
    text = re.sub(r"(\.\d{6})\d+", r"\1", text.upper())
    try:
        if kind == "date":
            return datetime.date.fromisoformat(text)
        if kind == "date-time":
            return _in_utc(datetime.datetime.fromisoformat(text))
        day = datetime.datetime.combine(
            datetime.date(2000, 1, 2), datetime.time.fromisoformat(text)
        )
        return _in_utc(day).time()
    except (ValueError, OverflowError):  # second 60, or a year outside 1 to 9999 in UTC
        return None


def _in_utc(moment: datetime.datetime) -> datetime.datetime:
    if moment.tzinfo is None:
        return moment.replace(tzinfo=datetime.UTC)
    return moment.astimezone(datetime.UTC)


@dataclass(frozen=True, slots=True)
class ListCodec:
    item: Codec

    @property
    def type(self) -> Any:
        return pa.list_(codec_field("item", self.item))

    def convert(self, value: Any, pointer: str) -> Any:
        if value is None:
            return None
        if not isinstance(value, list):
            raise _misfit(value, "list", pointer)
        return [
            self.item.convert(part, pointer_step(pointer, index))
            for index, part in enumerate(value)
        ]


@dataclass(frozen=True, slots=True)
class StructCodec:
    fields: tuple[tuple[str, Codec], ...]

    @property
    def type(self) -> Any:
        return pa.struct([codec_field(name, codec) for name, codec in self.fields])

    def convert(self, value: Any, pointer: str) -> Any:
        if value is None:
            return None
        if not isinstance(value, dict):
            raise _misfit(value, "struct", pointer)
        cell = {
            name: codec.convert(value[name], pointer_step(pointer, name))
            for name, codec in self.fields
            if name in value
        }
        if len(cell) < len(value):
            extra = next(name for name in value if name not in cell)
            raise InvalidAnswer(
                RowErrorCode.NOT_REPRESENTABLE,
                f"the property {extra!r} has no column, since the schema does not name it",
                pointer,
            )
        return cell


def codec_field(name: str, codec: Codec) -> Any:
    """The ``pa.Field`` of a codec, nullable, marked where its cells are JSON text."""
    metadata = JSON_METADATA if isinstance(codec, JsonCodec) else None
    return pa.field(name, codec.type, nullable=True, metadata=metadata)


def holds_json(field: Any) -> bool:
    """Whether a ``pa.Field`` says that the strings under it are JSON texts."""
    return bool((field.metadata or {}).get(b"batchradix.encoding") == b"json")


def codec_of(normalised: Normalised) -> Codec:
    """The codec of a whole schema."""
    inside = () if normalised.root_name is None else (normalised.root_name,)
    return _CodecBuilder(normalised).build(normalised.root, inside)


class _CodecBuilder:
    def __init__(self, normalised: Normalised) -> None:
        self._defs = normalised.defs

    def build(self, node: Node, inside: tuple[str, ...]) -> Codec:
        if "$ref" in node:
            name = node["$ref"]
            if name in inside:
                return JsonCodec()
            return self.build(self._defs[name], (*inside, name))
        if len(self._texts(node) - {None}) > 1:
            return ScalarCodec("choice")
        if "enum" in node:
            return _joined([_codec_of_value(value) for value in node["enum"]])
        if "anyOf" in node:
            return _joined([self.build(branch, inside) for branch in node["anyOf"]])
        types = node.get("type", [])
        if not types:
            return JsonCodec()
        return _joined([self._typed(node, kind, inside) for kind in types])

    def _texts(self, node: Node, depth: int = 0) -> set[str | None]:
        """The texts (and None) that the node chooses from; empty where it takes anything else."""
        if "$ref" in node and depth < _MAX_REFERENCES:
            return self._texts(self._defs[node["$ref"]], depth + 1)
        if "enum" in node:
            values = node["enum"]
            is_text = all(value is None or isinstance(value, str) for value in values)
            return set(values) if is_text else set()
        if "anyOf" in node:
            branches = [self._texts(branch, depth + 1) for branch in node["anyOf"]]
            return set().union(*branches) if all(branches) else set()
        return {None} if node.get("type") == ["null"] else set()

    def _typed(self, node: Node, kind: str, inside: tuple[str, ...]) -> Codec:
        if kind == "object":
            return self._struct(node, inside)
        if kind == "array":
            return self._list(node, inside)
        if kind == "integer":
            return ScalarCodec("decimal" if is_beyond_int64(node) else "int64")
        if kind == "string":
            name = node.get("format")
            return ScalarCodec(name if name in ("date", "time", "date-time") else "string")
        return ScalarCodec("float64" if kind == "number" else kind)

    def _struct(self, node: Node, inside: tuple[str, ...]) -> Codec:
        properties = node.get("properties", {})
        is_open = node.get("additionalProperties", False) is not False
        if not properties or is_open or "patternProperties" in node:
            return JsonCodec()
        if node.get("minProperties", 0) > len(properties):
            return JsonCodec()
        return StructCodec(
            tuple((name, self.build(part, inside)) for name, part in properties.items())
        )

    def _list(self, node: Node, inside: tuple[str, ...]) -> Codec:
        rest = node.get("items", {})
        if "prefixItems" not in node:
            return ListCodec(JsonCodec() if rest is False else self.build(rest, inside))
        items = [self.build(part, inside) for part in node["prefixItems"]]
        if "items" in node and rest is not False:
            items.append(self.build(rest, inside))
        if any(item != items[0] for item in items):
            return JsonCodec()
        return ListCodec(items[0])


def _joined(codecs: list[Codec]) -> Codec:
    """The codec for values of any of several; null joins with everything, choices with text."""
    distinct = list(dict.fromkeys(codecs))
    if ScalarCodec("string") in distinct:
        distinct = [codec for codec in distinct if codec != ScalarCodec("choice")]
    null: Codec = ScalarCodec("null")
    others = [codec for codec in distinct if codec != null]
    if not others:
        return null
    return others[0] if len(others) == 1 else JsonCodec()


def _codec_of_value(value: Any) -> Codec:
    if value is None:
        return ScalarCodec("null")
    if isinstance(value, bool):
        return ScalarCodec("boolean")
    if isinstance(value, str):
        return ScalarCodec("string")
    if isinstance(value, int):
        if INT64_MIN <= value <= INT64_MAX:
            return ScalarCodec("int64")
        return ScalarCodec("decimal") if abs(value) <= _MAX_DECIMAL else JsonCodec()
    if isinstance(value, float):
        return ScalarCodec("float64")
    if isinstance(value, dict) and value:
        return StructCodec(tuple((name, _codec_of_value(part)) for name, part in value.items()))
    if isinstance(value, list) and value:
        item = _joined([_codec_of_value(part) for part in value])
        return ListCodec(item)
    return JsonCodec()
