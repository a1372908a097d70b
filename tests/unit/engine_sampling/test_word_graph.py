from __future__ import annotations

import json
import random

import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix.engine.grammar import json_grammar as json_grammar_module
from batchradix.engine.grammar.json_grammar import json_grammar
from batchradix.engine.grammar.state import GrammarState
from batchradix.engine.grammar.word_graph import enum_rules
from batchradix.types import GrammarSpec


@pytest.fixture(scope="session")
def accepts(byte_compiler):
    native = byte_compiler._native

    def accepts_(grammar, text):
        matcher = xgrammar.GrammarMatcher(native.compile_grammar(grammar))
        return matcher.accept_string(text) and matcher.is_completed()

    return accepts_


def graph(values):
    return xgrammar.Grammar.from_ebnf("\n".join(["root ::= words", *enum_rules(values, "words")]))


def spelt(value):
    return json.dumps(value, ensure_ascii=False)


values_ = st.lists(
    st.text(st.characters(codec="utf-8"), max_size=4) | st.text("ab", max_size=5),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=80)
@given(values_, st.lists(st.text('ab"\\', max_size=5), max_size=5))
def test_the_graph_accepts_exactly_the_spellings_of_its_values(accepts, values, others):
    grammar = graph(values)
    for value in values:
        assert accepts(grammar, spelt(value))
        assert not accepts(grammar, spelt(value)[:-1])
    for other in others:
        assert accepts(grammar, spelt(other)) == (other in values)


def test_every_string_up_to_a_length_is_judged_like_xgrammars_own_enum(accepts):
    values = ["", "a", "ab", "ba", "bab", 'a"', "é", "\n"]
    own = xgrammar.Grammar.from_json_schema(json.dumps({"enum": values}), any_whitespace=False)
    ours = graph(values)
    alphabet = ["a", "b", '\\"', "é", "\\n", '"', "\\"]
    texts = [""]
    for _ in range(4):
        texts += [t + c for t in texts[-(7**3) :] for c in alphabet]
    for text in texts[:400]:
        assert accepts(ours, '"' + text + '"') == accepts(own, '"' + text + '"')


def test_shared_beginnings_and_ends_are_written_once():
    rules = enum_rules([f"SKU-{i:05d}" for i in range(20_000)], "sku")
    assert len(rules) < 12


def test_a_very_long_value_is_one_literal():
    assert len(enum_rules(["x" * 5000], "long")) == 1


def nested(enum):
    return {
        "type": "object",
        "properties": {
            "enum": {"type": "array", "items": enum},
            "b": {"anyOf": [enum, {"type": "null"}]},
        },
        "required": ["enum", "b"],
    }


def test_a_large_enum_anywhere_in_a_schema_means_what_it_says(byte_compiler):
    values = [f"v{i}é" for i in range(400)]
    source = json.dumps(nested({"type": "string", "enum": values}))
    assert "large_enum_0" in str(json_grammar(source))
    compiled = byte_compiler.compile(GrammarSpec(kind="json_schema", source=source))
    good = {"enum": ["v0é", "v399é"], "b": "v17é"}

    def ok(value):
        state = GrammarState(compiled)
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return state.accept_text(text) and state.is_complete

    assert ok(good)
    assert ok({**good, "b": None})
    assert not ok({**good, "b": "v400é"})
    assert not ok({**good, "enum": ["v4"]})


def test_a_schema_with_two_large_enums_keeps_them_apart(accepts):
    first, second = [f"a{i}" for i in range(300)], [f"b{i}" for i in range(300)]
    schema = {"type": "array", "prefixItems": [{"enum": first}, {"enum": second}], "minItems": 2}
    grammar = json_grammar(json.dumps(schema))
    assert accepts(grammar, '["a7","b8"]')
    assert not accepts(grammar, '["b7","a8"]')


@pytest.mark.parametrize(
    "enum",
    [
        {"enum": [*range(300)]},
        {"enum": [f"x{i}" for i in range(300)], "pattern": "x"},
        {"enum": [f"x{i}" for i in range(10)]},
        {"oneOf": [{"enum": [f"x{i}" for i in range(300)]}, {"type": "null"}]},
        {"const": {"enum": [f"x{i}" for i in range(300)]}},
    ],
    ids=["numbers", "with siblings", "small", "in oneOf", "inside a constant"],
)
def test_what_cannot_be_lifted_exactly_is_left_to_xgrammar(enum):
    own = xgrammar.Grammar.from_json_schema(
        json.dumps(enum), any_whitespace=False, separators=(",", ":"), strict_mode=True
    )
    assert str(json_grammar(json.dumps(enum))) == str(own)


def test_lifting_is_given_up_where_the_printed_grammar_is_not_read_back_the_same(monkeypatch):
    real = xgrammar.Grammar.from_ebnf

    class Broken(xgrammar.Grammar):
        from_ebnf = staticmethod(lambda text, **_: real('root ::= "different"'))

    monkeypatch.setattr(json_grammar_module.xgrammar, "Grammar", Broken)
    source = json.dumps({"enum": [f"x{i}" for i in range(300)]})
    assert "x299" in str(json_grammar(source))


def test_values_with_lone_surrogates_are_left_to_xgrammar():
    values = [f"x{i}" for i in range(300)] + ["\ud800"]
    with pytest.raises(UnicodeEncodeError):
        enum_rules(values, "words")


def test_random_enums_of_every_size_round_the_border_agree(accepts):
    rng = random.Random(3)
    for size in (json_grammar_module.LARGE_ENUM - 1, json_grammar_module.LARGE_ENUM):
        values = ["".join(rng.choices("abc\\é", k=6)) for _ in range(size)]
        grammar = json_grammar(json.dumps({"enum": values}))
        assert accepts(grammar, spelt(values[0]))
        assert accepts(grammar, spelt(values[-1]))
        assert not accepts(grammar, '"zzz"')
