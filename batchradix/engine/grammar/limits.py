"""Answers that would not end in time: where one is cut, and the closing that makes it whole.

An answer is cut when its budget is used up, not before: one that ends by itself within the
budget is never touched. What was written last then makes room for the closing. No step of the
model is spent on a closing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from batchradix.engine.grammar.closing import Closer
from batchradix.engine.grammar.forced import ForcedText
from batchradix.engine.grammar.repetition import RepetitionGuard
from batchradix.engine.grammar.state import AnyGrammar, AnyState


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedAnswer:
    """A whole answer of its grammar: the first ``num_kept`` tokens of the cut one, a closing.

    ``token_ids`` are those of both, ``text`` is theirs; the closing begins at byte ``cut_at``
    of it in UTF-8. ``is_forced``: the grammar allowed no other text there, so nothing that
    the model had a say in is missing.
    """

    token_ids: tuple[int, ...]
    num_kept: int
    text: str
    cut_at: int
    is_forced: bool


class AnswerLimits:
    """Ends answers under one grammar; made once a distinct grammar, shared by its rows.

    ``repetition_guard``: whether text that goes round in circles is cut.
    """

    def __init__(self, compiled: AnyGrammar, forced: ForcedText, *, repetition_guard: bool) -> None:
        self._compiled = compiled
        self._forced = forced
        self._has_guard = repetition_guard

    def runs_away(self, token_ids: Sequence[int]) -> bool:
        """Whether an unfinished answer of these tokens goes round in circles without bound."""
        return self._has_guard and self._guard.runs_away(token_ids)

    def close(
        self, state: AnyState, token_ids: Sequence[int], max_tokens: int
    ) -> ClosedAnswer | None:
        """The answer closed within ``max_tokens``, keeping as much of it as leaves room.

        ``state``: the matcher after ``token_ids``; where it stands afterwards is not defined.
        Of how much is kept a few lengths are tried: shorter ones by what was missing, then halves
        until the budget is full. None where no closing is found.
        """
        trial = _Trial(self._closer, self._forced, state, token_ids)
        num_kept, too_many, step = len(token_ids), len(token_ids) + 1, 1
        best = trial.closed(num_kept)
        while best is None or len(best.token_ids) > max_tokens:
            if not num_kept:
                return None
            missing = step if best is None else max(step, len(best.token_ids) - max_tokens)
            too_many, num_kept = num_kept, max(0, num_kept - missing)
            step *= 2
            best = trial.closed(num_kept)
        while len(best.token_ids) < max_tokens and too_many - num_kept > 1:
            middle = (num_kept + too_many) // 2
            found = trial.closed(middle)
            if found is None or len(found.token_ids) > max_tokens:
                too_many = middle
            else:
                num_kept, best = middle, found
        return best

    @cached_property
    def _closer(self) -> Closer:
        return Closer(self._compiled.spec, self._forced.token_bytes)

    @cached_property
    def _guard(self) -> RepetitionGuard:
        return RepetitionGuard(self._compiled.spec, self._forced.token_bytes)


class _Trial:
    """One cut answer, closed after any number of its tokens."""

    def __init__(
        self,
        closer: Closer,
        forced: ForcedText,
        state: AnyState,
        token_ids: Sequence[int],
    ) -> None:
        self._closer = closer
        self._forced = forced
        self._state = state
        self._token_ids = token_ids
        self._place = len(token_ids)  # of the state

    def closed(self, num_kept: int) -> ClosedAnswer | None:
        """The answer closed after its first tokens, or where they end within a character after
        one token fewer; None where that is not found."""
        begun = self._bytes(num_kept)
        while not _is_text(begun):
            num_kept -= 1
            begun = self._bytes(num_kept)
        self._seek(num_kept)
        rest = self._closer.close(self._state, begun)
        if rest is None or not _is_text(rest):
            return None
        closing = rest.decode()
        ids = self._forced.spell(closing)
        if closing and not ids:
            return None
        return ClosedAnswer(
            token_ids=(*self._token_ids[:num_kept], *ids),
            num_kept=num_kept,
            text=begun.decode() + closing,
            cut_at=len(begun),
            is_forced=self._is_forced(closing),
        )

    def _bytes(self, num_kept: int) -> bytes:
        words = self._forced.token_bytes
        return b"".join([words[token_id] for token_id in self._token_ids[:num_kept]])

    def _seek(self, place: int) -> None:
        if place < self._place:
            self._state.rollback(self._place - place)
        for token_id in self._token_ids[self._place : place]:
            is_accepted = self._state.accept(token_id)
            assert is_accepted, "the answer broke its grammar"
        self._place = place

    def _is_forced(self, closing: str) -> bool:
        if not closing or self._state.forced_text() != closing:
            return False
        ended = self._state.fork()
        return ended.accept_text(closing) and ended.is_complete


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
