"""Which grammars may compile in this process."""

from __future__ import annotations

import json

import pytest

from batchradix.engine.grammar.cost import is_cheap
from batchradix.schema.output_schema import OutputSchema
from batchradix.types import GrammarSpec

INVOICE = {
    "type": "object",
    "properties": {
        "number": {"type": "string", "maxLength": 30},
        "date": {"type": "string", "format": "date"},
        "sent": {"anyOf": [{"type": "string", "format": "date-time"}, {"type": "null"}]},
        "total": {"type": "number", "minimum": 0},
        "code": {"type": "string", "pattern": "^[A-Z]{2,3}-[0-9]{3,5}$"},
        "kind": {"enum": ["a", "b", None, 3]},
    },
    "required": ["number", "total"],
}
ORDER = {
    "type": "object",
    "properties": {"lines": {"type": "array", "maxItems": 10, "items": {"$ref": "#/$defs/line"}}},
    "$defs": {"line": {"type": "object", "properties": {"text": {"type": "string"}}}},
}
CHEAP = [INVOICE, ORDER, True, {"type": "object"}, {"type": "array"}, {"enum": list(range(200))}]
DANGEROUS = [
    {"type": "string", "pattern": "^([a-z]{1,50}[0-9]{1,50}){1,50}$"},
    {"type": "string", "pattern": "^[a-z]{0,50}[a-z0-9]{0,50}$"},
    {"type": "string", "pattern": "^(((a*)*)*|b+)*(a*b*)*(a*b*)*(a*b*)*(a*b*)*(a*b*)*$"},
    {"type": "array", "maxItems": 50, "items": INVOICE},
    {"enum": [f"a long value of an enum {n}" for n in range(2000)]},
    {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(1000)}},
    {"anyOf": [{"type": "array", "items": {"const": f"v{n}"}} for n in range(300)]},
    {"type": "array", "items": {"$ref": "#"}},
    {"type": "object", "patternProperties": {"^a": {"type": "string"}}},
    {"type": "object", "additionalProperties": True, "minProperties": 3},
]


@pytest.mark.parametrize("schema", CHEAP)
def test_everyday_schemas_are_cheap(schema):
    assert is_cheap(OutputSchema(schema).json_grammar)


@pytest.mark.parametrize("schema", DANGEROUS)
def test_what_can_blow_up_is_not(schema):
    assert not is_cheap(OutputSchema(schema).json_grammar)


@pytest.mark.parametrize(
    "source",
    ['{"oneOf":[{"type":"null"}]}', '{"not":{}}', '{"type":["null"]}', '{"type":"string","x":1}',
     '{"type":"string","format":"new"}', '{"$ref":"#/nope"}', '[]', '3', '{"type":', '"a"',
     '{"type":"string","maxLength":"a"}', '{"anyOf":3}', '{"type":"object","properties":[]}',
     "[" * 100_000],
)  # fmt: skip
def test_what_is_not_understood_is_not_cheap(source):
    assert not is_cheap(GrammarSpec(kind="json_schema", source=source))


def test_a_plain_regular_expression_is_cheap_and_ebnf_never():
    assert is_cheap(GrammarSpec(kind="regex", source="[a-z]+-[0-9]{3}(x|yy)"))
    assert not is_cheap(GrammarSpec(kind="regex", source="(a{1,99}b{1,99}){1,99}"))
    assert not is_cheap(GrammarSpec(kind="regex", source="(?=a)b"))
    assert not is_cheap(GrammarSpec(kind="ebnf", source='root ::= "a"'))
    assert not is_cheap(GrammarSpec(kind="regex", source=json.dumps("a" * 2000)))
