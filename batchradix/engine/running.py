"""The rows that hold KV slots: how their tails grow, and who gives way when slots are short."""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection

from batchradix.engine.cache.radix import RadixCache, RadixNode
from batchradix.engine.cache.tiers import Tiers
from batchradix.engine.queue import JobQueue
from batchradix.engine.row import RunningRow
from batchradix.types import Usage


class RunningRows:
    """Rows between admission and end, with their tails; which rows come is not decided here.

    ``running`` hold slots, ``preempted`` lost theirs and come back before newer rows; both are
    in planned order. A tail grows by ``tail_block`` slots where slots are few; no more than
    ``max_span`` tokens of a row go through the model in one step.
    """

    def __init__(
        self,
        cache: RadixCache,
        queue: JobQueue,
        usage: Usage,
        *,
        tiers: Tiers,
        tail_block: int,
        max_span: int,
    ) -> None:
        self.running: list[RunningRow] = []
        self.preempted: list[RunningRow] = []
        self.tail_block = tail_block
        self._cache = cache
        self._pool = cache.pool
        self._queue = queue
        self._usage = usage
        self._tiers = tiers
        self._max_span = max_span

    def add(self, row: RunningRow) -> None:
        """Lets a row run that has its path and first slots."""
        insort(self.running, row, key=_seq)

    def grow(self) -> bool:
        """Gives every row the slots its next tokens need; whether rows were preempted for it."""
        preempted = False
        for row in list(self.running):
            if row.leaf is None:
                continue  # preempted for a row before it
            needed = row.num_written + min(row.num_pending, self._max_span)
            while row.leaf is not None and row.tail_capacity < needed:
                if not self._grow(row, needed - row.tail_capacity):
                    preempted = True
                    self._preempt(self.running[-1])
        return preempted

    def can_grow(self, ahead: Collection[RunningRow]) -> bool:
        """Whether `grow` would preempt nobody if each row of ``ahead`` had one more token."""
        needed = 0
        for row in self.running:
            pending = row.num_pending + (row in ahead)
            missing = row.num_written + min(pending, self._max_span) - row.tail_capacity
            if missing > 0:
                needed += max(missing, self.tail_block)
        return needed <= self._pool.num_free + self._cache.num_idle_slots

    def fit_drafts(self) -> None:
        """Drops the drafts that have no slots and would get some only at the cost of others."""
        for row in self.running:
            if row.draft is None:
                continue
            end = len(row.answer) + row.draft.num_tokens
            missing = end - row.tail_capacity
            if end > row.max_tail:
                row.draft = None
            elif missing > 0:
                if self._pool.num_free - self._plenty(row, missing) < self.headroom():
                    row.draft = None
                else:
                    self._grow(row, missing)

    def headroom(self) -> int:
        """Slots that one more block for every running row would take."""
        return sum(min(self.tail_block, r.max_tail - r.tail_capacity) for r in self.running)

    def make_free(self, num_slots: int) -> None:
        """Evicts idle nodes until so many slots are free, or none is idle."""
        if num_slots > self._pool.num_free:
            missing = num_slots - self._pool.num_free
            self._usage.evicted_tokens += self._cache.evict(
                missing, self._queue.next_use, self._spill
            )

    def _spill(self, node: RadixNode) -> None:
        """Lets a node go that rows of its job have yet to use, so that it may come back."""
        if self._queue.needs(node.origin):
            self._tiers.spill(node, self._queue.needs)

    def leave(self, row: RunningRow) -> RadixNode:
        """Takes a row out of the running ones and its slots away; its former leaf."""
        leaf = row.leaf
        assert leaf is not None
        self.running.remove(row)
        self._pool.free(row.tail)
        row.tail = []
        row.tail_capacity = 0
        row.leaf = None
        self._cache.unlock(leaf)
        return leaf

    def release(self, node: RadixNode) -> None:
        """Removes idle nodes from here upwards that nothing retains and no plan needs."""
        while (
            node.parent is not None
            and node.locks == 0
            and not node.retained
            and not node.children
            and self._queue.next_use(node) is None
        ):
            parent = node.parent
            depth = self._queue.shared_depth(node)
            if depth > node.start:  # another job's rows part from this one inside the node
                parent = self._cache.split(node, depth)
            self._cache.remove(node)
            node = parent

    def _grow(self, row: RunningRow, needed: int) -> bool:
        """Adds at least ``needed`` slots to a tail: twice what it has where slots are plenty,
        a block where slots are few, evicting for it; False when there are not enough."""
        room = max(needed, row.max_tail - row.tail_capacity)
        amount = self._plenty(row, needed)
        if self._pool.num_free - amount < self.headroom():
            available = self._pool.num_free + self._cache.num_idle_slots
            amount = max(needed, min(room, self.tail_block, available))
            if amount > available:
                return False
            self.make_free(amount)
        row.tail_capacity += amount
        if row.tail:
            start, length = row.tail[-1]
            extended = self._pool.extend(start + length, amount)
            row.tail[-1] = (start, length + extended)
            amount -= extended
        if amount:
            extents = self._pool.allocate(amount)
            assert extents is not None
            row.tail.extend(extents)
        return True

    def _plenty(self, row: RunningRow, needed: int) -> int:
        """What a tail grows by where slots are plenty."""
        room = max(needed, row.max_tail - row.tail_capacity)
        return min(room, max(needed, row.tail_capacity, self.tail_block))

    def _preempt(self, row: RunningRow) -> None:
        """Takes a row's slots away; it keeps its answer and comes back before newer rows."""
        job = self._queue.jobs[row.job_id]
        self._tiers.spill_tail(row.seq, row.tail, row.num_written, self._queue.needs)
        leaf = self.leave(row)
        row.draft = None
        job.preempt(row.position)
        insort(self.preempted, row, key=_seq)
        self.release(leaf)
        row.num_written = 0
        self._usage.preemptions += 1


def _seq(row: RunningRow) -> int:
    return row.seq
