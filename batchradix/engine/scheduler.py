"""Decides, step by step, which rows run and which tokens go through the model.

Rows are admitted in planned order, by the KV slots they need. Admission gives a row its
whole path (missing nodes get their slots at once and are computed once for all rows below)
and the first block of its tail. Nothing here touches a tensor; everything the model runner has
to know is in the `Step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from batchradix.engine.cache.pool import Extent, ExtentPool, compact
from batchradix.engine.cache.radix import RadixCache, RadixNode
from batchradix.engine.cache.tiers import Tiers
from batchradix.engine.queue import JobQueue, PlannedJob
from batchradix.engine.row import RunningRow
from batchradix.engine.running import RunningRows
from batchradix.engine.step import Step
from batchradix.engine.step_builder import StepBuilder, StepWork
from batchradix.errors import RowError, RowErrorCode
from batchradix.types import EngineJob, Usage

MAX_TAIL_BLOCK = 32  # slots by which a tail grows
MAX_NODE_EXTENTS = 4  # a node that would need more is worth moving others for
MAX_REFUSED_PER_STEP = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedRow:
    """A row that never runs, and why."""

    job_id: int
    row: int
    error: RowError


@dataclass(slots=True, kw_only=True)
class Schedule:
    """One decision of the scheduler.

    ``step`` is None when nothing is to be computed. ``rows[i]`` is the row whose next token is
    sampled from logits ``i`` of the step; a row with a draft is named once for its next token
    and once more, right after, for the token behind each piece of its draft. ``admitted`` are
    rows that run for the first time, ``refused`` those that never will. While the step runs
    ``num_running`` rows run, ``num_waiting`` wait and ``num_kv_tokens`` slots are taken.
    """

    step: Step | None
    rows: list[RunningRow]
    admitted: list[RunningRow] = field(default_factory=list)
    refused: list[RefusedRow] = field(default_factory=list)
    num_running: int = 0
    num_waiting: int = 0
    num_kv_tokens: int = 0


class Scheduler:
    """Owns the pool, the radix cache, the job queue and the running rows."""

    def __init__(
        self,
        *,
        num_slots: int,
        batch_size: int,
        prefill_tokens: int,
        prefix_cache: bool,
        usage: Usage,
        tiers: Tiers | None = None,
        max_node_extents: int = MAX_NODE_EXTENTS,
    ) -> None:
        self.pool = ExtentPool(num_slots)
        self.cache = RadixCache(self.pool)
        self._tiers = tiers or Tiers(None)
        self._queue = JobQueue()
        self._batch_size = batch_size
        self._prefill_tokens = prefill_tokens
        self._prefix_cache = prefix_cache
        self._usage = usage
        self._max_node_extents = max_node_extents
        self._rows = RunningRows(
            self.cache,
            self._queue,
            usage,
            tiers=self._tiers,
            # A full batch's first blocks and headroom take half the pool at most.
            tail_block=min(MAX_TAIL_BLOCK, max(1, num_slots // (4 * batch_size))),
            max_span=1 + prefill_tokens,
        )
        self._moves: list[tuple[int, int, int]] = []
        self._next_hold = 0
        self._unused_holds: list[int] = []

    def submit(
        self, job_id: int, job: EngineJob, refused_settings: dict[int, RowError] | None = None
    ) -> None:
        """Queues a job; rows whose settings id is in ``refused_settings`` never run."""
        self._queue.add(job_id, job, shared=self._prefix_cache, refused=refused_settings or {})

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the next step that running rows need before they can decode."""
        return min(self._num_waiting_tokens(), self._prefill_tokens)

    @property
    def has_work(self) -> bool:
        """Whether some submitted row is neither finished nor refused."""
        return bool(self._queue.jobs)

    @property
    def running(self) -> Sequence[RunningRow]:
        """The rows that hold slots, in planned order."""
        return self._rows.running

    def schedule(self) -> Schedule:
        """Decides the next step and takes it for done: tokens in it count as computed.

        The caller runs the step, then hands each sampled token to `append`, or the row to
        `finish`, before it calls again. Drafts are for this step only: those that stay are in
        it, the others are dropped.
        """
        decision = Schedule(step=None, rows=[])
        if not self._rows.grow():
            self._admit_rows(decision)
        self._rows.fit_drafts()
        work = self._choose_work()
        if not work.is_empty:
            decision.step, decision.rows = self._build(work)
        self._usage.peak_kv_tokens = self.pool.peak_used
        decision.num_running = len(self._rows.running)
        decision.num_waiting = self._queue.num_waiting
        decision.num_kv_tokens = self.pool.num_slots - self.pool.num_free
        return decision

    def go_ahead(self, places: dict[RunningRow, int]) -> bool:
        """Lets rows go on in the next step with a token that is still being chosen, the one at
        some place among those chosen with it.

        False, and nothing done, where some row might lose its slots for that.
        """
        if not self._rows.can_grow(places.keys()):
            return False
        for row, place in places.items():
            row.answer.append(-1 - place)
        return True

    def append(self, row: RunningRow, token_ids: Sequence[int], num_drafted: int = 0) -> None:
        """Continues the answer of a running row; several tokens go through in one span.

        The first ``num_drafted`` of them were its draft and went through in the last step. Where
        the row went on ahead, the first is the token that it went on with.
        """
        if row.answer and row.answer[-1] < 0:
            row.answer.pop()
        row.answer.extend(token_ids)
        row.num_written += num_drafted
        row.num_reached = max(row.num_reached, row.num_written)
        row.draft = None

    def rewind(self, row: RunningRow, num_kept: int) -> None:
        """Takes back the answer of a running row from its ``num_kept``-th token on.

        Its slots stay with the row and are written anew by what is appended next, which counts
        as no recomputation.
        """
        del row.answer[num_kept:]
        row.num_written = min(row.num_written, num_kept)
        row.num_reached = min(row.num_reached, num_kept)

    def finish(self, row: RunningRow) -> None:
        """Takes back all a running row holds; what no plan needs and no job retains goes."""
        leaf = self._rows.leave(row)
        self._queue.row_done(row.job_id)
        self._rows.release(leaf)

    def check(self) -> None:
        """AssertionError unless every slot has one owner and every lock has a row.

        After a drain nothing is locked, and only retained nodes hold slots.
        """
        self.cache.check()
        nodes = list(self.cache.nodes())
        used = [extent for owner in self._owners() for extent in owner]
        self.pool.check(used)
        locks: dict[RadixNode, int] = {}
        rows = self._rows
        for row in rows.running:
            assert row.leaf is not None
            for node in row.leaf.path():
                locks[node] = locks.get(node, 0) + 1
        assert all(node.locks == locks.get(node, 0) for node in nodes), "a lock has no row"
        order = [row.seq for row in [*rows.running, *rows.preempted]]
        assert order == sorted(order), "a row runs before one that was planned before it"
        if not self.has_work:
            assert not order, "a row outlived its job"
            assert all(node.retained for node in nodes), "a node outlived its last row"

    # Admission

    def _admit_rows(self, decision: Schedule) -> None:
        """Admits rows in planned order while batch, pool and token budget allow."""
        rows = self._rows
        if len(rows.running) >= self._batch_size:
            return
        waiting_tokens = self._num_waiting_tokens()
        while len(rows.running) < self._batch_size and waiting_tokens < self._prefill_tokens:
            if rows.preempted:
                row = rows.preempted[0]
                job = self._queue.jobs[row.job_id]
            else:
                found = self._queue.waiting()
                if found is None or len(decision.refused) >= MAX_REFUSED_PER_STEP:
                    return
                job, position = found
                error = self._refusal(job, position)
                if error is not None:
                    decision.refused.append(self._refuse(job, position, error))
                    continue
                row = _new_row(job, position)
            admitted = self._admit(job, row)
            if admitted is None:
                return
            num_found, new_tokens = admitted
            waiting_tokens += new_tokens
            if rows.preempted and rows.preempted[0] is row:
                del rows.preempted[0]
                job.resume(row.position)
            else:
                job.cursor += 1
                decision.admitted.append(row)
                self._usage.cached_tokens += num_found

    def _num_waiting_tokens(self) -> int:
        """Tokens that running rows need before they can decode."""
        pending: set[RadixNode] = set()
        num_tokens = 0
        for row in self._rows.running:
            num_tokens += max(0, row.num_pending - 1)
            node = row.leaf
            while node is not None and not node.is_complete and node not in pending:
                pending.add(node)
                num_tokens += len(node) - node.num_computed
                node = node.parent
        return num_tokens

    def _refusal(self, job: PlannedJob, position: int) -> RowError | None:
        error = job.refusal(position)
        if error is not None:
            return error
        prompt = len(job.tokens(position))
        if prompt == 0:
            return RowError(RowErrorCode.PROMPT_EMPTY, "the prompt has no token")
        max_tokens = job.max_tokens(position)
        # The last token's keys and values are never needed.
        needed = prompt + max_tokens - 1
        if needed <= self.pool.num_slots:
            return None
        forced = job.num_forced(position)
        prompt, max_tokens = prompt - forced, max_tokens + forced
        return RowError(
            RowErrorCode.KV_POOL_TOO_SMALL,
            f"the prompt of {prompt} tokens and an answer of up to {max_tokens} need {needed} KV "
            f"slots, the pool has {self.pool.num_slots}; raise --kv-tokens to {needed} or more, "
            f"or lower --max-tokens (and --thinking-tokens, where it thinks first)",
        )

    def _refuse(self, job: PlannedJob, position: int, error: RowError) -> RefusedRow:
        job.cursor += 1
        prompt = job.tokens(position)
        self._queue.row_done(job.job_id)
        if self._prefix_cache:  # nodes may have been kept for this very row
            self._rows.release(self.cache.match(prompt)[0])
        return RefusedRow(job_id=job.job_id, row=job.row(position), error=error)

    def _admit(self, job: PlannedJob, row: RunningRow) -> tuple[int, int] | None:
        """Gives a row its path and first tail block and lets it run.

        Returns the prompt tokens found in the cache and those that have to be computed for it
        alone before it decodes, or None (nothing taken) when the pool cannot hold it beside the
        running rows.
        """
        found, depth = self.cache.match(row.prompt) if self._prefix_cache else (self.cache.root, 0)
        if found.parent is not None and depth < found.end:
            found = self.cache.split(found, depth)
        self.cache.lock(found)
        tail = min(row.max_tail, len(row.answer) + self._rows.tail_block)
        needed = len(row.prompt) - depth + tail
        headroom = self._rows.headroom()
        available = self.pool.num_free + self.cache.num_idle_slots
        if available < needed + headroom:
            self.cache.unlock(found)
            return None
        self._rows.make_free(needed)
        leaf = self._insert_path(job, row, found, depth)
        num_filled = self._fill(job, row, found, leaf)
        self.cache.lock(leaf)
        self.cache.unlock(found)
        if tail:
            row.tail = self._allocate(tail)
        row.tail_capacity = tail
        row.leaf = leaf
        row.num_written = self._tiers.refill_tail(row.seq, row.tail)
        self._usage.reloaded_tokens += row.num_written
        self._note_path(job, row, leaf)
        self._rows.add(row)
        return depth, len(row.prompt) - depth - num_filled + max(0, row.num_pending - 1)

    def _insert_path(
        self, job: PlannedJob, row: RunningRow, above: RadixNode, depth: int
    ) -> RadixNode:
        """Adds what the cache lacks of a prompt, one node for each plan node; the leaf."""
        leaf = above
        for plan_node, end in job.path(row.position):
            if end <= depth:
                continue
            tokens = row.prompt[depth:end]
            leaf = self.cache.insert(
                leaf,
                tokens.copy() if job.retain else tokens,
                self._allocate(end - depth),
                (job.job_id, plan_node),
                shared=self._prefix_cache,
            )
            depth = end
        return leaf

    def _fill(self, job: PlannedJob, row: RunningRow, found: RadixNode, leaf: RadixNode) -> int:
        """Has what is known of new nodes elsewhere loaded; how many tokens."""
        num_filled = 0
        for node, count in self._tiers.fill(row.prompt, found, leaf):
            again = job.note_computed(node.origin[1], node.start, node.start + count)
            self._usage.loaded_tokens += count - again
            self._usage.reloaded_tokens += again
            num_filled += count
        return num_filled

    def _note_path(self, job: PlannedJob, row: RunningRow, leaf: RadixNode) -> None:
        """Writes on the nodes of a row's path which rows are below and whether they stay."""
        path = leaf.path()
        computed_to = 0
        for node in path:
            computed_to += node.num_computed
            if not node.is_complete:
                break
        nodes = iter(path)
        node = next(nodes)
        for plan_node, end in job.path(row.position):
            job.note_found(plan_node, min(end, computed_to))
            rows_below = job.rows_below(plan_node)
            while node.end <= end:
                node.planned[job.job_id] = rows_below
                node.retained = node.retained or job.retain
                if node is leaf:
                    break
                node = next(nodes)

    def _allocate(self, num_slots: int) -> list[Extent]:
        """Slots known to be free, after moving others together where they lie too scattered."""
        largest = self.pool.largest_free
        if num_slots > largest * self._max_node_extents and not self._moves:
            # Not worth copying much more than will be computed.
            self._moves = compact(self.pool, self._owners(), num_slots, max_moved=4 * num_slots)
            self._tiers.can_spill = not self._moves  # extents are ahead of what is in the pool
        extents = self.pool.allocate(num_slots)
        assert extents is not None, "slots were promised that are not free"
        return extents

    def _owners(self) -> list[list[Extent]]:
        tails = [row.tail for row in self._rows.running]
        return [node.extents for node in self.cache.nodes()] + tails

    # The step

    def _choose_work(self) -> StepWork:
        """Tokens of this step: every decoding row's, and prefill in planned order while the
        budget lasts."""
        work = StepWork()
        budget = self._prefill_tokens
        for row in self._rows.running:
            leaf = row.leaf
            assert leaf is not None
            if not leaf.is_complete:
                budget = _prefill(work, leaf, budget)
                if not work.completes(leaf):
                    continue
            if row.is_awaited and not row.num_pending:
                continue
            if not row.answer:
                if leaf.hold is None and leaf not in work.nodes:
                    if budget == 0:
                        continue
                    # Cached without a final hidden state: the last token goes again.
                    work.nodes[leaf] = (len(leaf) - 1, 1)
                    budget -= 1
                work.first_tokens.append(row)
            elif row.num_pending:
                count = min(row.num_pending, 1 + budget)
                budget -= count - 1
                if row.draft is not None:
                    if count == row.num_pending and row.draft.num_tokens <= budget:
                        count += row.draft.num_tokens
                        budget -= row.draft.num_tokens
                    else:
                        row.draft = None
                work.spans.append((row, count))
        return work

    def _build(self, work: StepWork) -> tuple[Step, list[RunningRow]]:
        builder = StepBuilder(work)
        sources: list[int] = []
        rows: list[RunningRow] = []
        holds: list[tuple[int, int]] = []
        free_holds, self.cache.freed_holds = self.cache.freed_holds, []
        for row in work.first_tokens:
            leaf = row.leaf
            assert leaf is not None
            query = builder.last_query.get(leaf)
            if query is None:
                assert leaf.hold is not None
                sources.append(-1 - leaf.hold)
            else:
                job = self._queue.jobs[row.job_id]
                if leaf.hold is None and (job.retain or job.more_end_at_leaf_of(row.position)):
                    leaf.hold = self._new_hold()
                    holds.append((query, leaf.hold))
                sources.append(query)
            rows.append(row)
        for row, count in work.spans:
            places = (0,) if row.draft is None else row.draft.places
            self._count_span(row, count - places[-1])
            self._usage.drafted_tokens += places[-1]
            if row.num_pending == 0:
                query = builder.last_query[row] - places[-1]
                sources.extend(query + place for place in places)
                rows.extend([row] * len(places))
        for node, (first, count) in work.nodes.items():
            self._count_tokens(node, first, count)
        step = builder.finish(
            logit_sources=sources,
            holds=holds,
            free_holds=free_holds,
            moves=self._moves,
            transfers=self._tiers.take(),
        )
        self._moves = []
        self._unused_holds.extend(free_holds)  # not before the next step
        self._usage.forward_steps += 1
        return step, rows

    def _new_hold(self) -> int:
        if self._unused_holds:
            return self._unused_holds.pop()
        self._next_hold += 1
        return self._next_hold - 1

    def _count_span(self, row: RunningRow, count: int) -> None:
        again = max(0, min(row.num_reached, row.num_written + count) - row.num_written)
        self._usage.recomputed_tokens += again
        row.num_written += count
        row.num_reached = max(row.num_reached, row.num_written)

    def _count_tokens(self, node: RadixNode, first: int, count: int) -> None:
        again = 0
        job = self._queue.jobs.get(node.origin[0])
        if job is not None:
            self._tiers.keep(node, first, count, job.share_below(node.origin[1]))
        if first < node.num_computed:
            again = count
        elif job is not None:
            start = node.start + first
            again = job.note_computed(node.origin[1], start, start + count)
        self._usage.computed_tokens += count - again
        self._usage.recomputed_tokens += again
        node.num_computed = max(node.num_computed, first + count)


def _prefill(work: StepWork, leaf: RadixNode, budget: int) -> int:
    """Puts uncomputed tokens of a path into the step, top down; the budget left."""
    missing = []
    node: RadixNode | None = leaf
    while node is not None and not node.is_complete:
        missing.append(node)
        node = node.parent
    for node in reversed(missing):
        if node not in work.nodes:
            count = min(budget, len(node) - node.num_computed)
            if count == 0:
                break
            work.nodes[node] = (node.num_computed, count)
            budget -= count
        if not work.completes(node):
            break
    return budget


def _new_row(job: PlannedJob, position: int) -> RunningRow:
    return RunningRow(
        seq=job.base + position,
        job_id=job.job_id,
        position=position,
        row=job.row(position),
        prompt=job.tokens(position),
        max_tokens=job.max_tokens(position),
        num_forced=job.num_forced(position),
    )
