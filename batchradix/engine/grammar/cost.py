"""Which grammars are sure to compile fast, told from their source alone.

Only what is known to be cheap counts as cheap: plain types, short lists of values, objects and
arrays of these, patterns that repeat little. All the rest, and all that is not understood,
compiles in a process of its own (`child`), which can be stopped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from batchradix.schema.keywords import EXACT_LENGTH
from batchradix.schema.pattern_parser import (
    Alt,
    Anchor,
    Chars,
    Concat,
    Expression,
    Repeat,
    UnsupportedPattern,
    parse_pattern,
)
from batchradix.types import GrammarSpec

# In rough units of 0.1 ms on one slow core at a vocabulary of 131,072 tokens.
_MOST = 4000
_MOST_TEXT = 64 * 1024
_MOST_PATTERN_TEXT = 1000
# Characters of a pattern with its repetitions written out, and how many of them may be left
# out: the places where a text can be in a pattern multiply with these.
_MOST_PATTERN = 160
_MOST_SLACK = 16
_MOST_COUNT = 64  # items or characters from which more cost no more
_ANYTHING = 40
_NUMBER = 5
_BOUNDED_NUMBER = 40
_FORMAT = 200
_FORMATS = frozenset(
    {"duration", "email", "hostname", "ipv6", "json-pointer", "relative-json-pointer", "uri",
     "uri-reference", "uuid"}
)  # fmt: skip
_ANNOTATIONS = frozenset({"title", "description", "$comment", "deprecated", "default", "examples"})
_KEYWORDS: Mapping[str | None, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "boolean": frozenset(),
    "null": frozenset(),
}


class _Unknown(Exception):
    """Something that may cost anything."""


def is_cheap(spec: GrammarSpec) -> bool:
    """Whether a grammar compiles within about half a second and little memory, whatever the
    vocabulary."""
    try:
        if spec.kind == "regex":
            _pattern(spec.source)
            return True
        if len(spec.source) > _MOST_TEXT:
            return False
        if spec.kind == "json_schema":
            return _schema(spec.source) <= _MOST
        if spec.kind == "tool_calls":
            functions = json.loads(spec.source)["functions"]
            return sum(_schema(function["arguments"]) for function in functions) <= _MOST
        return False
    except (_Unknown, UnsupportedPattern, RecursionError, ValueError, TypeError, AttributeError):
        return False


def _schema(source: str) -> float:
    schema = json.loads(source)
    return _Costs(schema).of(schema)


class _Costs:
    def __init__(self, root: Any) -> None:
        defs = root.get("$defs", {}) if isinstance(root, dict) else {}
        self._defs = {f"#/$defs/{name}": schema for name, schema in defs.items()}
        self._known: dict[str, float] = {}
        self._open: set[str] = set()

    def of(self, schema: Any) -> float:
        """The cost of a schema with all that it refers to. Raises `_Unknown`."""
        if schema is False:
            return 0
        if schema is True:
            return _ANYTHING
        schema = {k: v for k, v in schema.items() if k not in _ANNOTATIONS and k != "$defs"}
        if not schema:
            return _ANYTHING
        if "$ref" in schema:
            return self._reference(schema)
        if "anyOf" in schema:
            _require(schema.keys() == {"anyOf"})
            branches = schema["anyOf"]
            return float(sum(map(self.of, branches)) * (1 + len(branches) / 8))
        if "enum" in schema or "const" in schema:
            _require(schema.keys() <= {"enum", "const", "type"})
            values = schema.get("enum", [schema.get("const")])
            return sum(1 + len(json.dumps(value)) / 4 for value in values)
        kind = schema.pop("type", None)
        _require(isinstance(kind, str) and kind in _KEYWORDS and schema.keys() <= _KEYWORDS[kind])
        if kind == "object":
            return self._object(schema)
        if kind == "array":
            return self._array(schema)
        if kind == "string":
            return _string(schema)
        return _BOUNDED_NUMBER if schema else _NUMBER

    def _reference(self, schema: dict[str, Any]) -> float:
        target = schema["$ref"]
        # What refers to itself is left to the child as well.
        _require(schema.keys() == {"$ref"} and target in self._defs and target not in self._open)
        if target not in self._known:
            self._open.add(target)
            self._known[target] = self.of(self._defs[target])
            self._open.discard(target)
        return self._known[target]

    def _object(self, schema: dict[str, Any]) -> float:
        properties = schema.get("properties", {})
        num_optional = len(properties) - len(schema.get("required", ()))
        extra = schema.get("additionalProperties", not properties)
        names = sum(1 + len(name) / 4 for name in properties)
        parts = sum(map(self.of, properties.values())) + self.of(extra)
        return float(5 + names + parts + max(0, num_optional) ** 2 / 4)

    def _array(self, schema: dict[str, Any]) -> float:
        prefix = sum(map(self.of, schema.get("prefixItems", ())))
        count = max(schema.get("minItems", 1), schema.get("maxItems", 1), 1)
        return float(5 + prefix + self.of(schema.get("items", True)) * min(count, _MOST_COUNT))


def _string(schema: dict[str, Any]) -> float:
    if "pattern" in schema:
        _require(schema.keys() == {"pattern"})
        return _pattern(schema["pattern"])
    if "format" in schema:
        _require(schema.keys() == {"format"} and schema["format"] in _FORMATS)
        return _FORMAT
    # The rules of all strings with bounds are the same few (`bounded_text`): a time that is
    # known, some seconds at most. Longer ones are counted by the library.
    least = schema.get("minLength", 0)
    _require(max(least, schema.get("maxLength", least) - least) <= EXACT_LENGTH)
    return 5.0


def _pattern(text: str) -> float:
    _require(len(text) <= _MOST_PATTERN_TEXT)
    size, slack = _size(parse_pattern(text))
    _require(size <= _MOST_PATTERN and slack <= _MOST_SLACK)
    return 10 + size * (1 + slack)


def _size(part: Expression) -> tuple[int, int]:
    """Characters of a pattern written out, and those among them that may be left out."""
    if isinstance(part, Anchor):
        return 0, 0
    if isinstance(part, Chars):
        return 1, 0
    if isinstance(part, Repeat):
        size, slack = _size(part.item)
        most = max(part.least, part.most if part.most is not None else part.least + 1, 1)
        # A repetition of what itself varies can be read in many ways.
        varies = part.least != part.most
        nested = size * most if varies and slack else 0
        return size * most, slack * most + nested + (most - part.least if varies else 0)
    parts = part.parts if isinstance(part, Concat) else part.branches
    assert isinstance(part, Concat | Alt)
    sizes = [_size(inner) for inner in parts]
    return sum(size for size, _ in sizes), sum(slack for _, slack in sizes)


def _require(condition: bool) -> None:
    if not condition:
        raise _Unknown
