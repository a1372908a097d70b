"""Decides for which rows of the next step the answer is guessed ahead, and how far.

A guess that comes true saves a row a step; one that does not was computed for nothing. In
``auto`` guesses are made only where the steps measured so far, and the share of guesses of the
same kind that came true in the same job, say that more is saved than spent. Where they say no,
it is tried again now and then, ever more rarely. Whatever is decided here, the answers are the
same: every token is chosen as without a guess.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from batchradix.config import Speculate
from batchradix.engine.answer import Answer
from batchradix.engine.draft import MAX_MATCHED, CopySource, Draft, make_draft
from batchradix.engine.grammar.forced import ForcedText
from batchradix.engine.grammar.state import GrammarState
from batchradix.engine.row import RunningRow
from batchradix.engine.sampling import has_penalty
from batchradix.engine.step_cost import StepCost

MAX_PIECES = 8  # guessed tokens of a row in one step
MAX_GUESSES = 64  # of all rows in one step, where the cost model chooses
# What comes true before anything is known, by tokens matched.
_GUESSED_SHARES = (0.2, 0.4, 0.6, 0.7)
_PRIOR_WEIGHT = 4.0
_KEPT_SHARE = 0.98  # of what was known, with each new guess that was checked
_FIRST_PAUSE = 16  # steps without guesses once they do not pay
_LONGEST_PAUSE = 256


@dataclass(slots=True)
class Acceptance:
    """How often guesses of a job come true, by the number of tokens that they rest on."""

    _checked: list[float] = field(default_factory=lambda: [_PRIOR_WEIGHT] * MAX_MATCHED)
    _true: list[float] = field(
        default_factory=lambda: [_PRIOR_WEIGHT * share for share in _GUESSED_SHARES]
    )

    def share(self, num_matched: int) -> float:
        """The chance that a guess which rests on so many tokens is what is chosen."""
        return self._true[num_matched - 1] / self._checked[num_matched - 1]

    def note(self, num_matched: int, num_checked: int, num_true: int) -> None:
        kind = num_matched - 1
        self._checked[kind] = self._checked[kind] * _KEPT_SHARE + num_checked
        self._true[kind] = self._true[kind] * _KEPT_SHARE + num_true


class Speculator:
    """Writes drafts on the rows of the next step.

    ``speculate``: ``auto``, ``off``, or how many tokens are guessed for a row in every step.
    ``token_bytes``: by token id, b"" for special tokens. ``forced`` is the rule by which
    answers append what their grammar leaves no choice about, None where they do not.
    """

    def __init__(
        self,
        speculate: Speculate,
        *,
        token_bytes: Sequence[bytes],
        eos_ids: frozenset[int],
        forced: ForcedText | None,
    ) -> None:
        self._speculate = speculate
        self._token_bytes = token_bytes
        self._eos_ids = eos_ids
        self._forced = forced
        self._cost = StepCost()
        self._sources: dict[int, CopySource] = {}  # by the row's seq
        self._acceptance: dict[int, Acceptance] = {}  # by job id
        self._pause = _FIRST_PAUSE
        self._num_idle = 0  # steps to come in which nothing is guessed

    def draft(self, rows: Sequence[tuple[RunningRow, Answer]], num_other_tokens: int) -> None:
        """Guesses ahead for running rows; ``num_other_tokens`` go through the model with them
        anyway, before the rows that lack them decode."""
        if self._speculate == "off":
            return
        if self._num_idle:
            self._num_idle -= 1
            return
        ready = [
            (row, answer)
            for row, answer in rows
            if row.num_pending and row.leaf is not None and row.leaf.is_complete
        ]
        started_s = time.perf_counter()
        drafts = [
            (row, draft)
            for row, answer in ready
            if (draft := self._draft_row(row, answer)) is not None
        ]
        if not drafts:
            return
        if self._speculate == "auto":
            drafting_s = time.perf_counter() - started_s
            num_pending = sum(row.num_pending for row, _ in ready)
            row_step_s = self._cost.seconds(num_pending) / len(ready)
            drafts = self._choose(drafts, num_pending + num_other_tokens, row_step_s, drafting_s)
        for row, draft in drafts:
            row.draft = draft

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Learns what a step took, from its launch until its tokens were chosen."""
        if self._speculate == "auto" and num_tokens:
            self._cost.observe(num_tokens, seconds)

    def note_checked(self, row: RunningRow, draft: Draft, num_true: int) -> None:
        """Learns how many pieces of a draft came true."""
        job = self._acceptance.setdefault(row.job_id, Acceptance())
        job.note(draft.num_matched, min(num_true + 1, len(draft.pieces)), num_true)

    def forget(self, row: RunningRow) -> None:
        """Drops what was kept of a finished row."""
        self._sources.pop(row.seq, None)

    def forget_job(self, job_id: int) -> None:
        """Drops what was learnt of a finished job."""
        self._acceptance.pop(job_id, None)

    def _draft_row(self, row: RunningRow, answer: Answer) -> Draft | None:
        grammar = answer.grammar
        room = row.max_tail - len(row.answer)
        if room < 1 or has_penalty(answer.settings):
            return None
        if grammar is not None and type(grammar) is not GrammarState:
            return None
        source = self._sources.get(row.seq)
        if source is None:
            source = self._sources[row.seq] = CopySource(row.prompt, self._token_bytes)
        source.follow(row.answer)
        wanted = MAX_PIECES if isinstance(self._speculate, str) else self._speculate
        num_matched, guess = source.guess(wanted)
        if not guess:
            return None
        return make_draft(
            guess,
            num_matched,
            state=grammar,
            forced=self._forced,
            eos_ids=self._eos_ids,
            max_tokens=room,
        )

    def _choose(
        self,
        drafts: Sequence[tuple[RunningRow, Draft]],
        num_tokens: int,
        row_step_s: float,
        drafting_s: float,
    ) -> list[tuple[RunningRow, Draft]]:
        """The drafts, cut to what pays; one token of each where it is only tried out.

        ``num_tokens`` are in the step anyway; a row that is spared a step saves ``row_step_s``,
        its part of a step in which rows only decode; the guesses took ``drafting_s`` to make.
        """
        base_s = self._cost.seconds(num_tokens)
        best_s, best_length, best_share = 0.0, 0, 1.0
        shares = [self._share(row, draft) for row, draft in drafts]
        for least in set(shares):
            kept = [(d, p) for (_, d), p in zip(drafts, shares, strict=True) if p >= least]
            gain, added, guesses = 0.0, 0, 0
            for length in range(1, MAX_PIECES + 1):
                going = [(d, p) for d, p in kept if len(d.pieces) >= length]
                guesses += len(going)
                if not going or (guesses > MAX_GUESSES and length > 1):
                    break
                gain += sum(share**length for _, share in going)
                added += sum(len(d.pieces[length - 1]) for d, _ in going)
                spent_s = self._cost.seconds(num_tokens + added) - base_s + drafting_s
                saved_s = gain * row_step_s - spent_s
                if saved_s > best_s:
                    best_s, best_length, best_share = saved_s, length, least
        if best_length:
            self._pause = _FIRST_PAUSE
        else:
            best_length, best_share = 1, max(shares)
            self._num_idle = self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return _cut(
            (pair for pair, p in zip(drafts, shares, strict=True) if p >= best_share), best_length
        )

    def _share(self, row: RunningRow, draft: Draft) -> float:
        job = self._acceptance.setdefault(row.job_id, Acceptance())
        return job.share(draft.num_matched)


def _cut(
    drafts: Iterable[tuple[RunningRow, Draft]], num_pieces: int
) -> list[tuple[RunningRow, Draft]]:
    cut = [(row, draft.cut(num_pieces)) for row, draft in drafts]
    return [(row, draft) for row, draft in cut if draft is not None]
