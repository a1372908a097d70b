"""One row's answer while it is generated, and what follows a sampled token unasked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from batchradix.engine.grammar.forced import ForcedText
from batchradix.engine.grammar.state import AnyState
from batchradix.engine.output import RowOutput
from batchradix.types import RowSettings, Usage


class Answer:
    """The answer of a running or preempted row; it counts its own tokens in ``usage``.

    ``forced`` is the rule by which what a grammar forces becomes tokens, None to sample it too.
    """

    def __init__(
        self,
        *,
        settings: RowSettings,
        rng_key: np.uint64,
        output: RowOutput,
        forced: ForcedText | None,
        usage: Usage,
    ) -> None:
        self.settings = settings
        self.rng_key = rng_key
        self.output = output
        self._forced = forced
        self._usage = usage
        self._was_forced = bytearray()  # of each token taken, 1 where it was not sampled
        # Where tokens are taken back before those that `take` gives: how many the row keeps.
        self.num_kept: int | None = None
        self.choice_logprobs: tuple[float, ...] | None = None
        self.num_thought = 0  # tokens before the answer
        self.ran_s = 0.0  # in steps since its first token; counted where there is a limit

    @property
    def grammar(self) -> AnyState | None:
        """The place in the grammar from which the next token is sampled."""
        return self.output.grammar

    @property
    def reasoning(self) -> str | None:
        """The text of the thinking before the answer, None where there is none."""
        return None

    @property
    def generated_ids(self) -> Sequence[int]:
        """The tokens before the next one."""
        return self.output.token_ids

    @property
    def num_generated(self) -> int:
        return self.output.completion_tokens

    def open(self, token_ids: Sequence[int]) -> None:
        """Begins with tokens that stand behind the prompt already."""
        self._append(token_ids)

    def take(self, token_id: int) -> list[int]:
        """Takes a sampled token; it and what follows without a choice, to go through the model
        next. Nothing more goes there when ``output.finish_reason`` is set."""
        self._push(token_id, is_forced=False)
        taken = [token_id]
        if self._forced is not None and self.output.finish_reason is None:
            grammar = self.output.grammar
            if grammar is not None:
                taken += self._append(self._forced.next_ids(grammar))
        return taken

    def _append(self, token_ids: Sequence[int]) -> list[int]:
        """Appends tokens that were not sampled until the answer ends; those appended."""
        appended: list[int] = []
        for token_id in token_ids:
            if self.output.finish_reason is not None:
                break
            self._push(token_id, is_forced=True)
            appended.append(token_id)
        return appended

    def _push(self, token_id: int, *, is_forced: bool) -> None:
        self.output.push(token_id)
        self._was_forced.append(is_forced)
        self._usage.completion_tokens += 1
        self._usage.forced_tokens += is_forced
        if self.output.num_kept is not None:
            # It was cut: what was taken back counts no more, the closing does.
            taken_back = self._was_forced[self.output.num_kept :]
            num_closing = self.output.completion_tokens - self.output.num_kept
            self._usage.completion_tokens += num_closing - len(taken_back)
            self._usage.forced_tokens += num_closing - sum(taken_back)
