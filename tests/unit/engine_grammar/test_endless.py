"""Telling grammars whose texts never end."""

from __future__ import annotations

import pytest
import xgrammar

from batchradix.engine.grammar.endless import endless_rules

ENDS = [
    'root ::= "a"',
    'root ::= "a" root | "b"',
    'root ::= "ab" (root | "x")* ("q" root)? "c"{2,3} [^\\"a-z]+',
    'root ::= "[" root{0,3} "]"',
    'root ::= x | y\nx ::= "(" y ")"\ny ::= "q" | x',
    'root ::= "\\"" [^"\\\\\\]] "]" "(" | "|" root',
]
NEVER_ENDS = [
    'root ::= "a" root',
    'root ::= "a" | "b" x\nx ::= "d" x',
    'root ::= "a" x\nx ::= "b" y | "c" root\ny ::= ("d" | "e") x',
    'root ::= "a" root{1,3}',
    'root ::= "a" | "|" (root | "b") x\nx ::= "()" x+',
]


@pytest.mark.parametrize("source", ENDS)
def test_a_grammar_with_a_way_out_everywhere_ends(source: str) -> None:
    assert not endless_rules(str(xgrammar.Grammar.from_ebnf(source)))


@pytest.mark.parametrize("source", NEVER_ENDS)
def test_a_grammar_with_a_place_of_no_return_does_not(source: str) -> None:
    assert endless_rules(str(xgrammar.Grammar.from_ebnf(source)))


def test_json_and_patterns_end() -> None:
    assert not endless_rules(str(xgrammar.Grammar.builtin_json_grammar()))
    assert not endless_rules(str(xgrammar.Grammar.from_regex("a(b|c)*\\(d[x\\]]{2,40}")))
    schema = '{"type":"array","items":{"type":"string","pattern":"^[a-c\\\\])(]{2,3}$"}}'
    assert not endless_rules(str(xgrammar.Grammar.from_json_schema(schema)))


def test_what_is_not_understood_is_taken_for_one_that_ends() -> None:
    assert not endless_rules("root ::= <<something new>> root")
