"""Which worker gets which part, and what prefixes that makes several workers compute.

A worker takes its own parts in the order of the plan, so that it goes on where it was and
computes the path to the first of them alone once more than one process would. One that has none
left takes from the busiest, of the parts not sent yet, that one with which the least is computed
twice (`routing.least`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from batchradix.fleet.parts import Part
from batchradix.fleet.routing import least
from batchradix.types import Plan

Range = tuple[int, int]
"""First and last plan position of rows that a worker has."""


class Overlap:
    """The plan positions that each worker was given of one job, and the tokens that more than
    one worker computes because of it: of a range of positions the path at which it begins, as far
    as the worker has not got it from the range before."""

    def __init__(self, plan: Plan, num_workers: int) -> None:
        self._plan = plan
        self._ranges: list[list[Range]] = [[] for _ in range(num_workers)]
        self.num_tokens = 0

    def added_tokens(self, worker: int, first: int, last: int) -> int:
        """How many tokens more are computed twice when ``worker`` gets these positions."""
        ranges = self._ranges[worker]
        at = bisect_left(ranges, (first, last))
        before = ranges[at - 1][1] if at else None
        added = self._begin(before, first)
        if at < len(ranges):
            behind = ranges[at][0]
            added += self._begin(last, behind) - self._begin(before, behind)
        return added

    def add(self, worker: int, first: int, last: int) -> None:
        """Gives a worker positions."""
        self.num_tokens += self.added_tokens(worker, first, last)
        ranges = self._ranges[worker]
        ranges.insert(bisect_left(ranges, (first, last)), (first, last))

    def forget(self, worker: int) -> None:
        """The worker was replaced: the new one has nothing."""
        self._ranges[worker] = []

    def _begin(self, before: int | None, first: int) -> int:
        """What is computed twice of the path at ``first`` by a worker that has ``before``."""
        own = int(self._plan.lcp[first])
        if before is None:
            return own
        return own - int(self._plan.lcp[before + 1 : first + 1].min())


class Assignment:
    """The parts that no worker has yet, by the worker that is to have them.

    ``cost`` says how much work a part is, in tokens. ``overlaps`` are those of the jobs in which
    prefixes computed twice are counted, by job id.
    """

    def __init__(self, num_workers: int, cost: Callable[[Part], float]) -> None:
        self._queues: list[list[Part]] = [[] for _ in range(num_workers)]
        self._cost = cost
        self.overlaps: dict[int, Overlap] = {}

    @property
    def duplicated_tokens(self) -> int:
        """Prompt tokens that more than one worker was given to compute."""
        return sum(overlap.num_tokens for overlap in self.overlaps.values())

    def add(self, parts: Sequence[Sequence[Part]]) -> None:
        """Puts parts behind those there, for each worker its own."""
        for queue, own in zip(self._queues, parts, strict=True):
            queue += own

    def put_back(self, worker: int, parts: Sequence[Part]) -> None:
        """Gives a worker parts again that it, or the one before it, did not finish."""
        self._queues[worker][:0] = parts

    def own(self, worker: int) -> Part | None:
        """The next part of a worker's own, which stays where it is."""
        return self._queues[worker][0] if self._queues[worker] else None

    def has_suspect(self, worker: int) -> bool:
        """Whether one of a worker's parts was with a worker that was lost."""
        return any(part.deaths for part in self._queues[worker])

    def take(self, worker: int) -> Part | None:
        """Takes the next part of a worker's own; None when there is none."""
        queue = self._queues[worker]
        return self._given(worker, queue.pop(0)) if queue else None

    def steal(self, thief: int, victims: Iterable[int]) -> Part | None:
        """Takes a part of one of ``victims``: of the busiest, unless it makes more to be computed
        twice than there is less to do for others. None when they have none."""
        candidates, added, saved = [], [], []
        for queue in (self._queues[victim] for victim in victims):
            load = round(sum(map(self._cost, queue)))
            for part in reversed(queue):  # of equals what its owner would come to last
                candidates.append((queue, part))
                added.append(self._added(thief, part))
                saved.append(-load)
        if not candidates:
            return None
        queue, part = candidates[least(added, saved)]
        queue.remove(part)
        return self._given(thief, part)

    def _given(self, worker: int, part: Part) -> Part:
        if part.job_id in self.overlaps:
            self.overlaps[part.job_id].add(worker, part.first, part.last)
        return part

    def forget(self, worker: int) -> None:
        """The worker was replaced, so it has no prefix any more."""
        for overlap in self.overlaps.values():
            overlap.forget(worker)

    def _added(self, thief: int, part: Part) -> int:
        overlap = self.overlaps.get(part.job_id)
        return 0 if overlap is None else overlap.added_tokens(thief, part.first, part.last)
