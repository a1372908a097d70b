"""Strings with a length bound: what they may hold, how long they may be, what their rules cost."""

from __future__ import annotations

import json
import re

import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix.engine.grammar.bounded_text import with_bounded_text
from batchradix.engine.grammar.json_grammar import json_grammar
from batchradix.schema.keywords import EXACT_LENGTH


def matcher(schema: object) -> xgrammar.GrammarMatcher:
    tokens = [bytes([i]) for i in range(256)] + [b"<end>"]
    info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, stop_token_ids=[256])
    compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)
    return xgrammar.GrammarMatcher(compiler.compile_grammar(json_grammar(json.dumps(schema))))


def accepts(schema: object, text: str) -> bool:
    state = matcher(schema)
    return state.accept_string(text) and state.is_completed()


CHARACTERS = st.sampled_from(
    ["a", "Z", " ", "é", "😀", "\u2028", '"', "\\", "/", "\n", "\x01", "\x7f"]
)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    least=st.integers(0, 4),
    more=st.none() | st.integers(0, 5),
    text=st.lists(CHARACTERS, max_size=10).map("".join),
    is_ascii=st.booleans(),
)
def test_a_string_matches_when_its_characters_are_within_the_bounds(
    least: int, more: int | None, text: str, is_ascii: bool
) -> None:
    if is_ascii:
        text = text.replace("😀", "!")  # else the halves of a surrogate pair are escaped
    schema = {"type": "string", "minLength": least}
    if more is not None:
        schema["maxLength"] = least + more
    written = json.dumps(text, ensure_ascii=is_ascii)
    assert accepts(schema, written) == (
        least <= len(text) <= least + (1000 if more is None else more)
    )


@pytest.mark.parametrize("least", [0, 1])
@pytest.mark.parametrize("most", [1, 2, 3])
def test_raw_control_characters_and_half_escapes_do_not_match(least: int, most: int) -> None:
    schema = {"type": "string", "minLength": least, "maxLength": most}
    for text in ('"\t"', '"\x00"', r'"\x"', r'"\u12"', r'"\ud800"', '"a', '""a"'):
        assert not accepts(schema, text), text
    for character in ("a", "é", r"\"", r"\n", r"\/", r"\u00e9"):
        assert accepts(schema, f'"{character * most}"'), character
        assert not accepts(schema, f'"{character * (most + 1)}"'), character
    assert accepts(schema, '""') == (least == 0)


def test_many_strings_share_their_rules_and_none_repeats_what_has_alternatives() -> None:
    bounds = [{"maxLength": n} for n in (3, 40, 40, 60)] + [{"minLength": 2, "maxLength": 30}]
    properties = {f"p{i}": {"type": "string", **bound} for i, bound in enumerate(bounds)}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    printed = str(json_grammar(json.dumps(schema)))
    assert len(re.findall(r"^text_left_\d+ ::=", printed, re.MULTILINE)) == 61
    assert not re.search(r"(?<!digits)(?<!items)(?<!properties)\{\d+, -?\d+\}", printed)


@pytest.mark.parametrize("most", [EXACT_LENGTH, EXACT_LENGTH + 1, 1000])
def test_long_strings_are_bounded_and_with_escapes_as_far_as_is_said(most: int) -> None:
    schema = {"type": "string", "maxLength": most}
    assert accepts(schema, '"' + "a" * most + '"')
    assert not accepts(schema, '"' + "a" * (most + 1) + '"')
    assert accepts(schema, '"' + "a" * (most - 1) + r"\n" + '"')
    is_exact = most <= EXACT_LENGTH
    assert accepts(schema, '"' + "a" * most + r"\n" + '"') != is_exact


def test_many_required_characters_are_counted() -> None:
    schema = {"type": "string", "minLength": 200, "maxLength": 202}
    for count in (199, 200, 202, 203):
        assert accepts(schema, f'"{"a" * count}"') == (200 <= count <= 202)


def test_names_of_properties_are_bounded_too() -> None:
    schema = {
        "type": "object",
        "additionalProperties": {"type": "integer"},
        "propertyNames": {"maxLength": 2},
    }
    assert accepts(schema, '{"ab":1,"\\n":2}')
    assert not accepts(schema, '{"abc":1}')


def test_a_grammar_without_bounded_strings_stays_as_it_is() -> None:
    printed = str(xgrammar.Grammar.from_json_schema('{"type": "string"}'))
    assert with_bounded_text(printed) == printed
