"""The grammar source as the compiler reads it: nothing is dropped in silence."""

from __future__ import annotations

import json

import pytest

from batchradix.schema.load import load_schema

xgrammar = pytest.importorskip("xgrammar")


def accepts(schema, text: str) -> bool:
    from xgrammar.testing import _is_grammar_accept_string

    grammar = xgrammar.Grammar.from_json_schema(
        load_schema(schema).json_grammar.source, any_whitespace=False, separators=(",", ":")
    )
    return bool(_is_grammar_accept_string(grammar, text))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 5}, ["abcde", "a"], ["abcdef", ""]),
        ({"type": "string", "pattern": "[0-9]"}, ["a1\n", '"7"', "\\1"], ["a", '"']),
        ({"type": "string", "pattern": '^"+$'}, ['""'], ["a"]),
        ({"type": "string", "pattern": r"^\s$"}, [" ", "\n", "\u00a0"], ["a", "  "]),
        ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", "2024-02-31"]),
        (
            {"type": "string", "format": "date-time"},
            ["2024-01-31T23:59:59.5+01:00"],
            ["2024-01-31T23:59:60Z", "2024-01-31"],
        ),
        ({"type": "string", "enum": ["a", 1]}, ["a"], [1]),
        ({"type": "integer"}, [0, 2**63 - 1, -(2**63)], [2**63, 0.5]),
        ({"type": "integer", "multipleOf": 7}, [-14, 0, 21], [1, 8]),
        (
            {"type": "integer", "multipleOf": 5, "minimum": -7, "exclusiveMaximum": 4000},
            [-5, 3995],
            [-10, 4000, 1],
        ),
        ({"type": "integer", "minimum": 0.5, "maximum": 3.5}, [1, 3], [0, 4]),
        ({"type": "integer", "minimum": 3, "maximum": 2**80}, [3, 2**62], [2]),
        ({"minimum": 3}, [3, 4.5], [2, "a"]),
        ({"maxLength": 1}, ["a"], ["ab", 3]),
        ({"type": ["string", "integer"], "maxLength": 1, "minimum": 3}, ["a", 3], ["ab", 2]),
        ({"properties": {"a": {}}, "required": ["b"]}, [{"b": 1}], [{}, {"a": 1}, 3]),
        (
            {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"properties": {"b": {}}}]},
            [{"a": 1}, {"b": 1}],
            [3, '""'],
        ),
        (
            {"$defs": {"s": {"type": "string"}}, "$ref": "#/$defs/s", "maxLength": 1},
            ["a"],
            ["aa", 1],
        ),
        ({"allOf": [{"minLength": 1}, {"maxLength": 2}]}, ["a", "ab"], ["", "abc", 1]),
        (
            {
                "type": "array",
                "items": [{"type": "integer"}],
                "$schema": "http://json-schema.org/draft-07/schema#",
            },
            [[1]],
            [["a"]],
        ),
        (
            {"type": "object", "patternProperties": {"^x": {"type": "integer"}}},
            [{"xy": 1}, {"x": 2}],
            [{"y": 1}, {"x": "a"}],
        ),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, [{"ab": 1}], [{"b": 1}]),
        (
            {"$anchor": "top", "properties": {"c": {"$ref": "#top"}}},
            [{"c": {"c": {}}}],
            [{"c": 1}],
        ),
        (
            {"const": {"b": [1.5, None], "a": "\u2028/\u0001"}},
            [{"b": [1.5, None], "a": "\u2028/\u0001"}],
            [1],
        ),
    ],
)
def test_the_compiler_enforces_the_source(schema, good, bad):
    for value in good:
        assert accepts(schema, json.dumps(value, ensure_ascii=False, separators=(",", ":"))), value
    for value in bad:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        assert not accepts(schema, text), value
