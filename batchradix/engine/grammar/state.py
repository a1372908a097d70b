"""Where one answer stands in its grammar, and the masks of many answers at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xgrammar
from numpy.typing import NDArray
from torch import Tensor

from batchradix.engine.grammar.choices import ChoiceState, CompiledChoices
from batchradix.engine.grammar.compiled import CompiledGrammar


class GrammarState:
    """One answer's place in a compiled grammar; advances token by token."""

    def __init__(self, compiled: CompiledGrammar) -> None:
        self.compiled = compiled
        self.matcher = xgrammar.GrammarMatcher(compiled.native)
        self._allowed: NDArray[np.int32] | None = None  # at this place, once asked for

    def allowed(self) -> NDArray[np.int32]:
        """int32[ceil(vocab_size / 32)], not to be written to: the tokens that may come next.

        As `fill` has them, except that spare bits after the last token are zero.
        """
        if self._allowed is None:
            words = np.zeros((1, len(self.compiled.stop_words)), dtype=np.int32)
            self.fill(words)
            spare = -self.compiled.vocab_size % 32
            words.view(np.uint32)[0, -1] &= np.uint32(0xFFFFFFFF >> spare)
            self._allowed = words[0]
        return self._allowed

    def fill(self, bitmask: Tensor | NDArray[np.int32], index: int = 0) -> None:
        """Writes which tokens may come next into row ``index`` of ``bitmask``: int32[R,
        ceil(vocab_size / 32)] on the CPU (or the row itself: int32[ceil(vocab_size / 32)]).

        End-of-sequence tokens are among them only where the text may end here. After an
        end-of-sequence token was accepted nothing is allowed.
        """
        if self.is_terminated:
            bitmask[index if bitmask.ndim == 2 else slice(None)] = 0
            return
        self.matcher.fill_next_token_bitmask(bitmask, index)

    def accept(self, token_id: int) -> bool:
        """Advances by one token; False, with nothing changed, where it is not allowed."""
        # xgrammar prints a warning for each of these, so they do not get that far.
        if self.is_terminated or not 0 <= token_id < self.compiled.vocab_size:
            return False
        moved = bool(self.matcher.accept_token(token_id))
        if moved:
            self._allowed = None
        return moved

    def accept_text(self, text: str | bytes) -> bool:
        """Advances by text that no token was sampled for; counts as one step in `rollback`."""
        self._allowed = None
        return not self.is_terminated and bool(self.matcher.accept_string(text))

    @property
    def is_terminated(self) -> bool:
        """An end-of-sequence token was accepted."""
        return bool(self.matcher.is_terminated())

    @property
    def can_stop(self) -> bool:
        """The text so far matches the whole grammar (it may still be one that can go on)."""
        return bool(self.matcher.is_completed())

    @property
    def is_complete(self) -> bool:
        """The text so far matches the whole grammar and nothing but the end can follow."""
        if self.is_terminated:
            return True
        if not self.can_stop:
            return False
        return not (self.allowed() & ~self.compiled.stop_words).any()

    def forced_text(self) -> str:
        """The text that must come next whatever is sampled, in whole characters ("" if none).

        Under a grammar with texts that never end it is "" throughout: it might have no end.
        """
        if not self.compiled.always_ends:
            return ""
        return str(self.matcher.find_jump_forward_string())

    def fork(self) -> GrammarState:
        """An independent state at the same place."""
        other = GrammarState.__new__(GrammarState)
        other.compiled = self.compiled
        other.matcher = self.matcher.fork()
        other._allowed = self._allowed
        return other

    def rollback(self, num_steps: int) -> None:
        """Takes back the last accepted tokens (or texts); ValueError beyond the beginning."""
        self._allowed = None
        try:
            self.matcher.rollback(num_steps)
        except RuntimeError as error:
            raise ValueError(f"fewer than {num_steps} steps were accepted") from error

    def reset(self) -> None:
        """Back to the beginning."""
        self._allowed = None
        self.matcher.reset()


AnyGrammar = CompiledGrammar | CompiledChoices
AnyState = GrammarState | ChoiceState


def start(compiled: AnyGrammar) -> AnyState:
    """A new answer's place at the beginning of a grammar."""
    return (
        ChoiceState(compiled) if isinstance(compiled, CompiledChoices) else GrammarState(compiled)
    )


def fill_batch(states: Sequence[AnyState], bitmask: Tensor, rows: Sequence[int]) -> None:
    """Fills row ``rows[i]`` of ``bitmask`` for ``states[i]``, without the GIL where it is new.

    ``bitmask``: int32[R, ceil(vocab_size / 32)] on the CPU; other rows stay as they are. What a
    state was asked for before is copied. One native call does the rest, about 5 µs a row of
    49,152 tokens; its threads cost more than that to start.
    """
    words = bitmask.numpy()
    live: list[Any] = []
    live_rows: list[int] = []
    for state, row in zip(states, rows, strict=True):
        if isinstance(state, ChoiceState):
            words[row] = state.allowed()
        elif state._allowed is not None:
            words[row] = state._allowed
        elif state.is_terminated:
            words[row] = 0
        else:
            live.append(state.matcher)
            live_rows.append(int(row))
    if live:
        xgrammar.BatchGrammarMatcher(1).batch_fill_next_token_bitmask(live, bitmask, live_rows)
