"""Submitted jobs in the order they came: which row is next, and when a node is next used.

Nothing is kept a waiting row but the plan's own arrays and a cursor.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

import numpy as np

from batchradix.engine.cache.radix import RadixNode
from batchradix.errors import RowError
from batchradix.types import U32, EngineJob


class PlannedJob:
    """One `EngineJob` and how far it has come.

    Rows are named by plan position; ``base + position`` orders rows over all jobs. Rows before
    ``cursor`` have been admitted or refused, ``preempted`` are those that have to come back.
    """

    def __init__(
        self,
        job_id: int,
        job: EngineJob,
        base: int,
        *,
        shared: bool,
        refused: dict[int, RowError],
    ) -> None:
        self.job_id = job_id
        self.job = job
        self.base = base
        self.shared = shared
        self.retain = job.retain and shared
        self.refused = refused  # by settings id: every row with these settings
        self.cursor = 0
        self.num_unfinished = len(job.plan)
        self.preempted: list[int] = []
        # How deep the tokens of each plan node have been computed or found, to tell tokens
        # that go through the model for the first time from those that go again.
        tree = job.tree
        self._reached = (
            tree.start.astype(np.int32) if shared else np.zeros(len(job.plan), dtype=np.int32)
        )

    def __len__(self) -> int:
        return len(self.job.plan)

    def row(self, position: int) -> int:
        return int(self.job.plan.order[position])

    def tokens(self, position: int) -> U32:
        """uint32[...]: the prompt of the row at ``position``, its answer's opening included."""
        return self.job.tokens[self.row(position)]

    def refusal(self, position: int) -> RowError | None:
        return self.refused.get(int(self.job.requests.settings_id[self.row(position)]))

    def num_forced(self, position: int) -> int:
        """Trailing tokens of `tokens` that are the answer's opening."""
        num_forced = self.job.requests.num_forced
        return 0 if num_forced is None else int(num_forced[self.row(position)])

    def max_tokens(self, position: int) -> int:
        """Tokens the answer may have after its opening; at least 1."""
        whole = int(self.job.requests.max_tokens[self.row(position)])
        return max(1, whole - self.num_forced(position))

    def path(self, position: int) -> list[tuple[int, int]]:
        """The plan nodes (node, token depth at which it ends) from the top to the row's leaf.

        Without sharing a row is one node, named by its position.
        """
        if not self.shared:
            return [(position, len(self.tokens(position)))]
        tree = self.job.tree
        nodes = []
        node = int(tree.leaf_of[position])
        while node >= 0:
            nodes.append((node, int(tree.end[node])))
            node = int(tree.parent[node])
        nodes.reverse()
        return nodes

    def rows_below(self, plan_node: int) -> tuple[int, int]:
        """Plan positions ``[first, last)`` of the rows below a node of `path`."""
        if not self.shared:
            return plan_node, plan_node + 1
        tree = self.job.tree
        return int(tree.first[plan_node]), int(tree.last[plan_node])

    def share_below(self, plan_node: int) -> float:
        """Of all rows those below a node of `path`; 0 where there is one only, which shares
        nothing."""
        first, last = self.rows_below(plan_node)
        return (last - first) / len(self) if last - first > 1 else 0.0

    def more_end_at_leaf_of(self, position: int) -> bool:
        """Whether rows not yet admitted end where the row at ``position`` ends."""
        if not self.shared:
            return False
        tree = self.job.tree
        leaf = int(tree.leaf_of[position])
        return int(tree.first[leaf] + tree.num_ending[leaf]) > self.cursor

    def note_found(self, plan_node: int, depth: int) -> None:
        """Tokens of the node up to ``depth`` are in the cache, computed by whomever."""
        self._reached[plan_node] = max(self._reached[plan_node], depth)

    def note_computed(self, plan_node: int, start: int, end: int) -> int:
        """Tokens ``[start, end)`` of the node go through the model; how many of them again."""
        reached = int(self._reached[plan_node])
        self._reached[plan_node] = max(reached, end)
        return max(0, min(reached, end) - start)

    def next_use(self, node: RadixNode) -> int | None:
        """The next plan position at which a row below a cache node runs, None if none does."""
        if not self.shared or (self.cursor == len(self) and not self.preempted):
            return None
        return self._next_use(*self._planned(node))

    def needs(self, plan_node: int) -> bool:
        """Whether some row below a node of `path` has yet to run."""
        return self._next_use(*self.rows_below(plan_node)) is not None

    def _next_use(self, first: int, last: int) -> int | None:
        place = bisect_left(self.preempted, first)
        if place < len(self.preempted) and self.preempted[place] < last:
            return self.preempted[place]
        position = max(first, self.cursor)
        return position if position < last else None

    def preempt(self, position: int) -> None:
        insort(self.preempted, position)

    def resume(self, position: int) -> None:
        self.preempted.remove(position)

    def shared_depth(self, node: RadixNode) -> int:
        """The token depth up to which some row never admitted agrees with a cache node.

        At most ``node.end``; ``node.start`` also stands for anything less.
        """
        if self.cursor == len(self):
            return node.start
        assert node.parent is not None
        first, last = self._planned(node.parent)
        waiting = range(max(first, self.cursor), last)
        place = bisect_left(waiting, 0, key=lambda position: self._compare(position, node)[0])
        beside = waiting[max(0, place - 1) : place + 1]
        return max((self._compare(position, node)[1] for position in beside), default=node.start)

    def _planned(self, node: RadixNode) -> tuple[int, int]:
        """Positions ``[first, last)`` of the rows that begin with the node's whole prefix.

        Nodes on the path of an admitted row carry their range already; for nodes that other
        jobs left or made it is looked up once.
        """
        missing = []
        above = node
        while above.parent is not None and self.job_id not in above.planned:
            missing.append(above)
            above = above.parent
        first, last = (0, len(self)) if above.parent is None else above.planned[self.job_id]
        for below in reversed(missing):
            rows = range(first, last)

            def order(position: int, below: RadixNode = below) -> int:
                return self._compare(position, below)[0]

            last = first + bisect_right(rows, 0, key=order)
            first = first + bisect_left(rows, 0, key=order)
            below.planned[self.job_id] = first, last
        return first, last

    def _compare(self, position: int, node: RadixNode) -> tuple[int, int]:
        """Whether a row that shares what is above the node sorts before it (-1), goes through
        it (0) or sorts after it (1), and the token depth up to which they agree."""
        tokens = self.tokens(position)[node.start : node.end]
        differing = np.flatnonzero(tokens != node.tokens[: len(tokens)])
        if len(differing):
            place = int(differing[0])
            return (-1 if tokens[place] < node.tokens[place] else 1), node.start + place
        return (-1 if len(tokens) < len(node) else 0), node.start + len(tokens)


