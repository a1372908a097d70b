"""A row between its admission and its completion, as the scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from batchradix.engine.cache.pool import Extent
from batchradix.engine.cache.radix import RadixNode
from batchradix.engine.draft import Draft
from batchradix.types import U32


@dataclass(slots=True, eq=False, kw_only=True)
class RunningRow:
    """One admitted (or preempted) row.

    ``seq`` orders rows by planned time over all jobs and names the row. ``prompt``:
    uint32[num_prompt_tokens], of which the last ``num_forced`` are the answer's opening;
    ``max_tokens`` is what the answer may have beyond it, at least 1. ``answer`` holds the token
    ids that follow, of which the first ``num_written`` have their keys and values in ``tail``;
    the rest goes through the model next. ``num_reached`` is the most that ``num_written`` ever
    was: what is written below it is written again. While its next token is being chosen the row
    ``is_awaited``; it may go on meanwhile, with a negative number in the token's place at the end
    of ``answer`` (see `Step`). ``leaf`` is the node at which the prompt
    ends, None while preempted. ``draft``: tokens that are guessed to follow ``answer`` and go
    through the model behind it in the next step; they are no part of it until they are chosen.
    """

    seq: int
    job_id: int
    position: int
    row: int
    prompt: U32
    max_tokens: int
    num_forced: int = 0
    leaf: RadixNode | None = None
    tail: list[Extent] = field(default_factory=list)
    tail_capacity: int = 0
    answer: list[int] = field(default_factory=list)
    num_written: int = 0
    num_reached: int = 0
    is_awaited: bool = False
    draft: Draft | None = None

    @property
    def opening(self) -> list[int]:
        """The forced tokens with which the answer begins."""
        return [int(i) for i in self.prompt[len(self.prompt) - self.num_forced :]]

    @property
    def num_pending(self) -> int:
        """Answer tokens that have no keys and values yet."""
        return len(self.answer) - self.num_written

    @property
    def is_answering(self) -> bool:
        """Whether its answer has begun and nothing of its prompt is to be computed first."""
        return bool(self.answer) and self.leaf is not None and self.leaf.is_complete

    @property
    def max_tail(self) -> int:
        """Slots the answer can ever need: its last token is never written."""
        return self.max_tokens - 1
