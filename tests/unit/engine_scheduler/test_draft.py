"""Guesses: what is copied, what a grammar leaves of it, and when it is worth a try."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchradix.checkpoint.checkpoint import Checkpoint
from batchradix.engine.draft import MAX_MATCHED, CopySource, Draft, make_draft
from batchradix.engine.grammar.compiler import GrammarCompiler
from batchradix.engine.grammar.state import GrammarState
from batchradix.engine.speculation import Acceptance, Speculator
from batchradix.engine.step_cost import StepCost
from batchradix.types import GrammarSpec

TOKEN_BYTES = (*(bytes([i]) for i in range(256)), b"", b"Jason", b" Jason", b" Gun", b"the")
EOS, JASON, SPACED_JASON, GUN, THE = range(256, 261)


def source(prompt: Any, answer: Any = ()) -> CopySource:
    found = CopySource(np.array(list(prompt), dtype=np.uint32), TOKEN_BYTES)
    found.follow(list(answer))
    return found


def test_what_followed_the_last_words_is_guessed() -> None:
    assert source(b"one two three", b"tw").guess(4) == (2, list(b"o th"))


def test_the_longest_match_counts_before_the_last_and_the_last_of_equal_ones() -> None:
    assert source(b"xab1 ab2 zb3", b"xab").guess(1) == (3, list(b"1"))
    assert source(b"ab1 ab2", b"zab").guess(1) == (2, list(b"2"))


def test_the_answer_itself_is_looked_through_too() -> None:
    assert source(b"?", b"abcdefab").guess(3) == (2, list(b"cde"))


def test_a_word_is_found_however_it_begins() -> None:
    """The same text is another token after a space."""
    prompt = [*b"by", SPACED_JASON, GUN, THE]
    assert source(prompt, [JASON]).guess(2) == (1, [GUN, THE])
    assert source(prompt, [*b"Jason"]).guess(1) == (4, [GUN])


def test_a_match_that_ends_inside_a_token_is_no_guess() -> None:
    assert source([SPACED_JASON, *b"!"], b"Ja").guess(3) == (0, [])


def test_nothing_is_matched_across_special_tokens() -> None:
    assert source([*b"ab", EOS, *b"c"], [*b"ab", EOS]).guess(3) == (0, [])
    assert source(b"", b"a").guess(3) == (0, [])


@given(st.lists(st.integers(97, 99), max_size=30), st.lists(st.integers(97, 99), max_size=30))
def test_a_guess_stands_where_the_end_was_found_again(prompt: Any, answer: Any) -> None:
    text = [*prompt, *answer]
    num_matched, guess = source(prompt, answer).guess(3)
    lengths = [
        n
        for n in range(1, MAX_MATCHED + 1)
        if any(text[i : i + n] == text[-n:] for i in range(len(text) - n))
    ]
    assert num_matched == max(lengths, default=0)
    ends = [
        i for i in range(num_matched, len(text)) if text[i - num_matched : i] == text[-num_matched:]
    ]
    assert guess == (text[ends[-1] : ends[-1] + 3] if num_matched else [])


@pytest.fixture(scope="module")
def grammars(checkpoint: Checkpoint) -> GrammarCompiler:
    """With one end of sequence: the comma is another of this model's."""
    return GrammarCompiler(checkpoint.tokenizer, checkpoint.config.vocab_size, (258,))


def state_at(grammars: GrammarCompiler, schema: Any, text: bytes) -> GrammarState:
    spec = GrammarSpec(kind="json_schema", source=json.dumps(schema))
    state = GrammarState(grammars.compile(spec))
    assert all(state.accept(byte) for byte in text)
    return state


NAMES = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "bcd": {"type": "integer"}},
    "required": ["a", "bcd"],
    "additionalProperties": False,
}


def draft_of(guess: bytes, grammars: GrammarCompiler, text: bytes, **changes: Any) -> Draft | None:
    options: dict[str, Any] = {
        "state": state_at(grammars, NAMES, text),
        "forced": grammars.forced,
        "eos_ids": frozenset({258}),
        "max_tokens": 99,
    }
    return make_draft(list(guess), 2, **(options | changes))


