"""A grammar's JSON Schema as the closer walks it: alternatives, and the shortest value of each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from batchradix.engine.grammar.pattern_walk import PatternWalk
from batchradix.engine.grammar.scalar_rest import integer_rest, number_rests, string_rest
from batchradix.schema.pattern_parser import UnsupportedPattern

Schema = dict[str, Any]

# Longer texts are not written out: lengths multiply in nested arrays, and no context holds them.
MAX_SHORTEST_BYTES = 2**20

# Texts of the formats that the grammar compiler enforces by itself. They need not cover the
# format: what is not of this form is closed by searching.
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?"
_HEX = "[0-9a-fA-F]"
_H16 = f"{_HEX}{{1,4}}"
_URI = "[a-zA-Z][a-zA-Z0-9+.-]*:[!#$&-;=?-Z_a-z~]*"
_FORMAT_TEXTS = {
    "duration": "P([0-9]+D|[0-9]+W|[0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?)"
    "|P([0-9]+D)?T([0-9]+S|[0-9]+M([0-9]+S)?|[0-9]+H([0-9]+M([0-9]+S)?)?)",
    "email": f"[!#-'*+/-9=?A-Z^-~-]+([.][!#-'*+/-9=?A-Z^-~-]+)*@{_LABEL}([.]{_LABEL})*",
    "hostname": f"{_LABEL}([.]{_LABEL})*",
    "ipv6": f"({_H16}:){{7}}{_H16}|({_H16}:){{1,6}}:|({_H16}:){{1,5}}:({_H16})(:{_H16})*|::{_H16}?",
    "json-pointer": '(/([^/~"\\\\]|~[01])*)*',
    "relative-json-pointer": '(0|[1-9][0-9]*)(#|(/([^/~"\\\\]|~[01])*)*)',
    "uri": _URI,
    "uri-reference": "[!#$&-;=?-Z_a-z~]*",
    "uri-template": "([!#$&(-;=?-Z_a-z~]|[{][a-zA-Z0-9_]+[}])*",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
}
_TYPES = {"string": str, "boolean": bool, "null": type(None), "object": dict, "array": list}


def encoded(value: Any) -> bytes:
    """Compact JSON as xgrammar spells the values and names of a schema.

    Non-ASCII text stands as itself, but for the delete character; whole floats as integers.
    """
    text = json.dumps(_whole(value), ensure_ascii=False, separators=(",", ":"))
    return text.replace("\x7f", "\\u007f").encode()


def _whole(value: Any) -> Any:
    if isinstance(value, list):
        return [_whole(part) for part in value]
    if isinstance(value, dict):
        return {key: _whole(part) for key, part in value.items()}
    if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53:
        return int(value) if str(value) != "-0.0" else value
    return value


class Outline:
    """Reads the source of a `json_schema` grammar.

    ``is_too_long``: some part has no text of `MAX_SHORTEST_BYTES` or less, and counts as one
    without any.
    """

    def __init__(self, source: str) -> None:
        self.root: Any = json.loads(source)
        self.is_too_long = False
        self._defs: Schema = self.root.get("$defs", {}) if isinstance(self.root, dict) else {}
        self._shortest_defs: dict[str, bytes | None] = dict.fromkeys(self._defs)
        self._alternatives: dict[int, list[Schema]] = {}
        self._spellings: dict[int, list[bytes]] = {}
        self._walks: dict[str, PatternWalk | None] = {}
        self._kept: dict[int, bytes | None] | None = None
        # Definitions that hold one another: each round may find what the last one made finite.
        for _ in range(len(self._defs) + 1):
            found = {name: self._shortest(part) for name, part in self._defs.items()}
            if found == self._shortest_defs:
                break
            self._shortest_defs = found
        self._kept = {}

    def alternatives(self, schema: Any) -> list[Schema]:
        """The schemas without ``$ref`` and ``anyOf`` that a schema stands for."""
        if not isinstance(schema, dict):
            return [{}]
        found = self._alternatives.get(id(schema))
        if found is None:
            found = list(self._expanded(schema, ()))
            self._alternatives[id(schema)] = found
        return found

    def _expanded(self, schema: Schema, inside: tuple[str, ...]) -> Iterator[Schema]:
        if "$ref" in schema:
            name = schema["$ref"].removeprefix("#/$defs/")
            if name not in inside and name in self._defs:
                yield from self._expanded(self._defs[name], (*inside, name))
        elif "anyOf" in schema:
            for branch in schema["anyOf"]:
                yield from self._expanded(branch, inside)
        else:
            yield schema

    def spellings(self, schema: Schema) -> list[bytes] | None:
        """The texts of an enum or const, shortest first; None for other schemas."""
        if "enum" not in schema and "const" not in schema:
            return None
        found = self._spellings.get(id(schema))
        if found is None:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            found = sorted(map(encoded, values), key=len)
            self._spellings[id(schema)] = found
        return found

    def shortest(self, schema: Any) -> bytes | None:
        """The shortest text of a schema."""
        return self._shortest(schema)

    def _shortest(self, schema: Any) -> bytes | None:
        if not isinstance(schema, dict):
            return b"0"
        if self._kept is not None and id(schema) in self._kept:
            return self._kept[id(schema)]
        if "$ref" in schema:
            return self._shortest_defs.get(schema["$ref"].removeprefix("#/$defs/"))
        if "anyOf" in schema:
            found = [text for text in map(self._shortest, schema["anyOf"]) if text is not None]
            best = min(found, key=len, default=None)
        else:
            spellings = self.spellings(schema)
            best = spellings[0] if spellings else self._of_type(schema)
        if best is not None and self._exceeds(len(best)):
            best = None
        if self._kept is not None:
            self._kept[id(schema)] = best
        return best

    def _of_type(self, schema: Schema) -> bytes | None:
        kind = schema.get("type")
        if kind == "string":
            return self._shortest_string(schema)
        if kind == "integer":
            found = integer_rest("", schema)
            if found is None:
                negative = integer_rest("-", schema)
                return None if negative is None else f"-{negative}".encode()
            return found.encode()
        if kind == "number":
            rests = number_rests("", schema) + [f"-{rest}" for rest in number_rests("-", schema)]
            return min((rest.encode() for rest in rests), key=len, default=None)
        if kind == "array":
            rest = self.array_rest(schema, 0, is_first=True)
            return None if rest is None else b"[" + rest
        if kind == "object":
            rest = self.object_rest(schema, {}, is_first=True)
            return None if rest is None else b"{" + rest
        return {"boolean": b"true", "null": b"null"}.get(str(kind), b"0")

    def _shortest_string(self, schema: Schema) -> bytes | None:
        walk = self.walk(schema)
        if walk is not None:
            rest = walk.shortest_rest("")
            return None if rest is None else f'"{rest}"'.encode()
        if "pattern" in schema or self._exceeds(_least(schema)):
            return None
        return f'"{string_rest("", _least(schema))}'.encode()

    def walk(self, schema: Schema) -> PatternWalk | None:
        """The graph of a string's pattern or format; None where it has none, or too large."""
        pattern = schema.get("pattern")
        if pattern is None:
            pattern = _FORMAT_TEXTS.get(schema.get("format", ""))
        if pattern is None:
            return None
        if pattern not in self._walks:
            try:
                self._walks[pattern] = PatternWalk(pattern)
            except UnsupportedPattern:
                self._walks[pattern] = None
        return self._walks[pattern]

    def array_rest(
        self, schema: Schema, num_items: int, *, is_first: bool, at_least: int = 0
    ) -> bytes | None:
        """What an array with ``num_items`` items still needs, its bracket included.

        ``is_first``: no comma before the next item. ``at_least``: items to come at the least.
        """
        parts = []
        num_bytes = 0
        wanted = max(schema.get("minItems", 0), num_items + at_least)
        if self._exceeds(wanted - num_items):
            return None
        for index in range(num_items, wanted):
            text = self.shortest(self.item(schema, index))
            if text is None or self.item(schema, index) is False:
                return None
            num_bytes += len(text) + 1
            if self._exceeds(num_bytes):
                return None
            parts.append(text)
        comma = b"," if parts and not is_first else b""
        return comma + b",".join(parts) + b"]"

    @staticmethod
    def item(schema: Schema, index: int) -> Any:
        prefix = schema.get("prefixItems", ())
        return prefix[index] if index < len(prefix) else schema.get("items", {})

    @staticmethod
    def property_of(schema: Schema, key: str) -> Any:
        """What an object's schema asks of one property; False where there may be none."""
        properties = schema.get("properties", {})
        if key in properties:
            return properties[key]
        patterns = schema.get("patternProperties")
        if patterns:
            return next(iter(patterns.values())) if len(patterns) == 1 else {}
        return schema.get("additionalProperties", not properties)

    def object_rest(
        self,
        schema: Schema,
        members: dict[str, Any],
        *,
        is_first: bool,
        must_add: bool = False,
    ) -> bytes | None:
        """What an object with ``members`` (in order) still needs, its closing included.

        ``is_first``: no comma before the next member. ``must_add``: at least one more member.
        None where a required property can no longer come.
        """
        names = list(schema.get("properties", ()))
        after = self._after(names, members)
        required = set(schema.get("required", ())) - members.keys()
        chosen = {name for name in names[after:] if name in required}
        if required - chosen:
            return None
        wanted = max(schema.get("minProperties", 0), len(members) + must_add)
        spare = sorted(
            (len(self._member(schema, name) or b"") or 1 << 30, name)
            for name in names[after:]
            if name not in chosen
        )
        for cost, name in spare:
            if len(members) + len(chosen) >= wanted:
                break
            if cost < 1 << 30:
                chosen.add(name)
        parts = [self._member(schema, name) for name in names[after:] if name in chosen]
        missing = wanted - len(members) - len(parts)
        if self._exceeds(missing):
            return None
        if missing > 0:
            parts += self._extra_members(schema, {*members, *names}, missing)
            if len(members) + len(parts) < wanted:
                return None
        if any(part is None for part in parts):
            return None
        comma = b"," if parts and not is_first else b""
        return comma + b",".join(part for part in parts if part is not None) + b"}"

    @staticmethod
    def _after(names: list[str], members: dict[str, Any]) -> int:
        """Where in the order of properties the next one may stand."""
        if not members:
            return 0
        last = next(reversed(members))
        return names.index(last) + 1 if last in names else len(names)

    def _member(self, schema: Schema, name: str) -> bytes | None:
        value = self.shortest(schema["properties"][name])
        return None if value is None else encoded(name) + b":" + value

    def _extra_members(self, schema: Schema, taken: set[str], count: int) -> list[bytes | None]:
        found: list[bytes | None] = []
        num_bytes = 0
        for key, part in self.open_names(schema, taken, count):
            value = self.shortest(part)
            if len(found) == count or value is None or self._exceeds(num_bytes):
                break
            member = encoded(key) + b":" + value
            found.append(member)
            num_bytes += len(member)
        return found

    def _exceeds(self, num_bytes: int) -> bool:
        """Whether a text of at least so many bytes is too long."""
        if num_bytes <= MAX_SHORTEST_BYTES:
            return False
        self.is_too_long = True
        return True

    def open_names(self, schema: Schema, taken: set[str], count: int) -> Iterator[tuple[str, Any]]:
        """At most about ``count`` names that the schema does not list, and what it asks of their
        values."""
        for pattern, part in schema.get("patternProperties", {}).items():
            walk = self.walk({"pattern": pattern})
            key = None if walk is None else walk.shortest_rest("")
            if key is not None and json.loads(f'"{key}"') not in taken:
                yield json.loads(f'"{key}"'), part
        extra = schema.get("additionalProperties", "properties" not in schema)
        if extra is False or (extra is True and "patternProperties" in schema):
            return
        if "propertyNames" in schema:
            text = self.shortest(schema["propertyNames"])
            if text is not None and json.loads(text) not in taken:
                yield json.loads(text), extra
            return
        for number in range(1 + len(taken) + count):
            key = "" if number == 0 else _name(number - 1)
            if key not in taken:
                yield key, extra

    def may_be(self, schema: Any, value: Any) -> bool:
        """False where a short scalar plainly does not match; used to tell branches apart."""
        return any(self._may_be(one, value) for one in self.alternatives(schema))

    def _may_be(self, schema: Schema, value: Any) -> bool:
        spellings = self.spellings(schema)
        if spellings is not None:
            return encoded(value) in spellings
        kind = schema.get("type")
        if kind in ("integer", "number"):
            return isinstance(value, int | float) and not isinstance(value, bool)
        return kind is None or isinstance(value, _TYPES.get(kind, object))


def _least(schema: Schema) -> int:
    return int(schema.get("minLength", 0))


def _name(number: int) -> str:
    """a, b, ..., z, aa, ab, ..."""
    text = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        text = chr(97 + rest) + text
    return text
