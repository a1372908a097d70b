"""What kind of answer a row gets when it is admitted."""

from __future__ import annotations

import numpy as np

from batchradix.engine.answer import Answer
from batchradix.engine.grammar.choices import CompiledChoices
from batchradix.engine.grammar.forced import ForcedText
from batchradix.engine.grammar.limits import AnswerLimits
from batchradix.engine.grammar.state import AnyGrammar, start
from batchradix.engine.output import RowOutput
from batchradix.engine.scored import ScoredAnswer
from batchradix.engine.thinking import ThinkingAnswer
from batchradix.types import Detokenizer, RowSettings, Usage


class AnswerMaker:
    """Makes the answers of one engine: plain ones, scored ones, and those behind thinking.

    ``forced`` and ``usage`` as of `Answer`; ``has_guard`` as of `ThinkingAnswer`.
    """

    def __init__(
        self,
        *,
        eos_ids: frozenset[int],
        detokenizer: Detokenizer,
        forced: ForcedText | None,
        usage: Usage,
        has_guard: bool,
    ) -> None:
        self._eos_ids = eos_ids
        self._detokenizer = detokenizer
        self._forced = forced
        self._usage = usage
        self._has_guard = has_guard

    def make(
        self,
        settings: RowSettings,
        *,
        rng_key: np.uint64,
        max_tokens: int,
        compiled: AnyGrammar | None,
        limits: AnswerLimits | None,
    ) -> Answer:
        """An answer without a token yet; ``max_tokens`` as of `RequestTable`, ``limits`` of the
        grammar ``compiled``."""
        usage, forced = self._usage, self._forced
        output = RowOutput(
            settings=settings,
            max_tokens=max_tokens,
            eos_ids=self._eos_ids,
            detokenizer=self._detokenizer.start(),
            grammar=None if compiled is None else start(compiled),
            limits=limits,
        )
        if settings.is_scored and isinstance(compiled, CompiledChoices):
            return ScoredAnswer(
                settings=settings,
                rng_key=rng_key,
                output=output,
                usage=usage,
                choices=compiled,
                max_tokens=max_tokens,
            )
        if settings.thinking is not None:
            return ThinkingAnswer(
                settings=settings,
                rng_key=rng_key,
                output=output,
                forced=forced,
                usage=usage,
                detokenizer=self._detokenizer.start(),
                eos_ids=self._eos_ids,
                total_tokens=max_tokens,
                has_guard=self._has_guard,
            )
        return Answer(settings=settings, rng_key=rng_key, output=output, forced=forced, usage=usage)
