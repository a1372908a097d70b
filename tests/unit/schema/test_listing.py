"""Schemas that only a few texts match are known by these texts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchradix.schema.listing import MAX_TEXTS, finite_texts
from batchradix.schema.load import load_schema

FLAG = {"type": "boolean"}


def texts_of(schema: Any) -> list[str] | None:
    grammar = load_schema(schema).grammar
    return json.loads(grammar.source) if grammar.kind == "choices" else None


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ({"enum": ["b", "a", 'say "é"\n']}, ['"b"', '"a"', '"say \\"é\\"\\n"']),
        ({"enum": [1, 2.5, None, True, {"b": 1.0, "a": []}]}, None),
        ({"const": {"b": 1, "a": [None]}}, ['{"b":1,"a":[null]}']),
        (FLAG, ["true", "false"]),
        ({"type": ["boolean", "null"]}, ["true", "false", "null"]),
        ({"type": "integer", "minimum": -1, "exclusiveMaximum": 2}, ["-1", "0", "1"]),
        ({"type": "integer", "minimum": 1, "maximum": 20, "multipleOf": 6}, ["6", "12", "18"]),
        ({"anyOf": [{"enum": ["x", "y"]}, {"const": "y"}, {"type": "null"}]}, None),
        ({"$defs": {"k": {"enum": ["x"]}}, "$ref": "#/$defs/k"}, ['"x"']),
        (
            {"type": "object", "properties": {"a": FLAG, "b": {"const": 1}}, "required": ["a"]},
            ['{"a":true,"b":1}', '{"a":true}', '{"a":false,"b":1}', '{"a":false}'],
        ),
        (
            {"type": "object", "properties": {"a": FLAG, "b": FLAG}, "maxProperties": 1},
            ['{"a":true}', '{"a":false}', '{"b":true}', '{"b":false}', "{}"],
        ),
        ({"type": "array", "items": {"const": 0}, "maxItems": 2}, ["[]", "[0]", "[0,0]"]),
        (
            {"type": "array", "prefixItems": [FLAG, {"const": 0}], "items": False, "minItems": 1},
            ["[true]", "[false]", "[true,0]", "[false,0]"],
        ),
    ],
)
def test_all_texts_are_listed_in_the_schemas_order(schema: Any, texts: list[str] | None) -> None:
    if texts is None:
        texts = {
            "enum": ["1", "2.5", "null", "true", '{"b":1,"a":[]}'],
            "anyOf": ['"x"', '"y"', "null"],
        }[next(iter(schema))]
    assert texts_of(schema) == texts


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": "number", "minimum": 1, "maximum": 1},
        {"type": "integer", "minimum": 0},
        {"type": "integer", "minimum": 0, "maximum": MAX_TEXTS},
        {"type": "array", "items": FLAG},
        {"type": "array", "items": {"const": 1}, "maxItems": 10**9, "minItems": 10**9},
        {"type": "object", "properties": {"a": FLAG}, "additionalProperties": True},
        {"type": "object", "properties": {f"p{n}": FLAG for n in range(11)}},
        {"type": "object", "patternProperties": {"^a$": FLAG}, "maxProperties": 1},
        {"$defs": {"n": {"anyOf": [FLAG, {"type": "array", "items": {"$ref": "#/$defs/n"},
                                          "maxItems": 1}]}}, "$ref": "#/$defs/n"},
        {"enum": ["x" * 200 + str(n) for n in range(400)]},
        True,
    ],
)  # fmt: skip
def test_open_and_large_schemas_stay_grammars(schema: Any) -> None:
    loaded = load_schema(schema)
    assert loaded.grammar is loaded.json_grammar
    assert loaded.choices is None


def test_values_that_only_validation_rejects_are_no_choices() -> None:
    schema = {"type": "integer", "minimum": 0, "maximum": 9, "not": {"enum": [3, 4]}}
    assert texts_of(schema) == [str(n) for n in (0, 1, 2, 5, 6, 7, 8, 9)]
    unique = {"type": "array", "items": FLAG, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    assert texts_of(unique) == ["[true,false]", "[false,true]"]
    # Nothing is left: the check of every answer goes on to say so.
    assert texts_of({"type": "boolean", "not": {}}) is None


def test_values_that_the_grammar_compiler_would_round_are_listed_digit_for_digit() -> None:
    values = [2**70 + 1, 1 / 3, -(2**65)]
    assert texts_of({"enum": values}) == [str(value) for value in values]


def test_choices_are_called_by_their_strings_where_all_are_strings() -> None:
    assert load_schema({"enum": ["a", "é\n"]}).choices == ("a", "é\n")
    assert load_schema({"enum": ["1", 1]}).choices == ('"1"', "1")


def test_half_a_surrogate_pair_is_no_text() -> None:
    assert finite_texts({"enum": ["\ud800"]}) is None


words = st.text('ab"\\é', max_size=3)
leaves = st.one_of(
    st.builds(lambda v: {"enum": v}, st.lists(words | st.none(), min_size=1, max_size=3)),
    st.just(FLAG),
    st.builds(lambda a, n: {"type": "integer", "minimum": a, "maximum": a + n},
              st.integers(-12, 99), st.integers(0, 4)),
)  # fmt: skip


def larger(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.builds(
        lambda p, needed, most: {
            "type": "object",
            "properties": p,
            "required": [name for name in p if name in needed],
            "additionalProperties": False,
            **({"maxProperties": most} if most >= len(set(p) & needed) else {}),
        },
        st.dictionaries(words, parts, max_size=3),
        st.sets(words),
        st.integers(0, 3),
    )
    arrays = st.builds(
        lambda item, n, m: {"type": "array", "items": item, "minItems": n, "maxItems": n + m},
        parts,
        st.integers(0, 1),
        st.integers(0, 2),
    )
    return objects | arrays | st.builds(lambda s: {"anyOf": s}, st.lists(parts, min_size=1))


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(schema=st.recursive(leaves, larger, max_leaves=4))
def test_the_texts_are_those_that_the_grammar_allows(schema: Any) -> None:
    """Each is allowed, and there is no other: the grammar's own texts are counted."""
    import xgrammar

    from batchradix.engine.grammar.json_grammar import json_grammar

    loaded = load_schema(schema)
    listed = finite_texts(json.loads(loaded.json_grammar.source))
    if listed is None or len(listed) > 150:
        return
    tokens = [*(bytes([i]) for i in range(256)), b""]
    info = xgrammar.TokenizerInfo(
        tokens, xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[256]
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    native = compiler.compile_grammar(json_grammar(loaded.json_grammar.source))
    # Walks down every byte that the grammar allows.
    found: set[bytes] = set()
    waiting = [(b"", xgrammar.GrammarMatcher(native))]
    bitmask = xgrammar.allocate_token_bitmask(1, 257)
    while waiting:
        text, matcher = waiting.pop()
        matcher.fill_next_token_bitmask(bitmask)
        for token in range(257):
            if not (int(bitmask[0, token // 32]) >> (token % 32)) & 1:
                continue
            if token == 256:
                found.add(text)
                continue
            after = matcher.fork()
            assert after.accept_token(token)
            waiting.append((text + tokens[token], after))
    assert found == {text.encode() for text in listed}
