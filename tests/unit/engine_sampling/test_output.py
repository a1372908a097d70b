from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchradix.engine.grammar.state import GrammarState
from batchradix.engine.output import RowOutput
from batchradix.errors import RowErrorCode
from batchradix.types import FinishReason, RowSettings

EOS = 999


class PieceDetokenizer:
    """Tokens are pieces of a list; a piece may hold half a character."""

    def __init__(self, bytes_detokenizer, pieces):
        self._bytes = bytes_detokenizer
        self._pieces = pieces

    def push(self, token_id):
        return "".join(self._bytes.push(b) for b in self._pieces[token_id])

    def finish(self):
        return self._bytes.finish()


@pytest.fixture(scope="session")
def run(new_detokenizer):
    """Pushes pieces of bytes one token each, then end-of-sequence; gives the finished answer."""

    def run_(pieces, stop=(), max_tokens=10_000, end=True):
        out = RowOutput(
            settings=RowSettings(stop=tuple(stop)),
            max_tokens=max_tokens,
            eos_ids=frozenset({EOS}),
            detokenizer=PieceDetokenizer(new_detokenizer(), pieces),
            grammar=None,
        )
        for i in [*range(len(pieces)), *([EOS] if end else [])]:
            if out.push(i) is not None:
                break
        return out

    return run_


def naive(full, stops):
    """Decode all, then cut at the first stop string to be complete (the longest of several)."""
    for end in range(len(full) + 1):
        starts = [end - len(s) for s in stops if full[:end].endswith(s)]
        if starts:
            return full[: min(starts)]
    return full


def test_end_of_sequence_ends_the_answer_and_is_counted_but_not_kept(run):
    out = run([b"he", b"llo"])
    assert (out.text, out.token_ids, out.completion_tokens) == ("hello", [0, 1], 3)
    assert out.finish_reason is FinishReason.STOP


def test_max_tokens_ends_the_answer_with_length(run):
    out = run([b"a"] * 9, max_tokens=4)
    assert (out.text, out.completion_tokens) == ("aaaa", 4)
    assert out.finish_reason is FinishReason.LENGTH


def test_an_end_on_the_last_token_allowed_is_a_stop(run):
    assert run([b"a", b"b"], max_tokens=3).finish_reason is FinishReason.STOP
    assert run([b"a", b"x"], stop=["x"], max_tokens=2).finish_reason is FinishReason.STOP


def test_a_stop_string_inside_one_token_cuts_it(run):
    out = run([b"one ", b"two STOP three", b"four"], stop=["STOP"])
    assert (out.text, out.token_ids) == ("one two ", [0, 1])
    assert out.finish_reason is FinishReason.STOP


def test_a_stop_string_over_token_borders_is_found_and_nothing_of_it_is_kept(run):
    assert run([b"ab\n", b"\nc"], stop=["\n\n"]).text == "ab"
    assert run([b"x\xc3", b"\xa9", b"z"], stop=["éz"]).text == "x"


def test_a_stop_string_that_never_completes_stays_in_the_text(run):
    assert run([b"ab", b"EN"], stop=["END"]).text == "abEN"
    assert run([b"ab", b"EN", b"x"], stop=["END"]).text == "abENx"


def test_the_stop_string_that_completes_first_wins_however_tokens_fall(run):
    for pieces in ([b"abcd"], [b"a", b"b", b"c", b"d"], [b"ab", b"cd"]):
        assert run(pieces, stop=["abcd", "bc"]).text == "a"
    assert run([b"xab"], stop=["b", "ab"]).text == "x"


def test_half_a_character_at_the_end_becomes_a_replacement_character(run):
    out = run([b"a", b"\xe5\x8c"], end=False, max_tokens=2)
    assert out.text == "a�"
    assert run([b"a", b"\xe5\x8c"]).text == "a�"


def test_text_before_the_end_is_only_what_is_certain(new_detokenizer):
    pieces = [b"ab ", b"E", b"N", b"\xc3", b"\xa9", b"E"]
    out = RowOutput(
        settings=RowSettings(stop=("END", "EN!")),
        max_tokens=6,
        eos_ids=frozenset(),
        detokenizer=PieceDetokenizer(new_detokenizer(), pieces),
        grammar=None,
    )
    seen = []
    for i in range(6):
        out.push(i)
        seen.append(out.text)
    assert seen == ["ab ", "ab ", "ab ", "ab ", "ab ENé", "ab ENéE"]