def test_a_guess_ends_where_the_grammar_forbids_it(grammars: GrammarCompiler) -> None:
    draft = draft_of(b"bc\nde", grammars, b'{"a":"x')
    assert draft is not None
    assert draft.pieces == [(98,), (99,)]
    assert draft_of(b"\nbc", grammars, b'{"a":"x') is None


def test_what_the_grammar_forces_goes_along(grammars: GrammarCompiler) -> None:
    forced = tuple(b'","bcd":')
    draft = draft_of(b'y","bcd":12', grammars, b'{"a":"x')
    assert draft is not None
    assert draft.pieces == [(ord("y"),), forced, (ord("1"),), (ord("2"),)]
    assert draft.places == (0, 1, 9, 10, 11)
    for number, state in enumerate(draft.states):
        before = b'{"a":"x' + bytes(draft.token_ids[: draft.places[number + 1]])
        np.testing.assert_array_equal(state.allowed(), state_at(grammars, NAMES, before).allowed())
    # Another key in the copied text: it cannot go on as copied behind what is forced.
    draft = draft_of(b'y","other":12', grammars, b'{"a":"x')
    assert draft is not None
    assert draft.pieces == [(ord("y"),), forced]
    # Only what goes through the model as a whole is guessed.
    draft = draft_of(b'y","bcd":12', grammars, b'{"a":"x', max_tokens=8)
    assert draft is not None
    assert draft.pieces == [(ord("y"),)]


def test_a_guess_leaves_the_end_of_an_answer_to_the_model(grammars: GrammarCompiler) -> None:
    draft = draft_of(b"23}", grammars, b'{"a":"x","bcd":1')
    assert draft is not None
    assert draft.token_ids == list(b"23")
    free = make_draft(
        [1, 2, 258, 3], 1, state=None, forced=None, eos_ids=frozenset({258}), max_tokens=9
    )
    assert free is not None
    assert free.token_ids == [1, 2]


def test_guessing_leaves_the_answer_where_it_stands(grammars: GrammarCompiler) -> None:
    state = state_at(grammars, NAMES, b'{"a":"x')
    assert draft_of(b'y","bcd":12', grammars, b"", state=state) is not None
    np.testing.assert_array_equal(state.allowed(), state_at(grammars, NAMES, b'{"a":"x').allowed())


def test_a_draft_is_cut_by_pieces() -> None:
    draft = Draft(num_matched=3, pieces=[(1,), (2, 3), (4,)], states=[None] * 3)
    cut = draft.cut(2)
    assert cut is not None
    assert (cut.num_matched, cut.token_ids, cut.num_tokens) == (3, [1, 2, 3], 3)
    assert draft.cut(0) is None


# What pays


def test_step_cost_is_the_median_of_like_steps_and_never_falls() -> None:
    cost = StepCost()
    assert cost.seconds(5) == 0.0
    for seconds in (1.0, 1.1, 30.0):
        cost.observe(4, seconds)
    assert cost.seconds(4) == cost.seconds(1) == cost.seconds(100) == 1.1
    cost.observe(64, 7.1)
    assert cost.seconds(34) == pytest.approx(4.1)
    assert cost.seconds(124) == pytest.approx(13.1)
    cost.observe(16, 0.5)  # a lucky one
    assert cost.seconds(16) == 1.1


def test_acceptance_follows_what_came_true() -> None:
    acceptance = Acceptance()
    before = [acceptance.share(n) for n in range(1, MAX_MATCHED + 1)]
    assert before == sorted(before)
    for _ in range(50):
        acceptance.note(2, 1, 0)
        acceptance.note(3, 4, 4)
    assert acceptance.share(2) < 0.05
    assert acceptance.share(3) > 0.95
    assert acceptance.share(1) == before[0]


