"""Schemas that only a few texts match: all of these texts.

What is read is the schema that the grammar compiler would get (`GrammarWriter`), so the texts are
those that its grammar would allow: compact JSON, properties in the order of the schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from batchradix.schema.answers import json_text

MAX_TEXTS = 1024
MAX_BYTES = 64 * 1024
_MAX_ITEMS = 64  # longer arrays are taken for open ones

_OBJECT_KEYWORDS = frozenset(
    {"type", "properties", "required", "minProperties", "maxProperties", "additionalProperties"}
)
_ARRAY_KEYWORDS = frozenset({"type", "prefixItems", "items", "minItems", "maxItems"})


class _Open(Exception):
    """More texts than are worth listing, or no end of them."""


def finite_texts(schema: Any) -> tuple[str, ...] | None:
    """Every text that matches the written ``schema``, each once, in the schema's order.

    None where there are more than `MAX_TEXTS` or `MAX_BYTES` of them in UTF-8, or where a part of
    the schema is one whose texts are not listed (strings, numbers, anything that is not closed).
    """
    try:
        texts = _Lister(schema).texts(schema)
        if sum(len(text.encode()) for text in texts) > MAX_BYTES:
            return None
    except (_Open, UnicodeEncodeError):  # half a surrogate pair is no text
        return None
    return tuple(texts)


class _Lister:
    def __init__(self, root: Any) -> None:
        self._defs: dict[str, Any] = root.get("$defs", {}) if isinstance(root, dict) else {}
        self._listed: dict[str, list[str] | None] = {}  # None while it is being listed

    def texts(self, schema: Any) -> list[str]:
        """The distinct texts of a part of the schema."""
        found: dict[str, None] = {}
        for text in self._every(schema):
            found[text] = None
            if len(found) > MAX_TEXTS:
                raise _Open
        return list(found)

    def _every(self, schema: Any) -> Iterator[str]:
        if not isinstance(schema, dict):
            raise _Open
        if "$ref" in schema:
            yield from self._referred(schema["$ref"].removeprefix("#/$defs/"))
        elif "enum" in schema or "const" in schema:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            yield from (json_text(_whole(value)) for value in values)
        elif "anyOf" in schema:
            for branch in schema["anyOf"]:
                yield from self.texts(branch)
        elif schema.get("type") in ("boolean", "null"):
            yield from ("true", "false") if schema["type"] == "boolean" else ("null",)
        elif schema.get("type") == "integer":
            yield from self._integers(schema)
        elif schema.get("type") == "array" and schema.keys() - {"$defs"} <= _ARRAY_KEYWORDS:
            yield from self._arrays(schema)
        elif schema.get("type") == "object" and schema.keys() - {"$defs"} <= _OBJECT_KEYWORDS:
            yield from self._objects(schema)
        else:
            raise _Open

    def _referred(self, name: str) -> list[str]:
        if name not in self._listed:
            self._listed[name] = None
            self._listed[name] = self.texts(self._defs[name])
        found = self._listed[name]
        if found is None:  # it holds itself
            raise _Open
        return found

    @staticmethod
    def _integers(schema: dict[str, Any]) -> Iterator[str]:
        if not schema.keys() >= {"minimum", "maximum"} or "multipleOf" in schema:
            raise _Open
        yield from map(str, range(schema["minimum"], schema["maximum"] + 1))

    def _arrays(self, schema: dict[str, Any]) -> Iterator[str]:
        prefix, items = schema.get("prefixItems", []), schema.get("items", {})
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if items is False:
            most = len(prefix) if most is None else min(most, len(prefix))
        if most is None or most > _MAX_ITEMS:
            raise _Open
        for length in range(least, most + 1):
            parts = [prefix[i] if i < len(prefix) else items for i in range(length)]
            for values in self._together([self.texts(part) for part in parts]):
                yield f"[{','.join(values)}]"

    def _objects(self, schema: dict[str, Any]) -> Iterator[str]:
        if schema.get("additionalProperties") is not False:
            raise _Open
        properties, required = schema.get("properties", {}), schema.get("required", ())
        least = schema.get("minProperties", 0)
        most = schema.get("maxProperties", len(properties))
        columns = []
        for name, part in properties.items():
            members = [f"{json_text(name)}:{text}" for text in self.texts(part)]
            columns.append(members if name in required else [*members, ""])
        for row in self._together(columns):
            present = [member for member in row if member]
            if least <= len(present) <= most:
                yield "{" + ",".join(present) + "}"

    @staticmethod
    def _together(columns: list[list[str]]) -> list[tuple[str, ...]]:
        """One of each column, the last one changing first."""
        rows: list[tuple[str, ...]] = [()]
        for column in columns:
            if len(rows) * len(column) > MAX_TEXTS:
                raise _Open
            rows = [(*row, text) for row in rows for text in column]
        return rows


def _whole(value: Any) -> Any:
    """Whole floats as integers, as the grammar compiler writes them."""
    if isinstance(value, list):
        return [_whole(part) for part in value]
    if isinstance(value, dict):
        return {key: _whole(part) for key, part in value.items()}
    if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53:
        return value if str(value) == "-0.0" else int(value)
    return value
