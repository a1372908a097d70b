"""The state of one row's answer while it is generated: its tokens, its text, and its end."""

from __future__ import annotations

from batchradix.engine.grammar.limits import AnswerLimits
from batchradix.engine.grammar.state import AnyState
from batchradix.errors import RowError, RowErrorCode
from batchradix.types import DetokenizerState, FinishReason, RowSettings


class RowOutput:
    """Takes one row's tokens and says when the answer is finished.

    An answer ends, with ``stop``, at an end-of-sequence token, at a stop string, or as soon as
    its grammar is complete (no step is spent on an end-of-sequence token then); with
    ``length`` at ``max_tokens``, if it has not ended with that very token. Stop strings cut
    structured answers as they cut free text, as in vLLM and OpenAI's interface: the answer is
    then most likely not valid and says so, instead of ignoring what was asked for.

    ``limits`` closes an answer under a grammar that ``max_tokens`` cut, and cuts one, with
    ``repetition``, that runs away. Its last tokens are taken back then: ``num_kept`` of those
    pushed stay in ``token_ids``, the closing stands behind them, and ``cut_at`` is where its
    text begins. An answer whose rest is forced whole was not cut: it ends with ``stop``. Stop
    strings are not looked for in a closing, which is not the model's.
    """

    def __init__(
        self,
        *,
        settings: RowSettings,
        max_tokens: int,
        eos_ids: frozenset[int],
        detokenizer: DetokenizerState,
        grammar: AnyState | None,
        limits: AnswerLimits | None = None,
    ) -> None:
        self.grammar = grammar
        self.token_ids: list[int] = []  # without the end-of-sequence token
        self.completion_tokens = 0  # with it
        self.finish_reason: FinishReason | None = None
        self.error: RowError | None = None
        self.num_kept: int | None = None
        self.cut_at: int | None = None  # bytes of the text in UTF-8
        self._limits = limits
        self._closed_text: str | None = None
        self._stops = settings.stop
        self._max_tokens = max_tokens
        self._skips_space = False
        self._eos_ids = eos_ids
        self._detokenizer = detokenizer
        self._text = StopText(settings.stop)

    @property
    def text(self) -> str:
        """The answer's text, before the stop string if one ended it; whole characters only.

        Until the answer is finished, text that may turn out to begin a stop string is left out,
        so what was read once stays.
        """
        if self._closed_text is not None:
            return self._closed_text
        if self.finish_reason is None:
            return self._text.certain()
        return self._text.all()

    def begin(self, max_tokens: int, text: str) -> None:
        """Begins behind thinking, with at most so many tokens, and with text that came with its
        last token. Without a grammar, white space at the start is left out."""
        self._max_tokens = max_tokens
        self._skips_space = self.grammar is None
        if self.grammar is None and self._append(text):
            self._finish(FinishReason.STOP)

    def push(self, token_id: int) -> FinishReason | None:
        """Appends a token; why the answer ended with it, or None. Constant time a token.

        A token that the grammar forbids ends the row with `FinishReason.ERROR` and ``error``.
        """
        if self.finish_reason is not None:
            raise ValueError("the answer is already finished")
        self.completion_tokens += 1
        if self.grammar is not None and not self.grammar.accept(token_id):
            self.error = RowError(
                RowErrorCode.ENGINE_FAILED,
                f"token {token_id} was sampled though the output grammar does not allow it there",
            )
            return self._finish(FinishReason.ERROR)
        if token_id in self._eos_ids:
            return self._finish(FinishReason.STOP)
        self.token_ids.append(token_id)
        if self._append(self._detokenizer.push(token_id)):
            return self._finish(FinishReason.STOP)
        if self.grammar is not None and self.grammar.is_complete:
            return self._finish(FinishReason.STOP)
        if self.completion_tokens >= self._max_tokens:
            return self._cut(FinishReason.LENGTH)
        if self._limits is not None and self._limits.runs_away(self.token_ids):
            return self._cut(FinishReason.REPETITION)
        return None

    def fail(self, error: RowError) -> None:
        """Ends the answer with `FinishReason.ERROR` because no token could be had for it."""
        self.error = error
        self._finish(FinishReason.ERROR)

    def _append(self, text: str) -> bool:
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        return self._text.append(text)

    def _cut(self, reason: FinishReason) -> FinishReason:
        reason = self._finish(reason)
        if reason is FinishReason.STOP or self.grammar is None or self._limits is None:
            return reason
        closed = self._limits.close(self.grammar, self.token_ids, self._max_tokens)
        if closed is None:
            return reason
        self.num_kept = closed.num_kept
        self.token_ids = list(closed.token_ids)
        self.completion_tokens = len(self.token_ids)
        self._closed_text = closed.text
        if closed.is_forced and not any(stop in closed.text for stop in self._stops):
            self.finish_reason = FinishReason.STOP
        else:
            self.cut_at = closed.cut_at
        return self.finish_reason or reason

    def _finish(self, reason: FinishReason) -> FinishReason:
        if not self._text.is_cut and self._text.append(self._detokenizer.finish()):
            # The last half of a character, now U+FFFD, completed a stop string.
            reason = FinishReason.STOP if reason is FinishReason.LENGTH else reason
        self.finish_reason = reason
        return reason


class StopText:
    """Text that grows at its end until the first of some stop strings is complete.

    The text is cut where the stop string that is complete first begins (of several complete at
    the same character, the longest), so it does not matter how the text was split into pieces.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._reach = max(map(len, stops), default=1) - 1  # of a stop string, before new text
        self._parts: list[str] = []
        self._num_chars = 0
        self._tail = ""  # the last `_reach` characters
        self.is_cut = False

    def append(self, text: str) -> bool:
        """Adds text; True when it completed a stop string, which is then cut off for good."""
        if not text or self.is_cut:
            return False
        if self._stops:
            window = self._tail + text
            cut = self._first_stop(window)
            if cut is not None:
                self.is_cut = True
                kept = self.all()[: self._num_chars - len(self._tail)] + window[:cut]
                self._parts, self._num_chars = [kept], len(kept)
                return True
            self._tail = window[max(0, len(window) - self._reach) :]
        self._parts.append(text)
        self._num_chars += len(text)
        return False

    def all(self) -> str:
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def certain(self) -> str:
        """The text without an end that more text could complete to a stop string."""
        text = self.all()
        if self.is_cut:
            return text
        held = max((_overlap(self._tail, stop) for stop in self._stops), default=0)
        return text[: len(text) - held]

    def _first_stop(self, window: str) -> int | None:
        found = []
        for stop in self._stops:
            start = window.find(stop)
            if start >= 0:
                found.append((start + len(stop), start))
        return min(found)[1] if found else None


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` are a true beginning of ``stop``."""
    for num in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-num:]):
            return num
    return 0
