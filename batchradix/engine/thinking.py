"""One row that thinks before it answers: where the thinking ends, and what follows it unasked.

While it thinks no grammar limits it, and neither stop strings nor the answer's budget count. It
ends with the model's own end marker, with an end-of-sequence token, which the marker then replaces,
or where it is closed: when its budget is used up or it goes round in circles.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from batchradix.engine.answer import Answer
from batchradix.engine.grammar.forced import ForcedText
from batchradix.engine.grammar.repetition import goes_in_circles
from batchradix.engine.grammar.state import AnyState
from batchradix.engine.output import RowOutput
from batchradix.types import DetokenizerState, RowSettings, Thinking, Usage


class Thoughts:
    """The text of a row's thinking as it grows, and its end."""

    def __init__(self, thinking: Thinking, detokenizer: DetokenizerState) -> None:
        self._thinking = thinking
        self._detokenizer = detokenizer
        self._parts: list[str] = []
        self._end = ""  # as much of the last text as may hold the end marker
        self._is_open = True

    def push(self, token_id: int) -> str | None:
        """Takes a token; the text behind the end marker where that is complete, else None."""
        end = self._thinking.end
        if token_id == self._thinking.end_id:
            self.close()
            return ""
        text = self._detokenizer.push(token_id)
        self._parts.append(text)
        window = self._end + text
        place = window.find(end)
        if place < 0:
            self._end = window[max(0, len(window) - len(end) + 1) :]
            return None
        rest = window[place + len(end) :]
        whole = "".join(self._parts)
        self._parts = [whole[: len(whole) - len(rest) - len(end)]]
        self._is_open = False
        return rest

    def close(self) -> None:
        """Takes what is left of an unfinished character; no token follows."""
        if self._is_open:
            self._parts.append(self._detokenizer.finish())
            self._is_open = False

    @property
    def text(self) -> str:
        """Without white space at its ends, and without a start marker of its own."""
        return "".join(self._parts).lstrip().removeprefix(self._thinking.start).strip()


class ThinkingAnswer(Answer):
    """An answer that follows thinking.

    ``total_tokens``: the most of both and of what closes the thinking. ``output`` takes the answer
    alone. ``has_guard``: thinking that goes round in circles is closed.
    """

    def __init__(
        self,
        *,
        settings: RowSettings,
        rng_key: np.uint64,
        output: RowOutput,
        forced: ForcedText | None,
        usage: Usage,
        detokenizer: DetokenizerState,
        eos_ids: frozenset[int],
        total_tokens: int,
        has_guard: bool,
    ) -> None:
        super().__init__(
            settings=settings, rng_key=rng_key, output=output, forced=forced, usage=usage
        )
        assert settings.thinking is not None
        self._thinking = settings.thinking
        self._thoughts = Thoughts(self._thinking, detokenizer)
        self._eos_ids = eos_ids
        self._total_tokens = total_tokens
        self._budget = self._thinking.budget(total_tokens)
        self._has_guard = has_guard
        self._ids: list[int] = []  # of thinking and answer
        self._is_thinking = True

    @property
    def grammar(self) -> AnyState | None:
        """None while it thinks."""
        return None if self._is_thinking else self.output.grammar

    @property
    def reasoning(self) -> str | None:
        return self._thoughts.text

    @property
    def generated_ids(self) -> Sequence[int]:
        return self._ids

    @property
    def num_generated(self) -> int:
        return len(self._ids)

    def take(self, token_id: int) -> list[int]:
        """As of an answer. Where the token is not to go through the model, ``num_kept`` says how
        many tokens of the row stay before those that this gives."""
        self.num_kept = None
        if not self._is_thinking:
            return super().take(token_id)
        thinking = self._thinking
        if token_id in self._eos_ids:  # an end of the sequence is no place to go on from
            self.num_kept = len(self._ids)
            return self._begin(thinking.closing_ids, "")
        self._note(token_id, is_forced=False)
        rest = self._thoughts.push(token_id)
        if rest is not None:
            is_bound = self.output.grammar is not None and not rest
            return [token_id, *self._begin(thinking.gap_ids if is_bound else (), rest)]
        if len(self._ids) >= self._budget or (self._has_guard and goes_in_circles(self._ids)):
            return [token_id, *self._begin(thinking.closing_ids, "")]
        return [token_id]

    def _begin(self, closing_ids: Sequence[int], text: str) -> list[int]:
        """Ends the thinking; the tokens with which the row goes on before it is asked again."""
        for token_id in closing_ids:
            self._note(token_id, is_forced=True)
        self._thoughts.close()
        self._is_thinking = False
        left = self._total_tokens - self.num_thought
        self.output.begin(min(self._thinking.answer_tokens, left), text)
        taken = list(closing_ids)
        if self._forced is not None and self.output.grammar is not None:
            taken += self._append(self._forced.next_ids(self.output.grammar))
        return taken

    def _note(self, token_id: int, *, is_forced: bool) -> None:
        self._ids.append(token_id)
        self.num_thought += 1
        self._usage.completion_tokens += 1
        self._usage.forced_tokens += is_forced

    def _push(self, token_id: int, *, is_forced: bool) -> None:
        super()._push(token_id, is_forced=is_forced)
        self._ids.append(token_id)
