"""Answers that are texts: patterns, grammars, choices; and which of them a job asks for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix.errors import OptionError, RowErrorCode, SchemaError
from batchradix.schema.answer_format import AnswerFormat, answer_format, load_format
from batchradix.schema.answers import InvalidAnswer
from batchradix.schema.output_schema import OutputSchema
from batchradix.schema.text_formats import ChoiceFormat, EbnfFormat, RegexFormat

_BYTES = xgrammar.GrammarCompiler(
    xgrammar.TokenizerInfo(
        [bytes([i]) for i in range(256)] + [b"</s>"], xgrammar.VocabType.RAW, stop_token_ids=[256]
    ),
    max_threads=1,
)


def taken_by_grammar(format_: AnswerFormat, texts: list[str]) -> list[bool]:
    spec = format_.grammar
    read = xgrammar.Grammar.from_regex if spec.kind == "regex" else xgrammar.Grammar.from_ebnf
    compiled = _BYTES.compile_grammar(read(spec.source))
    found = []
    for text in texts:
        matcher = xgrammar.GrammarMatcher(compiled)
        found.append(all(map(matcher.accept_token, text.encode())) and matcher.is_completed())
    return found


def taken_by_check(format_: AnswerFormat, text: str) -> bool:
    try:
        value = format_.parse(text)
    except InvalidAnswer as invalid:
        return invalid.code is not RowErrorCode.SCHEMA_MISMATCH
    return bool(value == text)


@st.composite
def patterns(draw: st.DrawFn, depth: int = 3) -> str:
    """Patterns that ECMA-262 and Python read alike."""
    if depth == 0 or draw(st.integers(0, 2)) == 0:
        return draw(
            st.sampled_from(
                ["a", "b", "é", "[ab]", "[^a]", r"[\]\-^x]", r"\d", r"\.", '"', r"\\", "/", "😀"]
            )
        )
    kind = draw(st.sampled_from(["concat", "alt", "repeat"]))
    parts = draw(st.lists(patterns(depth=depth - 1), min_size=1, max_size=3))
    if kind == "concat":
        return "".join(parts)
    if kind == "alt":
        return f"({'|'.join(parts)})"
    return f"({parts[0]}){draw(st.sampled_from(['*', '+', '?', '{2}', '{1,2}', '{0,3}', '{2,}']))}"


@given(
    patterns(), st.lists(st.text(alphabet='abé1."\\c]-x/😀', max_size=6), min_size=1, max_size=12)
)
@settings(derandomize=True, max_examples=60, deadline=None)
def test_grammar_check_and_python_agree_on_every_pattern(pattern: str, texts: list[str]) -> None:
    format_ = RegexFormat(pattern)
    expected = [re.fullmatch(pattern, text, re.ASCII) is not None for text in texts]
    assert [taken_by_check(format_, text) for text in texts] == expected
    assert taken_by_grammar(format_, texts) == expected
    again = RegexFormat(
        format_.grammar.source
    )  # our parser reads what we write as the library does
    assert [taken_by_check(again, text) for text in texts] == expected


@pytest.mark.parametrize("pattern", ["^(a|b)$", "^a|b$", "(^a$|^b$)", "a|b", "(?:a|b)"])
def test_anchors_at_the_ends_say_nothing_new(pattern: str) -> None:
    texts = ["a", "b", "ab", "", "xa"]
    assert taken_by_grammar(RegexFormat(pattern), texts) == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("(?=a)a", "lookaround"),
        ("(?<!a)b", "lookbehind"),
        (r"(a)\1", r"\1"),
        (r"\ba", r"\b"),
        ("a(^b)", "an anchor in the middle"),
        (r"\p{L}", r"\p"),
        ("(a", "unfinished"),
        ("*", "stray"),
        ("((a{200}){200})", "too large"),
        ("^$", "nothing but the empty text"),
        ("(" * 5000 + "a" + ")" * 5000, "too deeply"),
    ],
)
def test_what_no_grammar_can_enforce_is_refused(pattern: str, problem: str) -> None:
    with pytest.raises(SchemaError, match=r"^regex: ") as refused:
        RegexFormat(pattern)
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"\n\t", "\n\t", "nt"),
        (r"[^\n]", "a", "\n"),
        (r".", "\x01", "\u2028"),
        (r"\s", "\u2028", "\u200b"),
        (r"\x7f\u0080", "\x7f\x80", "x"),
        (r"\u{1F600}", "😀", "u"),
        (r"(x[0-9]{2,3})?y", "x12y", "12y"),
    ],
)
def test_characters_that_are_hard_to_write_are_written_right(
    pattern: str, good: str, bad: str
) -> None:
    format_ = RegexFormat(pattern)
    assert taken_by_grammar(format_, [good, bad]) == [True, False]
    assert [taken_by_check(format_, text) for text in (good, bad)] == [True, False]


def test_a_pattern_that_python_takes_for_ever_over_is_checked_at_once() -> None:
    assert not taken_by_check(RegexFormat("(a*)*b"), "a" * 2000)


def test_choices_are_dictionary_encoded_and_nothing_else_is_taken() -> None:
    format_ = ChoiceFormat(["yes", "no"])
    assert format_.parse("no") == "no"
    assert not taken_by_check(format_, "maybe")
    column = format_.to_arrow(["no", None, "yes"])
    assert column.type == pa.dictionary(pa.int32(), pa.string()) == format_.arrow_type
    assert column.to_pylist() == ["no", None, "yes"]
    assert (format_.grammar.kind, format_.grammar.source) == ("choices", '["yes","no"]')


@pytest.mark.parametrize(
    ("choices", "problem"),
    [
        ([], "there are none"),
        (["a", "a"], "'a' occurs twice"),
        (["a", ""], "empty"),
        (["a", 1], "1 is no text"),
        (["\ud800"], "no Unicode"),
        ("[1", "no JSON list"),
        ({"a": 1}, "expected a list"),
    ],
)
def test_bad_choices_are_refused(choices: Any, problem: str) -> None:
    with pytest.raises(SchemaError, match=r"^choices: ") as refused:
        answer_format(choices=choices)
    assert problem in str(refused.value)


def test_choices_come_from_text_lists_lines_and_json(tmp_path: Path) -> None:
    lines, listed = tmp_path / "lines.txt", tmp_path / "list.json"
    lines.write_text("big red\n\nblue, light\n")
    listed.write_text('["big red", "blue, light"]')
    for given_ in (str(lines), lines, str(listed), ["big red", "blue, light"]):
        found = answer_format(choices=given_)
        assert isinstance(found, ChoiceFormat)
        assert found.choices == ("big red", "blue, light")
    found = answer_format(choices="a, b,c")
    assert isinstance(found, ChoiceFormat)
    assert found.choices == ("a", "b", "c")


def test_a_grammar_needs_a_root_and_cannot_be_cut_by_a_stop_string(tmp_path: Path) -> None:
    path = tmp_path / "sum.gbnf"
    path.write_text('# sums\nroot ::= num ("+" num)*\nnum ::= [0-9]+\n')
    format_ = answer_format(grammar=str(path))
    assert isinstance(format_, EbnfFormat)
    assert taken_by_grammar(format_, ["1+22", "1+", ""]) == [True, False, False]
    assert format_.parse("1+22") == "1+22"
    assert not format_.takes_stop
    for given_, problem in (('num ::= "1"', "no rule 'root'"), ("nowhere.gbnf", "does not exist")):
        with pytest.raises(SchemaError, match=problem):
            answer_format(grammar=given_)


def test_the_ways_to_describe_an_answer_exclude_each_other() -> None:
    with pytest.raises(OptionError, match="regex and choices exclude each other"):
        answer_format(regex="a", choices=["a", "b"])
    assert answer_format() is None
    made = answer_format(regex="a")
    assert answer_format(schema=made) is made
    assert isinstance(answer_format(schema=True), OutputSchema)


@pytest.mark.parametrize(
    "format_",
    [RegexFormat("a"), EbnfFormat('root ::= "a"'), ChoiceFormat(["a"]), OutputSchema(True)],
    ids=lambda format_: format_.kind,
)
def test_every_format_is_taken_where_a_schema_is(format_: AnswerFormat) -> None:
    assert load_format(format_) is format_
    field = format_.arrow_field("value")
    assert field.nullable
    assert field.type == format_.arrow_type == format_.to_arrow([None]).type