class JobQueue:
    """Jobs with unfinished rows, first come first served."""

    def __init__(self) -> None:
        self.jobs: dict[int, PlannedJob] = {}
        self._next_base = 0

    def add(
        self, job_id: int, job: EngineJob, *, shared: bool, refused: dict[int, RowError]
    ) -> None:
        """Queues a job; one without rows is forgotten at once."""
        if len(job.plan):
            self.jobs[job_id] = PlannedJob(
                job_id, job, self._next_base, shared=shared, refused=refused
            )
            self._next_base += len(job.plan)

    def waiting(self) -> tuple[PlannedJob, int] | None:
        """The job and plan position of the next row never admitted."""
        for job in self.jobs.values():
            if job.cursor < len(job):
                return job, job.cursor
        return None

    @property
    def num_waiting(self) -> int:
        """Rows that were never admitted or refused, and those that have to come back."""
        jobs = self.jobs.values()
        return sum(len(job) - job.cursor + len(job.preempted) for job in jobs)

    def row_done(self, job_id: int) -> None:
        """One row fewer; a job without unfinished rows is forgotten."""
        job = self.jobs[job_id]
        job.num_unfinished -= 1
        if job.num_unfinished == 0:
            del self.jobs[job_id]

    def next_use(self, node: RadixNode) -> int | None:
        """When a node is next used, in rows over all jobs; None when no plan needs it."""
        best: int | None = None
        for job in self.jobs.values():
            position = job.next_use(node)
            if position is not None and (best is None or job.base + position < best):
                best = job.base + position
        if len(node.planned) > len(self.jobs):
            node.planned = {j: r for j, r in node.planned.items() if j in self.jobs}
        return best

    def needs(self, origin: tuple[int, int]) -> bool:
        """Whether a job (by its id) has yet to run a row below one of its plan nodes."""
        job = self.jobs.get(origin[0])
        return job is not None and job.needs(origin[1])

    def shared_depth(self, node: RadixNode) -> int:
        """How deep rows never admitted go along a node that none of them goes through whole.

        Rows of the job that made the node part at its ends only, so others are asked.
        """
        others = [j for j in self.jobs.values() if j.shared and j.job_id != node.origin[0]]
        return max((job.shared_depth(node) for job in others), default=node.start)