def test_a_finished_answer_takes_no_more_tokens(run):
    out = run([b"a"])
    with pytest.raises(ValueError, match="finished"):
        out.push(0)


alphabet = st.sampled_from(["a", "b", "é", "北", "👩", "\n"])
words = st.text(alphabet, min_size=1, max_size=4)


@settings(deadline=None, max_examples=300)
@given(st.text(alphabet, max_size=30), st.lists(words, max_size=3), st.data())
@example("aab", ["ab"], None)
def test_text_equals_decoding_all_and_cutting_at_the_first_stop(run, full, stops, data):
    raw = full.encode()
    cuts = [] if data is None else data.draw(st.lists(st.integers(0, len(raw)), max_size=12))
    borders = sorted({0, len(raw), *cuts})
    pieces = [raw[a:b] for a, b in itertools.pairwise(borders)]
    out = run(pieces, stop=stops)
    assert out.text == naive(full, stops)
    if len(out.text) < len(full):
        assert out.finish_reason is FinishReason.STOP
        # It ended with the very token that completed the stop string.
        before = b"".join(pieces[: len(out.token_ids) - 1]).decode("utf-8", "ignore")
        assert naive(before, stops) == before


@settings(deadline=None, max_examples=100)
@given(st.text(alphabet, max_size=30), st.lists(words, max_size=3))
def test_text_once_read_stays(new_detokenizer, full, stops):
    raw = full.encode()
    out = RowOutput(
        settings=RowSettings(stop=tuple(stops)),
        max_tokens=len(raw) + 1,
        eos_ids=frozenset({EOS}),
        detokenizer=new_detokenizer(),
        grammar=None,
    )
    read = ""
    for byte in raw:
        done = out.push(byte)
        assert out.text.startswith(read)
        read = out.text
        if done:
            return
    assert naive(full, stops).startswith(read)


def grammar_output(compile_schema, new_detokenizer, schema, **options):
    return RowOutput(
        settings=RowSettings(stop=options.get("stop", ())),
        max_tokens=options.get("max_tokens", 100),
        eos_ids=frozenset({258, 263}),
        detokenizer=new_detokenizer(),
        grammar=GrammarState(compile_schema(schema)),
    )


PAIR = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def test_a_complete_grammar_ends_the_answer_without_an_end_token(compile_schema, new_detokenizer):
    out = grammar_output(compile_schema, new_detokenizer, PAIR)
    reasons = [out.push(b) for b in b'{"a":7}']
    assert reasons == [None] * 6 + [FinishReason.STOP]
    assert (out.text, out.completion_tokens) == ('{"a":7}', 7)


def test_a_grammar_that_can_go_on_waits_for_the_end_token(compile_schema, new_detokenizer):
    out = grammar_output(compile_schema, new_detokenizer, {"type": "integer"})
    assert out.push(ord("7")) is None
    assert out.push(ord("5")) is None
    assert out.push(258) is FinishReason.STOP
    assert (out.text, out.token_ids, out.completion_tokens) == ("75", [55, 53], 3)


@pytest.mark.parametrize("token_id", [258, 257, ord("x"), 10_000])
def test_a_token_the_grammar_forbids_is_the_rows_error(compile_schema, new_detokenizer, token_id):
    out = grammar_output(compile_schema, new_detokenizer, PAIR)
    out.push(ord("{"))
    assert out.push(token_id) is FinishReason.ERROR
    assert out.error is not None
    assert out.error.code is RowErrorCode.ENGINE_FAILED
    assert (out.text, out.completion_tokens) == ("{", 2)


def test_stop_strings_cut_structured_answers_too(compile_schema, new_detokenizer):
    out = grammar_output(compile_schema, new_detokenizer, PAIR, stop=('":',))
    reasons = [out.push(b) for b in b'{"a":']
    assert reasons[-1] is FinishReason.STOP
    assert out.text == '{"a'


def test_an_answer_cut_by_length_under_a_grammar_says_length(compile_schema, new_detokenizer):
    out = grammar_output(compile_schema, new_detokenizer, PAIR, max_tokens=6)
    assert [out.push(b) for b in b'{"a":7'][-1] is FinishReason.LENGTH
