"""The one rule by which forced text becomes tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix.engine.grammar.compiler import GrammarCompiler
from batchradix.engine.grammar.state import GrammarState
from batchradix.types import GrammarSpec

Start = Callable[..., GrammarState]


def spelt(compiler: GrammarCompiler, state: GrammarState, words: tuple[bytes, ...]) -> list[bytes]:
    return [words[i] for i in compiler.forced.next_ids(state)]


def allowed_words(state: GrammarState, words: tuple[bytes, ...]) -> set[bytes]:
    bits = np.unpackbits(state.allowed().view(np.uint8), bitorder="little")
    return {words[i] for i in np.flatnonzero(bits)}


def shared_beginning(texts: list[bytes]) -> bytes:
    first, last = min(texts), max(texts)
    return first[
        : next(
            (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b),
            min(len(first), len(last)),
        )
    ]


OBJECT = {
    "type": "object",
    "properties": {"kind": {"enum": ["spam", "sport"]}, "n": {"type": "integer"}},
    "required": ["kind", "n"],
    "additionalProperties": False,
}


def test_forced_text_is_cut_as_the_tokenizer_cuts_it(
    compiler: GrammarCompiler, start: Start, words: tuple[bytes, ...]
) -> None:
    assert spelt(compiler, start(OBJECT, '{"kind":"spam'), words) == [b'","', b"n", b'":']


def test_a_last_token_is_held_back_where_a_longer_allowed_one_begins_with_it(
    compiler: GrammarCompiler, start: Start, words: tuple[bytes, ...]
) -> None:
    # {"kind":"sp is forced; its last token is p, which no longer word begins with.
    assert spelt(compiler, start(OBJECT), words) == [b'{"', b"kind", b'":"', b"s", b"p"]
    # `"s` and `"sp` are longer than `"` and allowed, so the quote is left to the model.
    enum = {"enum": ["spam", "ham"]}
    assert spelt(compiler, start(enum), words) == []
    assert b'"s' in allowed_words(start(enum), words)
    # None of them is allowed here.
    assert spelt(compiler, start({"enum": ["yes", "no"]}), words) == [b'"']
    # A string may follow the colon; `":"` is longer than `":`.
    union = {"type": "object", "properties": {"a": {"enum": ["x", 1]}}, "required": ["a"]}
    assert spelt(compiler, start(union), words) == [b'{"', b"a"]


def test_the_end_of_an_answer_is_never_held_back(
    compiler: GrammarCompiler, start: Start, words: tuple[bytes, ...]
) -> None:
    # `}x` is longer than `}`, but nothing may follow.
    assert spelt(compiler, start(OBJECT, '{"kind":"spam","n":1'), words) == []
    assert spelt(compiler, start({"const": {"kind": True}}), words) == [
        b'{"', b"kind", b'":', b"true", b"}",
    ]  # fmt: skip
    complete = start(OBJECT, '{"kind":"spam","n":1}')
    assert spelt(compiler, complete, words) == []


def test_the_only_allowed_token_is_forced_even_inside_a_character(
    compiler: GrammarCompiler, start: Start, words: tuple[bytes, ...]
) -> None:
    state = start({"const": "日本"}, b'"\xe6')
    assert state.forced_text() == ""
    assert b"".join(spelt(compiler, state, words)) == '"日本"'.encode()[2:]
    # Of two bytes that may follow, none is.
    assert spelt(compiler, start({"enum": ["é", "è"]}, b'"\xc3'), words) == []


def test_asking_moves_nothing(compiler: GrammarCompiler, start: Start) -> None:
    state = start(OBJECT)
    before = state.allowed().copy()
    first = compiler.forced.next_ids(state)
    assert compiler.forced.next_ids(state) == first
    assert np.array_equal(state.allowed(), before)
    for token_id in first:
        assert state.accept(token_id)
    with pytest.raises(ValueError, match="fewer than"):
        state.rollback(len(first) + 1)


def test_a_tokenizer_that_begins_every_text_with_a_space_spells_without_it(
    new_compiler: Callable[..., GrammarCompiler], words: tuple[bytes, ...]
) -> None:
    spec = GrammarSpec(kind="json_schema", source=json.dumps(OBJECT))
    plain, spaced = new_compiler(), new_compiler(first_space=True)
    assert spaced.opening(spec) == plain.opening(spec) != ()


def test_what_the_tokenizer_cannot_spell_is_not_forced(
    new_compiler: Callable[..., GrammarCompiler],
) -> None:
    spec = GrammarSpec(kind="json_schema", source=json.dumps(OBJECT))
    assert new_compiler(upper=True).opening(spec) == ()


@pytest.mark.timeout(30)
def test_a_text_without_end_is_not_forced(compiler: GrammarCompiler) -> None:
    endless = GrammarSpec(kind="ebnf", source='root ::= "a" | "b" x\nx ::= "ab" x')
    assert not compiler.compile(endless).always_ends
    state = GrammarState(compiler.compile(endless))
    assert compiler.forced.next_ids(state) == ()
    assert state.accept_text("b")
    assert compiler.forced.next_ids(state) == ()


texts = st.text('sp{}":,aékin1t', min_size=1, max_size=8)


@settings(max_examples=150, deadline=None)
@given(choices=st.lists(texts, min_size=1, max_size=4, unique=True), data=st.data())
def test_forced_tokens_are_what_every_answer_goes_on_with(
    choices: list[str],
    data: st.DataObject,
    compiler: GrammarCompiler,
    start: Start,
    words: tuple[bytes, ...],
) -> None:
    """On random walks: what is forced is what every possible answer goes on with, and what is
    certain and not forced is one token that a longer possible one begins with."""
    answers = [json.dumps(c, ensure_ascii=False).encode() for c in choices]
    state: Any = start({"enum": choices})
    done = b""
    while not state.is_complete:
        for word in spelt(compiler, state, words):
            assert state.accept(words.index(word))
            done += word
        rests = [a[len(done) :] for a in answers if a.startswith(done)]
        assert rests
        if state.is_complete:
            assert rests == [b""]
            break
        possible = allowed_words(state, words) - {b""}
        assert possible == {w for w in words if w and any(r.startswith(w) for r in rests)}
        common = shared_beginning(rests)
        is_inside_character = bool(common) and common[0] & 0xC0 == 0x80
        certain = b"" if is_inside_character else common.decode("utf-8", "ignore").encode()
        if certain:  # and yet left open: one token, with which a longer one begins
            assert certain in words
            assert any(w.startswith(certain) and w != certain for w in possible)
        assert len(possible) > 1
        word = data.draw(st.sampled_from(sorted(possible)))
        assert state.accept(words.index(word))
        done += word
    assert done in answers
