"""A few texts as a trie of their canonical tokens, and the way through it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix.engine.grammar.choices import ChoiceState, CompiledChoices
from batchradix.engine.grammar.closing import Closer, minimal_answer
from batchradix.engine.grammar.compiler import MAX_BRANCHES, GrammarCompiler
from batchradix.engine.grammar.state import GrammarState, fill_batch
from batchradix.errors import SchemaError
from batchradix.types import GrammarSpec

EOS = 273


def spec_of(*choices: str) -> GrammarSpec:
    return GrammarSpec(kind="choices", source=json.dumps(choices, ensure_ascii=False))


def choose_among(compiler: GrammarCompiler, *choices: str) -> ChoiceState:
    compiled = compiler.compile(spec_of(*choices))
    assert isinstance(compiled, CompiledChoices)
    return ChoiceState(compiled)


def allowed_ids(state: ChoiceState) -> list[int]:
    bits = np.unpackbits(state.allowed().view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def word_ids(words: Sequence[bytes], *wanted: bytes) -> list[int]:
    return [words.index(word) for word in wanted]


def test_a_choice_has_the_tokenizers_own_spelling_alone(
    compiler: GrammarCompiler, words: tuple[bytes, ...]
) -> None:
    # `"spam"` is `"sp` `am` `"` here, and no other way of cutting it is allowed.
    state = choose_among(compiler, '"spam"', '"ham"')
    assert allowed_ids(state) == sorted(word_ids(words, b'"sp', b'"'))
    assert not state.accept(words.index(b'"s'))
    assert state.accept(words.index(b'"sp'))
    assert compiler.forced.next_ids(state) == tuple(word_ids(words, b"am", b'"'))


def test_what_all_choices_begin_with_opens_the_answer_and_nothing_is_held_back(
    compiler: GrammarCompiler, words: tuple[bytes, ...]
) -> None:
    opening = compiler.opening(spec_of('{"kind":"x"}', '{"kind":"y"}'))
    assert [words[i] for i in opening] == [b'{"', b"kind", b'":"']
    assert len(compiler.opening(spec_of("true"))) == 1


def test_the_end_of_sequence_tells_a_choice_from_one_that_goes_on(
    compiler: GrammarCompiler, words: tuple[bytes, ...]
) -> None:
    state = choose_among(compiler, "1", "10", "2")
    assert compiler.forced.next_ids(state) == ()
    assert state.accept(words.index(b"1"))
    assert state.can_stop
    assert not state.is_complete
    assert allowed_ids(state) == [words.index(b"0"), EOS]
    assert state.accept(EOS)
    assert state.is_terminated
    assert state.is_complete
    assert not state.accept(EOS)
    assert allowed_ids(state) == []
    state.rollback(1)
    assert not state.is_terminated
    assert state.accept(words.index(b"0"))
    assert state.is_complete
    with pytest.raises(ValueError, match="fewer than"):
        state.rollback(3)


def test_without_an_end_of_sequence_only_beginnings_of_others_are_refused(
    words: tuple[bytes, ...], compiler: GrammarCompiler
) -> None:
    endless = GrammarCompiler(compiler._tokenizer, compiler.vocab_size, [])
    assert ChoiceState(endless.compile(spec_of("cat", "dog"))).accept(words.index(b"c"))  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="'cat' is the beginning of 'category'"):
        endless.compile(spec_of("dog", "cat", "category"))


def test_a_text_that_the_tokenizer_would_change_is_cut_into_the_fewest_tokens(
    new_compiler: Callable[..., GrammarCompiler], words: tuple[bytes, ...]
) -> None:
    opening = new_compiler(upper=True).opening(spec_of("spamkind1"))
    assert [words[i] for i in opening] == [b"spam", b"kind", b"1"]
    spaced = new_compiler(first_space=True).opening(spec_of('{"kind'))
    assert [words[i] for i in spaced] == [b'{"', b"kind"]


def test_a_token_that_ends_the_sequence_spells_nothing(
    compiler: GrammarCompiler, words: tuple[bytes, ...]
) -> None:
    ending = GrammarCompiler(compiler._tokenizer, compiler.vocab_size, [words.index(b"spam")])
    assert [words[i] for i in ending.opening(spec_of("spam"))] == [b"s", b"p", b"am"]
    nothing = GrammarCompiler(compiler._tokenizer, compiler.vocab_size, [words.index(b"q")])
    with pytest.raises(SchemaError, match="no tokens for the choice 'quiz'"):
        nothing.compile(spec_of("quiz"))


def test_masks_are_filled_beside_those_of_other_grammars(
    compiler: GrammarCompiler, start: Callable[..., GrammarState]
) -> None:
    states = [start({"type": "boolean"}), choose_among(compiler, "yes", "no"), start("[ab]")]
    bitmask = torch.full((4, -(-compiler.vocab_size // 32)), -1, dtype=torch.int32)
    fill_batch(states, bitmask, [3, 0, 2])
    alone = np.zeros(bitmask.shape[1], dtype=np.int32)
    for state, row in zip(states, (3, 0, 2), strict=True):
        state.fill(alone)
        assert np.array_equal(bitmask[row].numpy(), alone)
    assert (bitmask[1] == -1).all()


def test_text_without_tokens_is_followed_and_taken_back(
    compiler: GrammarCompiler, words: tuple[bytes, ...]
) -> None:
    state = choose_among(compiler, "spam", "spammer", "kinds")
    assert state.accept_text("sp")
    assert not state.can_stop
    assert not state.accept(words.index(b"am"))  # in the middle of `spam`
    assert not state.accept_text("x")
    assert state.shortest_rest() == b"am"
    assert state.accept_text(b"am")
    assert state.can_stop
    assert not state.is_complete
    other = state.fork()
    assert other.accept_text("mer")
    assert other.is_complete
    state.rollback(2)
    assert state.accept(words.index(b"kind"))
    assert state.forced_text() == "s"
    state.reset()
    assert state.forced_text() == ""


def test_an_answer_that_was_cut_closes_to_the_shortest_choice_that_begins_so(
    compiler: GrammarCompiler, words: tuple[bytes, ...]
) -> None:
    spec = spec_of("spammer", "spam", "kinds", "éé")
    state = choose_among(compiler, *json.loads(spec.source))
    closer = Closer(spec, words)
    assert closer.close(state, b"") == b"spam"
    assert state.accept(words.index("é".encode()))
    assert closer.close(state, "é".encode()) == "é".encode()
    assert minimal_answer(spec) == "spam"


def test_too_many_places_to_score_are_refused_and_other_grammars_too(
    compiler: GrammarCompiler,
) -> None:
    pairs = [f"{a}{b}" for a in range(100, 100 + MAX_BRANCHES + 44) for b in "xy"]
    with pytest.raises(SchemaError, match=f"at most {MAX_BRANCHES}"):
        compiler.check_scores(spec_of(*pairs))
    compiler.check_scores(spec_of(*pairs[:100]))
    with pytest.raises(SchemaError, match="answers out of a few"):
        compiler.check_scores(GrammarSpec(kind="regex", source="[ab]"))


texts = st.text('sp{}":,aékin1t', min_size=1, max_size=8)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(choices=st.lists(texts, min_size=1, max_size=8, unique=True), data=st.data())
def test_every_walk_ends_at_a_choice_spelt_its_own_way(
    choices: list[str], data: st.DataObject, compiler: GrammarCompiler, words: tuple[bytes, ...]
) -> None:
    spelt = [tuple(compiler._tokenizer.encode_plain([c], [False])[0]) for c in choices]
    state = choose_among(compiler, *choices)
    assert state.compiled.num_longest == max(
        len(a) + any(len(b) > len(a) and b[: len(a)] == a for b in spelt) for a in spelt
    )
    done: tuple[int, ...] = ()
    while not state.is_complete:
        possible = {s[len(done)] for s in spelt if s[: len(done)] == done and len(s) > len(done)}
        assert state.can_stop == (done in spelt)
        assert set(allowed_ids(state)) == possible | ({EOS} if done in spelt else set())
        forced = compiler.forced.next_ids(state)
        assert bool(forced) == (len(possible) == 1 and done not in spelt)
        token = data.draw(st.sampled_from(sorted(set(allowed_ids(state)))))
        assert not forced or token == forced[0]
        assert state.accept(token)
        if token == EOS:
            break
        done += (token,)
    assert done in spelt
    text = b"".join(words[i] for i in done)
    assert text.decode() in choices
    cut = data.draw(st.integers(0, len(text)))
    followed = choose_among(compiler, *choices)
    assert followed.accept_text(text[:cut])
    rest = followed.shortest_rest()
    assert (text[:cut] + rest).decode() in choices
    assert len(rest) <= len(text) - cut
