"""Where JSON Schema keywords hold further schemas, and what each keyword speaks of."""

from __future__ import annotations

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
    "contains",
    "uniqueItems",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedProperties",
    "unevaluatedItems",
    "$dynamicRef",
    "$recursiveRef",
)
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
