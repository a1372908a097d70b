"""The examples behind the tables of docs/schemas.md; each one is tried when the page is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Example:
    """``good`` matches ``schema``; ``bad`` breaks ``keyword`` (several: separated by spaces)."""

    keyword: str
    schema: Any
    good: Any
    bad: Any
    note: str = ""


_DRAFT_7 = "http://json-schema.org/draft-07/schema#"
_PERSON = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}
_LOOP = {"$defs": {"n": _NODE}, "$ref": "#/$defs/n"}

KEYWORD_EXAMPLES = (
    Example("type", {"type": "integer"}, 1, "a"),
    Example("type", {"type": ["string", "null"]}, None, 1, "several"),
    Example("enum", {"enum": ["a", 1, None]}, "a", "b"),
    Example("enum", {"type": "string", "enum": ["a", 1]}, "a", 1, "beside other keywords"),
    Example(
        "enum",
        {"enum": [2**70, "a"]},
        "a",
        "b",
        "integers beyond 64 bits, floats of more than 15 digits",
    ),
    Example("const", {"const": {"a": [1.5]}}, {"a": [1.5]}, {}),
    Example("minLength", {"type": "string", "minLength": 2}, "ab", "a"),
    Example("maxLength", {"type": "string", "maxLength": 2}, "ab", "abc"),
    Example("pattern", {"type": "string", "pattern": "^[A-Z]{2}$"}, "AB", "ab"),
    Example(
        "pattern",
        {"type": "string", "pattern": "^(?=.*x)"},
        "ax",
        "a",
        "lookaround, back reference, word boundary, Unicode property",
    ),
    Example(
        "maxLength",
        {"type": "string", "pattern": "^(ab|cde)*$", "maxLength": 4},
        "ab",
        "cdeab",
        "beside a pattern whose parts differ in length",
    ),
    Example("format", {"type": "string", "format": "date"}, "2024-02-29", "2023-02-29"),
    Example("format", {"type": "string", "format": "time"}, "10:00:00Z", "10:00"),
    Example(
        "format",
        {"type": "string", "format": "date-time"},
        "2024-02-29T10:00:00Z",
        "2024-02-30T10:00:00Z",
    ),
    Example(
        "format",
        {"type": "string", "format": "uuid"},
        "123e4567-e89b-12d3-a456-426614174000",
        "123e4567",
        "uuid, duration, ipv4, json-pointer, uri, uri-reference, uri-template",
    ),
    Example(
        "format",
        {"type": "string", "format": "email"},
        "a@example.org",
        "a",
        "email, hostname, ipv6",
    ),
    Example(
        "format",
        {"type": "string", "format": "regex"},
        "a+",
        "(",
        "regex, iri, iri-reference, idn-email, idn-hostname",
    ),
    Example("format", {"type": "string", "format": "phone"}, "1", "x", "any other"),
    Example("minimum maximum", {"type": "integer", "minimum": 3, "maximum": 9}, 3, 2),
    Example("exclusiveMinimum exclusiveMaximum", {"type": "number", "exclusiveMinimum": 3}, 3.1, 3),
    Example("maximum", {"type": "integer", "maximum": 2**70}, 1, 2**70 + 1, "beyond 64 bits"),
    Example("multipleOf", {"type": "integer", "multipleOf": 5}, 10, 11),
    Example(
        "multipleOf",
        {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
        10,
        11,
        "in a range of at most 1024 multiples",
    ),
    Example(
        "multipleOf",
        {"type": "integer", "multipleOf": 5, "minimum": 0},
        10,
        11,
        "in a half-open range",
    ),
    Example("multipleOf", {"type": "number", "multipleOf": 0.5}, 1.5, 1.2, "of numbers"),
    Example("properties", _PERSON, {"a": 1}, {"a": "x"}),
    Example("required", _PERSON, {"a": 1}, {}),
    Example(
        "additionalProperties",
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"x": 1},
        {"x": "a"},
    ),
    Example("additionalProperties", {**_PERSON, "additionalProperties": False}, {"a": 1}, {"b": 1}),
    Example("minProperties", {"type": "object", "minProperties": 1}, {"x": 1}, {}),
    Example("maxProperties", {"type": "object", "maxProperties": 1}, {}, {"x": 1, "y": 2}),
    Example(
        "patternProperties",
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}}},
        {"ab": 1},
        {"ab": "x"},
    ),
    Example(
        "propertyNames",
        {"type": "object", "propertyNames": {"pattern": "^a"}},
        {"ab": 1},
        {"b": 1},
    ),
    Example(
        "propertyNames",
        {"type": "object", "propertyNames": {"maxLength": 1}, "minProperties": 1},
        {"a": 1},
        {"ab": 1},
        "beside other keywords",
    ),
    Example(
        "unevaluatedProperties",
        {"properties": {"a": {}}, "unevaluatedProperties": False},
        {"a": 1},
        {"b": 1},
    ),
    Example(
        "unevaluatedProperties",
        {"allOf": [{"type": "object"}], "unevaluatedProperties": False},
        {},
        {"b": 1},
        "beside keywords that combine schemas",
    ),
    Example(
        "dependentRequired",
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        {"b": 1},
        {"a": 1},
    ),
    Example(
        "dependentSchemas",
        {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
        {"b": 1},
        {"a": 1},
    ),
    Example(
        "dependencies",
        {"$schema": _DRAFT_7, "type": "object", "dependencies": {"a": ["b"]}},
        {"b": 1},
        {"a": 1},
        "older drafts",
    ),
    Example("items", {"type": "array", "items": {"type": "integer"}}, [1], ["a"]),
    Example("prefixItems", {"prefixItems": [{"type": "integer"}], "items": False}, [1], ["a"]),
    Example("minItems maxItems", {"type": "array", "minItems": 1, "maxItems": 2}, [1], []),
    Example("uniqueItems", {"items": {"type": "integer"}, "uniqueItems": True}, [1], [1, 1]),
    Example("contains", {"type": "array", "contains": {"const": 1}}, [1], [2]),
    Example(
        "minContains maxContains",
        {"type": "array", "contains": {"const": 1}, "maxContains": 1},
        [1],
        [1, 1],
    ),
    Example(
        "unevaluatedItems",
        {"prefixItems": [{"type": "integer"}], "unevaluatedItems": False},
        [1],
        [1, 2],
    ),
    Example("allOf", {"allOf": [{"minLength": 1}, {"maxLength": 2}]}, "a", "abc"),
    Example("anyOf", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None, "a"),
    Example(
        "oneOf",
        {"oneOf": [{"type": "integer"}, {"type": "string"}]},
        1,
        None,
        "branches of which only one can match",
    ),
    Example(
        "oneOf",
        {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 5}]},
        1,
        7,
        "branches that overlap",
    ),
    Example("not", {"type": "string", "not": {"const": "a"}}, "b", "a"),
    Example(
        "if then else",
        {"type": "integer", "if": {"minimum": 5}, "then": {"multipleOf": 2}},
        6,
        7,
    ),
    Example("then", {"type": "integer", "then": {"minimum": 5}}, 6, 1, "without `if`"),
    Example("$ref", {"$defs": {"s": {"type": "string"}}, "$ref": "#/$defs/s"}, "a", 1),
    Example("$ref", _LOOP, {"next": {}}, {"next": 1}, "to what holds it"),
    Example(
        "$anchor",
        {"$defs": {"s": {"$anchor": "s", "type": "string"}}, "$ref": "#s"},
        "a",
        1,
    ),
    Example(
        "$dynamicRef",
        {"$defs": {"s": {"$dynamicAnchor": "s", "type": "string"}}, "$dynamicRef": "#s"},
        "a",
        1,
    ),
    Example(
        "contentMediaType contentEncoding",
        {"$schema": _DRAFT_7, "type": "string", "contentEncoding": "base64"},
        "YQ==",
        "%",
        "drafts 6 and 7",
    ),
    Example(
        "contentMediaType contentEncoding",
        {"type": "string", "contentEncoding": "base64"},
        "YQ==",
        "%",
        "newer drafts",
    ),
    Example(
        "maxlength",
        {"type": "string", "maxlength": 1},
        "a",
        "ab",
        "any word that the draft does not know; `x-...` is not even mentioned",
    ),
)

REFUSED_EXAMPLES = (
    False,
    {"type": "text"},
    {"enum": []},
    {"type": "string", "minLength": 3, "maxLength": 1},
    {"type": "integer", "multipleOf": 10, "minimum": 1, "maximum": 9},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"type": "string", "enum": [1, 2]},
    {"properties": {"a": False}},
    {"anyOf": [{"type": "string"}, False]},
    {"required": ["a"], "additionalProperties": False},
    {"$ref": "#"},
    {"$ref": "#/$defs/a"},
    {"$ref": "https://example.org/other.json"},
    {"$defs": {"a": {"$id": "https://example.org/a"}}},
    {"$schema": "https://example.org/own-draft"},
)

# (in words, schema, an answer)
TYPE_EXAMPLES = (
    ("an object is a struct", _PERSON, {"a": 1}),
    ("an array is a list", {"type": "array", "items": {"type": "number"}}, [1, 2.5]),
    ("text is a string", {"type": "string"}, "a"),
    ("so is any format but those of time", {"type": "string", "format": "email"}, "a@b.org"),
    (
        "a uuid is text as well",
        {"type": "string", "format": "uuid"},
        "2f1e7c3a-9d0b-4c55-8a57-6f0f3c0f9a11",
    ),
    ("a date", {"type": "string", "format": "date"}, "2024-02-29"),
    ("a time, in UTC", {"type": "string", "format": "time"}, "10:00:00+02:00"),
    ("a moment, in UTC", {"type": "string", "format": "date-time"}, "2024-02-29T10:00:00+02:00"),
    ("an integer is int64", {"type": "integer"}, 7),
    (
        "or a decimal, where the bounds ask for more",
        {"type": "integer", "maximum": 10**30},
        10**30,
    ),
    ("a number is float64", {"type": "number"}, 7),
    ("true or false", {"type": "boolean"}, True),
    ("nothing but null", {"type": "null"}, None),
    ("texts to choose from are a dictionary", {"enum": ["a", "b", None]}, "a"),
    ("so are constants side by side", {"oneOf": [{"const": "a"}, {"const": "b"}]}, "b"),
    ("any other enum has the type of its values", {"enum": [1, 2, None]}, 1),
    ("a constant too", {"const": "a"}, "a"),
    ("a type or null is the type", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
    ("other unions are JSON text", {"type": ["integer", "string"]}, "7"),
    ("an object with open names too", {"additionalProperties": {"type": "integer"}}, {"x": 1}),
    (
        "a tuple of one type is a list",
        {"prefixItems": [{"type": "integer"}, {"type": "integer"}]},
        [1, 2],
    ),
    (
        "a tuple of several is JSON text",
        {"prefixItems": [{"type": "integer"}, {"type": "null"}]},
        [1, None],
    ),
    ("a part that holds itself is JSON text", _LOOP, {"next": {"next": {}}}),
    ("anything at all", True, [1, {"a": None}]),
)

FIELD_EXAMPLES = (
    "str",
    "int",
    "float",
    "bool",
    "date",
    "datetime",
    "time",
    "uuid",
    "int?",
    "a|b|c",
    "'a, b'|\"it's\"|null_is_text?",
    "[str]",
    "str[]?",
    "{a: int, 'b c': [{d: bool}]}",
)
