"""A normalised schema as the JSON Schema text that the grammar compiler enforces in full.

The compiler (xgrammar) ignores some keywords in silence and refuses others; here only what it
is known to enforce remains, rewritten exactly where that is possible. What is left out is noted.
"""

from __future__ import annotations

import math
from typing import Any

from batchradix.schema.answers import json_text
from batchradix.schema.keywords import (
    CHECKED_FORMATS,
    EXACT_LENGTH,
    NUMBER_KEYWORDS,
    OBJECT_KEYWORDS,
)
from batchradix.schema.merge import Node, implied_types
from batchradix.schema.normalise import Normalised, number_range
from batchradix.schema.pattern import grammar_pattern
from batchradix.schema.pattern_parser import UnsupportedPattern

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    "("
    "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)-"
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
    "|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP}-02-29"
    ")"
)
# Seconds end at 59 and fractions at microseconds, as in the Arrow types they become.
_TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6}|)"
    r"(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])"
_IPV4 = rf"{_BYTE}\.{_BYTE}\.{_BYTE}\.{_BYTE}"
_OWN_FORMATS = {"ipv4": _IPV4, "date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}"}
_COMPILER_FORMATS = frozenset(
    {
        "duration",
        "email",
        "hostname",
        "ipv6",
        "json-pointer",
        "relative-json-pointer",
        "uri",
        "uri-reference",
        "uri-template",
        "uuid",
    }
)
# The compiler enforces ``multipleOf`` up to this, and multiples in a range become an enum up
# to so many.
_MAX_STEP = 1024
_MAX_LISTED = 1024
# Formats of which the compiler enforces the outline alone: the length of host names and of
# their parts, and how numbers may be written in the end of an IPv6 address, are left.
_OUTLINED_FORMATS = frozenset({"email", "hostname", "ipv6"})
_ALL_TYPES = ("object", "array", "string", "number", "boolean", "null")


