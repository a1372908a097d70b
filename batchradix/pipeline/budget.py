"""Budgets that no answer of a grammar fits into, found before an engine runs."""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING

from batchradix.checkpoint.checkpoint import Checkpoint
from batchradix.config import DEFAULT_MAX_TOKENS
from batchradix.errors import OptionError, RowError, RowErrorCode, SchemaError
from batchradix.types import GrammarSpec, Row

if TYPE_CHECKING:
    from batchradix.engine.grammar.forced import ForcedText

_SHOWN_CHARS = 60


class Budgets:
    """Knows what the shortest answer of each grammar costs with one model's tokenizer."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._known: dict[GrammarSpec, tuple[int, str]] = {}

    def least(self, grammar: GrammarSpec | None) -> int:
        """Tokens of the shortest answer; 1 where it is not known. Raises `SchemaError` where it is
        longer than any model writes."""
        return 1 if grammar is None else self._shortest(grammar)[0]

    def check_run(self, grammar: GrammarSpec | None, max_tokens: int | None) -> None:
        """Raises `OptionError` when the run's ``max_tokens`` (None: the default) is too small, and
        `SchemaError` as `least` does."""
        budget = DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
        if grammar is None or budget >= self.least(grammar):
            return
        what = "`max_tokens`" if max_tokens is not None else "`max_tokens` (the default)"
        raise OptionError(
            f"{what} is {budget:,}, and {self._needs(grammar)}; give at least that, and more for "
            f"answers that say something"
        )

    def check_row(
        self,
        row: Row,
        grammar: GrammarSpec | None,
        max_tokens: int | None,
        num_prompt_tokens: int,
    ) -> RowError | None:
        """What is wrong with a row of ``max_tokens`` (None: the default), or None."""
        try:
            least = self.least(grammar)
        except SchemaError as error:
            return RowError(RowErrorCode.BAD_SETTING, f"{row.place}: {error}")
        room = self._checkpoint.config.context_length - num_prompt_tokens
        budget = DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
        if grammar is None or min(budget, room) >= least:
            return None
        if budget < least:
            return RowError(
                RowErrorCode.BAD_SETTING,
                f"{row.place}: max_tokens is {budget:,}, and {self._needs(grammar)}; give it more",
            )
        return RowError(
            RowErrorCode.PROMPT_TOO_LONG,
            f"{row.place}: the prompt has {num_prompt_tokens:,} tokens and leaves {room:,} of "
            f"the context, and {self._needs(grammar)}; shorten it or use a model with a longer "
            f"context",
        )

    @cached_property
    def _forced(self) -> ForcedText:
        from batchradix.engine.grammar.forced import ForcedText

        return ForcedText(self._checkpoint.tokenizer, self._checkpoint.config.vocab_size)

    def _needs(self, grammar: GrammarSpec) -> str:
        num_tokens, text = self._shortest(grammar)
        text = text.replace("\n", " ")
        if len(text) > _SHOWN_CHARS:
            text = f"{text[: _SHOWN_CHARS - 3]}..."
        return f"the shortest answer of the schema, {text}, takes {num_tokens:,} tokens"

    def _shortest(self, grammar: GrammarSpec) -> tuple[int, str]:
        if grammar not in self._known:
            from batchradix.engine.grammar.closing import minimal_answer

            texts = [minimal_answer(grammar) or ""]
            if grammar.kind == "choices":
                texts = json.loads(grammar.source)
            costs = [(max(1, len(self._forced.spell(text))), text) for text in texts]
            self._known[grammar] = min(costs, key=lambda cost: cost[0])
        return self._known[grammar]
