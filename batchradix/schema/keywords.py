"""Where JSON Schema keywords hold further schemas, and what each keyword speaks of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from batchradix.schema.answers import pointer_step

MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
SCHEMAS = (
    "items",
    "additionalItems",
    "additionalProperties",
    "unevaluatedItems",
    "unevaluatedProperties",
    "propertyNames",
    "contains",
    "not",
    "if",
    "then",
    "else",
)

EXACT_LENGTH = 128
"""Characters beyond ``minLength`` up to which decoding bounds strings with escapes too."""

STRING_KEYWORDS = ("minLength", "maxLength", "pattern", "format")
NUMBER_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
ARRAY_KEYWORDS = ("items", "prefixItems", "minItems", "maxItems")
OBJECT_KEYWORDS = (
    "properties",
    "required",
    "additionalProperties",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
)
KEYWORDS_OF_TYPE = {
    "string": STRING_KEYWORDS,
    "number": NUMBER_KEYWORDS,
    "array": ARRAY_KEYWORDS,
    "object": OBJECT_KEYWORDS,
}
# Keywords that no grammar here expresses; every value is checked against them afterwards.
VALIDATED_ONLY = (
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedProperties",
    "unevaluatedItems",
    "$dynamicRef",
    "$recursiveRef",
    "contentEncoding",
    "contentMediaType",
)
# What may exclude a value of an enum that stands beside it.
LIMITING = (
    *("type", "$ref", "allOf", "anyOf", "oneOf"),
    *VALIDATED_ONLY,
    *(key for keys in KEYWORDS_OF_TYPE.values() for key in keys),
)
# Keywords that mean something only beside another one.
NEEDS = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}
# The draft that brought a keyword in, where it was not the first (4).
_SINCE = {
    6: ("const", "contains", "propertyNames"),
    7: ("if", "then", "else"),
    2019: (
        "dependentRequired",
        "dependentSchemas",
        "unevaluatedItems",
        "unevaluatedProperties",
        "minContains",
        "maxContains",
    ),
    2020: ("$dynamicRef", "prefixItems"),
}
_ALWAYS = (
    *("$schema", "$ref", "$id", "id", "$anchor", "$dynamicAnchor", "$defs", "definitions"),
    *("type", "enum", "allOf", "anyOf", "oneOf", "not", "dependencies"),
    *("minLength", "maxLength", "pattern", "format", "required", "properties", "items"),
    *("minItems", "maxItems", "uniqueItems", "minProperties", "maxProperties"),
    *("additionalProperties", "patternProperties", "multipleOf"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    # What describes a value and forbids none.
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$comment", "$vocabulary"),
)
# Not of JSON Schema, yet known to forbid nothing either.
_FOREIGN = ("discriminator", "example")


# Formats that jsonschema-rs checks; others are annotations.
CHECKED_FORMATS = frozenset(
    {
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "idn-email",
        "idn-hostname",
        "ipv4",
        "ipv6",
        "iri",
        "iri-reference",
        "json-pointer",
        "regex",
        "relative-json-pointer",
        "time",
        "uri",
        "uri-reference",
        "uri-template",
        "uuid",
    }
)


def is_known(keyword: str, draft: str) -> bool:
    """Whether the draft (its URI) gives a keyword a meaning that is kept here."""
    if keyword in _ALWAYS or keyword in _FOREIGN or keyword.startswith("x-"):
        return True
    found = re.search(r"draft[-/]0?(\d+)", draft)
    number = int(found[1]) if found else 2020
    if keyword == "additionalItems":
        return number < 2020
    if keyword in ("contentEncoding", "contentMediaType"):  # mere annotations since
        return number in (6, 7)
    if keyword in ("$recursiveRef", "$recursiveAnchor"):
        return number == 2019
    return any(keyword in names for since, names in _SINCE.items() if since <= number)


def subschemas(schema: dict[str, Any], pointer: str) -> Iterator[tuple[str, str, Any]]:
    """``(keyword, pointer, schema)`` of every schema directly inside ``schema``."""
    for key, value in schema.items():
        at = pointer_step(pointer, key)
        if key in MAPS_OF_SCHEMAS and isinstance(value, dict):
            for name, part in value.items():
                yield key, pointer_step(at, name), part
        elif isinstance(value, list) and (key in LISTS_OF_SCHEMAS or key == "items"):
            for index, part in enumerate(value):
                yield key, pointer_step(at, index), part
        elif key in SCHEMAS and isinstance(value, dict | bool):
            yield key, at, value
        elif key == "dependencies" and isinstance(value, dict):
            for name, part in value.items():
                if isinstance(part, dict | bool):
                    yield key, pointer_step(at, name), part