class GrammarWriter:
    """Writes the grammar source of a normalised schema; ``ignored`` lists mere annotations.

    ``keeps_values``: also enum values that the grammar compiler would not spell exactly.
    """

    def __init__(self, normalised: Normalised, *, keeps_values: bool = False) -> None:
        self._normalised = normalised
        self._keeps_values = keeps_values
        self.ignored: dict[tuple[str, str], None] = {}

    def source(self) -> str:
        """The JSON text of the schema for the grammar compiler, definitions included."""
        used: dict[str, Any] = {}
        root = self._schema(self._normalised.root)
        waiting = _references(root)
        while waiting:
            name = waiting.pop()
            if name not in used:
                used[name] = self._schema(self._normalised.defs[name])
                waiting |= _references(used[name])
        if used:
            root = {**root, "$defs": {name: used[name] for name in sorted(used)}}
        return json_text(root)

    def _schema(self, node: Node) -> dict[str, Any]:
        if not node:
            return {}
        if "$ref" in node:
            return {"$ref": f"#/$defs/{node['$ref']}"}
        if "enum" in node:
            return self._values(node)
        if "anyOf" in node:
            return {"anyOf": [self._schema(branch) for branch in node["anyOf"]]}
        types = node.get("type")
        if types is None:
            types = _ALL_TYPES if implied_types(node) else ()
        if not types:
            return {}
        if len(types) > 1:
            return {"anyOf": [self._typed(node, kind) for kind in types]}
        return self._typed(node, types[0])

    def _typed(self, node: Node, kind: str) -> dict[str, Any]:
        writers = {
            "string": self._string,
            "integer": self._integer,
            "number": self._number,
            "array": self._array,
            "object": self._object,
        }
        return writers[kind](node) if kind in writers else {"type": kind}

    def _note(self, node: Node, *keywords: str) -> None:
        for keyword in keywords:
            if keyword in node:
                for place in self._normalised.places(node, keyword):
                    self._normalised.note(place, keyword)

    def _values(self, node: Node) -> dict[str, Any]:
        values = node["enum"]
        if not self._keeps_values and not all(map(_is_spelt_exactly, values)):
            self._note(node, "enum")
            return {}
        return {"const": values[0]} if len(values) == 1 else {"enum": values}

    def _string(self, node: Node) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string"}
        name = node.get("format")
        if name in _OWN_FORMATS:
            self._note(node, "pattern", "minLength", "maxLength")
            return {**schema, "pattern": f"^{_OWN_FORMATS[name]}$"}
        if name in _COMPILER_FORMATS:
            self._note(node, "pattern", "minLength", "maxLength")
            if name in _OUTLINED_FORMATS:
                self._note(node, "format")
            return {**schema, "format": name}
        if name in CHECKED_FORMATS:
            self._note(node, "format")
        elif name is not None:
            self.ignored[node["@"], "format"] = None
        lengths: dict[str, Any] = {
            key: node[key] for key in ("minLength", "maxLength") if key in node
        }
        if lengths.get("maxLength", 0) - lengths.get("minLength", 0) > EXACT_LENGTH:
            self._note(node, "maxLength")
        if "pattern" not in node:
            return {**schema, **lengths}
        try:
            written = grammar_pattern(
                node["pattern"], lengths.get("minLength", 0), lengths.get("maxLength")
            )
        except UnsupportedPattern:
            written = None
        if written is None:
            self._note(node, "pattern")
            return {**schema, **lengths}
        if not written.is_exact:
            self._note(node, "minLength", "maxLength")
        return {**schema, "pattern": written.text}

    def _integer(self, node: Node) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "integer"}
        least, most = number_range(node, is_integer=True)
        step = node.get("multipleOf", 1)
        if step != 1:
            if not isinstance(step, int):
                self._note(node, "multipleOf")
            elif math.isinf(least) and math.isinf(most) and step <= _MAX_STEP:
                return {**schema, "multipleOf": step}
            elif (most - least) // step < _MAX_LISTED and not is_beyond_int64(node):
                return {"enum": list(range(-(-int(least) // step) * step, int(most) + 1, step))}
            else:
                self._note(node, "multipleOf")
        if not is_beyond_int64(node):  # what the Arrow column can hold, and no endless digits
            least, most = max(least, INT64_MIN), min(most, INT64_MAX)
        for key, value in (("minimum", least), ("maximum", most)):
            if INT64_MIN <= value <= INT64_MAX:
                schema[key] = int(value)
            elif not math.isinf(value):
                self._note(node, key, f"exclusive{key.capitalize()}")
        return schema

    def _number(self, node: Node) -> dict[str, Any]:
        self._note(node, "multipleOf")
        schema: dict[str, Any] = {"type": "number"}
        for key in NUMBER_KEYWORDS:
            if key in node and key != "multipleOf":
                if abs(node[key]) <= INT64_MAX:
                    schema[key] = node[key]
                else:
                    self._note(node, key)
        return schema

    def _array(self, node: Node) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array"}
        schema.update({key: node[key] for key in ("minItems", "maxItems") if key in node})
        prefix = node.get("prefixItems", [])
        if prefix:
            schema["prefixItems"] = [self._schema(part) for part in prefix]
            # Items nobody described are left out, unless the length asks for them.
            if "items" not in node:
                schema["items"] = {} if node.get("minItems", 0) > len(prefix) else False
        if "items" in node:
            items = node["items"]
            schema["items"] = False if items is False else self._schema(items)
        elif not prefix:  # without it the compiler takes a length bound to mean no items at all
            schema["items"] = {}
        return schema

    def _object(self, node: Node) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "object"}
        plain_keys = ("required", "minProperties", "maxProperties")
        schema.update({key: node[key] for key in plain_keys if key in node})
        properties = node.get("properties", {})
        if "properties" in node:
            schema["properties"] = {name: self._schema(part) for name, part in properties.items()}
        patterns = self._pattern_properties(node)
        if patterns:
            self._note(node, "properties")  # the compiler lets a pattern speak for them as well
            schema["patternProperties"] = patterns
        if "propertyNames" in node:
            self._property_names(node, schema)
        extra = node.get("additionalProperties")
        if len(patterns) < len(node.get("patternProperties", ())):
            self._note(node, "additionalProperties")  # an unsaid pattern may allow any name
            schema["additionalProperties"] = True
        elif extra is False:
            schema["additionalProperties"] = False
        elif extra is not None:
            schema["additionalProperties"] = self._schema(extra) or True
        elif properties or patterns:
            wanted = node.get("minProperties", 0)
            schema["additionalProperties"] = not patterns and wanted > len(properties)
        elif "propertyNames" not in schema:  # as for the items of an array
            schema["additionalProperties"] = True
        return schema

    def _property_names(self, node: Node, schema: dict[str, Any]) -> None:
        """Names are enforced where all of them are free; other keywords beside them are not."""
        self._note(node, "propertyNames")
        names = node["propertyNames"]
        alone = not any(
            key in node for key in OBJECT_KEYWORDS if key not in ("propertyNames", "required")
        )
        if alone and names is not False and names and set(names) & {"pattern", "type"}:
            written = self._schema(names)
            if written.get("type") == "string":
                schema["propertyNames"] = written

    def _pattern_properties(self, node: Node) -> dict[str, Any]:
        written: dict[str, Any] = {}
        for pattern, part in node.get("patternProperties", {}).items():
            self._note(node, "patternProperties")
            try:
                key = grammar_pattern(pattern)
            except UnsupportedPattern:
                continue
            if key is not None:
                written[key.text] = self._schema(part)
        return written


def is_beyond_int64(node: Node) -> bool:
    """Whether the bounds of an integer ask for numbers that int64 does not hold."""
    least, most = number_range(node, is_integer=True)
    return (not math.isinf(least) and least < INT64_MIN) or (
        not math.isinf(most) and most > INT64_MAX
    )


def _is_spelt_exactly(value: Any) -> bool:
    """Whether the compiler writes a value as it is: it keeps 64 bits, or 15 digits of a float."""
    if isinstance(value, list | dict):
        parts = value.values() if isinstance(value, dict) else value
        return all(_is_spelt_exactly(part) for part in parts)
    if isinstance(value, float):
        return float(f"{value:.15g}") == value
    return not isinstance(value, int) or INT64_MIN <= value <= INT64_MAX


def _references(schema: Any) -> set[str]:
    if isinstance(schema, dict):
        found: set[str] = set()
        for key, value in schema.items():
            if key == "$ref" and isinstance(value, str):
                found.add(value.removeprefix("#/$defs/"))
            elif key not in ("enum", "const"):
                found |= _references(value)
        return found
    if isinstance(schema, list):
        return set().union(*map(_references, schema)) if schema else set()
    return set()
