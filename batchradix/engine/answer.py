"""One row's answer while it is generated, and what follows a sampled token unasked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from batchradix.engine.grammar.forced import ForcedText
from batchradix.engine.grammar.state import GrammarState
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

    @property
    def grammar(self) -> GrammarState | None:
        """The place in the grammar from which the next token is sampled."""
        return self.output.grammar

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far, its opening included."""
        return self.output.completion_tokens

    @property
    def generated_ids(self) -> Sequence[int]:
        """The tokens of the answer so far."""
        return self.output.token_ids

    def open(self, token_ids: Sequence[int]) -> None:
        """Begins with tokens that stand behind the prompt already."""
        self._append(token_ids)

    def take(self, token_id: int) -> list[int]:
        """Takes a sampled token; it and what follows without a choice, to go through the model
        next. Nothing more goes there when ``output.finish_reason`` is set."""
        self._usage.completion_tokens += 1
        self.output.push(token_id)
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
            self.output.push(token_id)
            appended.append(token_id)
        self._usage.forced_tokens += len(appended)
        self._usage.completion_tokens += len(appended)
        return appended
