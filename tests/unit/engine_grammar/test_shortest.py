"""The shortest answer of a schema: written out where it is short, refused where nobody has room."""

from __future__ import annotations

import json
from typing import Any

import pytest

from batchradix.engine.grammar.closing import minimal_answer
from batchradix.errors import SchemaError
from batchradix.types import GrammarSpec


def _shortest(schema: dict[str, Any]) -> str | None:
    return minimal_answer(GrammarSpec(kind="json_schema", source=json.dumps(schema)))


_NESTED: dict[str, Any] = {"type": "integer"}
for _ in range(5):
    _NESTED = {"type": "array", "items": _NESTED, "minItems": 1000}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "minItems": 10**9, "items": {"type": "integer"}},
        {"type": "array", "prefixItems": [{"type": "integer"}], "minItems": 10**12, "items": {}},
        {"type": "string", "minLength": 10**9},
        {"type": "string", "minLength": 10**40},
        {"type": "object", "minProperties": 10**9, "additionalProperties": True},
        _NESTED,
    ],
)
def test_an_answer_longer_than_anybody_writes_is_refused_without_being_written_out(
    schema: dict[str, Any],
) -> None:
    with pytest.raises(SchemaError, match="more than 1,048,576 bytes"):
        _shortest(schema)


def test_a_branch_that_is_too_long_leaves_the_others() -> None:
    huge = {"type": "string", "minLength": 10**9}
    assert _shortest({"anyOf": [huge, {"type": "null"}]}) == "null"


def test_an_object_of_many_free_names_is_written_out() -> None:
    text = _shortest({"type": "object", "minProperties": 200, "additionalProperties": True})
    assert text is not None
    assert len(json.loads(text)) == 200