class Rows:
    """Running rows whose answers end with what stands in the prompt before a known text."""

    def __init__(self, sim: ModuleType, checkpoint: Checkpoint, num_rows: int) -> None:
        from batchradix.engine.answer import Answer
        from batchradix.engine.cache.radix import RadixNode
        from batchradix.engine.output import RowOutput
        from batchradix.engine.row import RunningRow
        from batchradix.prompts.detokenise import IncrementalDetokenizer
        from batchradix.types import RowSettings, Usage

        self.pairs = []
        for seq in range(num_rows):
            prompt = np.array(list(b"abcdefghijklmnop"), dtype=np.uint32)
            leaf = RadixNode(prompt, [(0, 16)], None, 0, (0, 0))
            leaf.num_computed = len(prompt)
            row = RunningRow(seq=seq, job_id=0, position=seq, row=seq, prompt=prompt, max_tokens=50)
            row.leaf = leaf
            row.answer = list(b"?abc")
            row.num_written = 3
            answer = Answer(
                settings=RowSettings(),
                rng_key=np.uint64(0),
                output=RowOutput(
                    settings=RowSettings(),
                    max_tokens=50,
                    eos_ids=frozenset(),
                    detokenizer=IncrementalDetokenizer(checkpoint.tokenizer.token_bytes).start(),
                    grammar=None,
                ),
                forced=None,
                usage=Usage(),
            )
            self.pairs.append((row, answer))

    def guessed(self, speculator: Speculator) -> list[int]:
        """Tokens guessed for each row in the next step."""
        for row, _ in self.pairs:
            row.draft = None
        speculator.draft(self.pairs, 0)
        return [0 if row.draft is None else row.draft.num_tokens for row, _ in self.pairs]

    def note(self, speculator: Speculator, num_true: int) -> None:
        for row, _ in self.pairs:
            if row.draft is not None:
                speculator.note_checked(row, row.draft, num_true)


def speculator_of(checkpoint: Checkpoint, speculate: Any) -> Speculator:
    return Speculator(
        speculate,
        token_bytes=checkpoint.tokenizer.token_bytes,
        eos_ids=frozenset(),
        forced=None,
    )


def test_a_fixed_number_is_guessed_in_every_step_and_off_means_never(
    sim: ModuleType, checkpoint: Checkpoint
) -> None:
    rows = Rows(sim, checkpoint, 3)
    assert rows.guessed(speculator_of(checkpoint, 5)) == [5, 5, 5]
    assert rows.guessed(speculator_of(checkpoint, "off")) == [0, 0, 0]


def test_much_is_guessed_where_tokens_are_free_and_guesses_come_true(
    sim: ModuleType, checkpoint: Checkpoint
) -> None:
    rows, speculator = Rows(sim, checkpoint, 2), speculator_of(checkpoint, "auto")
    for num_tokens in (1, 2, 4, 16, 64):
        speculator.note_step(num_tokens, 1.0)
    for _ in range(20):
        assert min(rows.guessed(speculator)) > 0
        rows.note(speculator, 8)
    assert rows.guessed(speculator) == [8, 8]


def test_nothing_is_guessed_but_for_rare_tries_where_tokens_cost_what_steps_do(
    sim: ModuleType, checkpoint: Checkpoint
) -> None:
    rows, speculator = Rows(sim, checkpoint, 4), speculator_of(checkpoint, "auto")
    for num_tokens in (1, 2, 4, 8, 16, 32, 64):
        speculator.note_step(num_tokens, 1.0 * num_tokens)
    guessed = [sum(rows.guessed(speculator)) for _ in range(300)]
    assert 1 <= sum(map(bool, guessed)) <= 6
    assert max(guessed) <= 4


def test_guesses_that_never_come_true_are_given_up(sim: ModuleType, checkpoint: Checkpoint) -> None:
    rows, speculator = Rows(sim, checkpoint, 4), speculator_of(checkpoint, "auto")
    for num_tokens in (4, 8, 16, 32):
        speculator.note_step(num_tokens, 1.0 + num_tokens / 10)
    guessed = []
    for _ in range(300):
        guessed.append(sum(rows.guessed(speculator)))
        rows.note(speculator, 0)
    assert guessed[0] > 0
    assert sum(map(bool, guessed[100:])) <= 3


def test_rows_that_do_not_decode_next_or_have_penalties_do_not_guess(
    sim: ModuleType, checkpoint: Checkpoint
) -> None:
    from batchradix.types import RowSettings

    rows, speculator = Rows(sim, checkpoint, 4), speculator_of(checkpoint, 4)
    (first, _), (second, _), (_, third), _ = rows.pairs
    assert first.leaf is not None
    first.leaf.num_computed -= 1
    second.answer = []
    second.num_written = 0
    third.settings = RowSettings(presence_penalty=0.5)
    assert rows.guessed(speculator) == [0, 0, 0, 4]
