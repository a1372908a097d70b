"""Where one answer stands in its grammar, and the masks of many answers at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xgrammar
from numpy.typing import NDArray
from torch import Tensor

from batchradix.engine.grammar.compiler import CompiledGrammar


class GrammarState:
    """One answer's place in a compiled grammar; advances token by token."""

    def __init__(self, compiled: CompiledGrammar) -> None:
        self.compiled = compiled
        self.matcher = xgrammar.GrammarMatcher(compiled.native)

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
        return bool(self.matcher.accept_token(token_id))

    def accept_text(self, text: str | bytes) -> bool:
        """Advances by text that no token was sampled for; counts as one step in `rollback`."""
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
        allowed = np.zeros((1, len(self.compiled.stop_words)), dtype=np.int32)
        self.fill(allowed)
        return not (allowed[0] & ~self.compiled.stop_words).any()

    def forced_text(self) -> str:
        """The text that must come next whatever is sampled, in whole characters ("" if none)."""
        return str(self.matcher.find_jump_forward_string())

    def fork(self) -> GrammarState:
        """An independent state at the same place."""
        other = GrammarState.__new__(GrammarState)
        other.compiled = self.compiled
        other.matcher = self.matcher.fork()
        return other

    def rollback(self, num_steps: int) -> None:
        """Takes back the last accepted tokens (or texts); ValueError beyond the beginning."""
        try:
            self.matcher.rollback(num_steps)
        except RuntimeError as error:
            raise ValueError(f"fewer than {num_steps} steps were accepted") from error

    def reset(self) -> None:
        """Back to the beginning."""
        self.matcher.reset()


def fill_batch(
    states: Sequence[GrammarState], bitmask: Tensor, rows: Sequence[int], *, num_threads: int = 1
) -> None:
    """Fills row ``rows[i]`` of ``bitmask`` for ``states[i]``: one native call, no GIL held.

    ``bitmask``: int32[R, ceil(vocab_size / 32)] on the CPU; other rows stay as they are. About
    5 µs a row of 49,152 tokens, so threads pay only for costly grammars.
    """
    live: list[Any] = []
    live_rows: list[int] = []
    for state, row in zip(states, rows, strict=True):
        if state.is_terminated:
            bitmask[row] = 0
        else:
            live.append(state.matcher)
            live_rows.append(int(row))
    if live:
        xgrammar.BatchGrammarMatcher(num_threads).batch_fill_next_token_bitmask(
            live, bitmask, live_rows
        )
