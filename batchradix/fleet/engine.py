"""One engine made of several workers: a job is cut by its plan, and its parts run elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add

import numpy as np
from numpy.typing import NDArray

from batchradix.errors import EngineError, RowError, RowErrorCode
from batchradix.fleet.assignment import Assignment, Overlap
from batchradix.fleet.crew import Crew, Lost, Report
from batchradix.fleet.parts import Part, cut, cut_by_worker, part_job
from batchradix.plan.shards import EXPECTED_ANSWER_TOKENS
from batchradix.types import Completion, EngineJob, FinishReason, TokenTable, Usage

DEATHS_BEFORE_HALVING = 2
DEATHS_OF_A_ROW = 3
MOST_DEATHS_BEFORE_ANY = 3
"""Of workers, before the first of them is ready."""

MOST_DEATHS_IN_VAIN = 40
"""Of workers, without one row finished in between; a row is found in a million with half of it."""

_WAIT_S = 0.5  # for news; then whoever drives the engine may ask for a stop


@dataclass(slots=True)
class _Member:
    """A worker as the driver sees it. ``former``: what the workers before it in its place did."""

    seen_s: float
    is_ready: bool = False
    parts: dict[int, Part] = field(default_factory=dict)
    num_steps: int = 0
    usage: Usage = field(default_factory=Usage)
    former: Usage = field(default_factory=Usage)
    num_rows: int = 0  # with it, without a completion

    @property
    def has_suspect(self) -> bool:
        """Whether it runs rows with which a worker was lost; it then runs nothing else."""
        return any(part.deaths for part in self.parts.values())


class FleetEngine:
    """Runs jobs on the workers of a ``crew``; implements `types.Engine`.

    Each worker has the planner's shard of its number, in parts that are sent as it gets to them
    (``batch_size``: rows that it runs at once); one without work takes from the busiest. What a
    worker that is lost had not finished runs again, on the one that replaces it. Rows with which
    workers are lost again and again run by themselves, in ever smaller parts, and the row that
    remains gets an error. ``timeout_s``: how long a worker may take for a step. Raises what the
    first worker to be ready raises, and `EngineError` where no row can be finished.
    """

    def __init__(
        self,
        crew: Crew,
        *,
        context_length: int,
        batch_size: int,
        prefix_cache: bool,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._crew = crew
        self.context_length = context_length
        self._batch_size = batch_size
        self._prefix_cache = prefix_cache
        self._timeout_s = timeout_s
        self._clock = clock
        self._jobs: dict[int, EngineJob] = {}
        self._num_left: dict[int, int] = {}  # rows by job
        self._next_job_id = self._next_part = 0
        self._assignment = Assignment(crew.num_workers, self._cost)
        self._table: TokenTable | None = None  # of the last job that was cut anew
        self._ran_by: NDArray[np.int16] | None = None  # workers by row of it
        self._notices: dict[str, None] = {}
        self._num_in_vain = 0
        self._was_ready = False  # whether any worker ever was
        self._members = [_Member(clock()) for _ in range(crew.num_workers)]
        try:
            for worker in range(crew.num_workers):
                crew.start(worker)
            while not any(member.is_ready for member in self._members):
                self._listen()
        except BaseException:
            crew.close()
            raise

    @property
    def has_work(self) -> bool:
        """Whether a submitted row has no completion yet."""
        return bool(self._num_left)

    @property
    def usage(self) -> Usage:
        """The counters of all workers together; of a lost one as far as it had reported."""
        each = (usage for member in self._members for usage in (member.former, member.usage))
        return replace(
            reduce(add, each, Usage()), duplicated_tokens=self._assignment.duplicated_tokens
        )

    @property
    def notices(self) -> list[str]:
        """What workers said, and which of them were lost."""
        return list(self._notices)

    def submit(self, job: EngineJob) -> int:
        """Queues a job with the workers. One whose rows ran before goes to those that ran them."""
        job_id = self._next_job_id
        self._next_job_id += 1
        if not len(job.plan):
            return job_id
        self._jobs[job_id], self._num_left[job_id] = job, len(job.plan)
        count = self._crew.num_workers
        ran_by = self._ran_by if self._table is job.tokens else None
        if ran_by is None or (ran_by[job.plan.order] < 0).any():
            self._table = job.tokens
            self._ran_by = np.full(len(job.tokens), -1, dtype=np.int16)
            parts = cut(job_id, job, count)
            self._assignment.overlaps[job_id] = Overlap(job.plan, count)
        else:
            parts = cut_by_worker(job_id, job, ran_by, count)
        self._assignment.add(parts)
        self._hand_out()
        return job_id

    def step(self) -> list[Completion]:
        """Waits a moment for news of the workers; the rows that they finished."""
        completions = self._listen()
        now = self._clock()
        for worker, member in enumerate(self._members):
            hangs = member.is_ready and now - member.seen_s > self._timeout_s
            if hangs and member.parts:
                self._crew.kill(worker)
                completions += self._bury(worker, f"it took no step for {self._timeout_s:g} s")
        self._hand_out()
        return completions

    def close(self) -> None:
        """Ends the workers; idempotent."""
        self._num_left.clear()
        self._crew.close()

    def _listen(self) -> list[Completion]:
        completions = []
        for worker, news in self._crew.wait(_WAIT_S):
            if isinstance(news, Lost):
                completions += self._bury(worker, news.reason)
            else:
                completions += self._take(worker, news)
        return completions

    def _take(self, worker: int, report: Report) -> list[Completion]:
        """The completions of a report, with the rows' numbers in the job."""
        member = self._members[worker]
        if not member.is_ready or report.num_steps > member.num_steps or report.completions:
            member.seen_s = self._clock()
        self._was_ready = True
        member.is_ready, member.num_steps, member.usage = True, report.num_steps, report.usage
        self._notices |= dict.fromkeys(report.notices)
        completions = []
        for number, completion in report.completions:
            part = member.parts[number]
            part.is_waiting[completion.row] = False
            member.num_rows -= 1
            if not part.is_waiting.any():
                del member.parts[number]
            completions.append(self._done(part, completion.row, completion))
        if completions:
            self._num_in_vain = 0
        return completions

    def _done(self, part: Part, place: int, completion: Completion) -> Completion:
        job_id = part.job_id
        row = int(self._jobs[job_id].plan.order[part.places[place]])
        self._num_left[job_id] -= 1
        if not self._num_left[job_id]:
            del self._num_left[job_id], self._jobs[job_id]
        return replace(completion, job_id=job_id, row=row)

    def _bury(self, worker: int, reason: str) -> list[Completion]:
        """Puts another in the place of a lost worker; rows that are given up get an error."""
        member = self._members[worker]
        self._notices[f"worker {worker + 1} was lost and replaced: {reason}"] = None
        self._num_in_vain += 1
        most = MOST_DEATHS_IN_VAIN if self._was_ready else MOST_DEATHS_BEFORE_ANY
        if self._num_in_vain > most:
            raise EngineError(
                f"{self._num_in_vain} workers were lost one after the other without an answer in "
                f"between, the last because {reason}; run without workers to see more"
            )
        completions, again = [], []
        for part in member.parts.values():
            left = part.left()
            left.deaths += 1
            if len(left) == 1 and left.deaths >= DEATHS_OF_A_ROW:
                completions.append(self._done(left, 0, _given_up(left.deaths, reason)))
            elif len(left) > 1 and left.deaths >= DEATHS_BEFORE_HALVING:
                halves = left.halves()
                for half in halves:
                    half.deaths = DEATHS_BEFORE_HALVING - 1
                again += halves
            else:
                again.append(left)
        self._assignment.forget(worker)
        self._assignment.put_back(worker, again)
        self._members[worker] = _Member(self._clock(), former=member.former + member.usage)
        self._crew.start(worker)
        return completions

    def _hand_out(self) -> None:
        """Sends every worker parts until it has enough to go on with."""
        ready = [(worker, one) for worker, one in enumerate(self._members) if one.is_ready]
        for worker, member in ready:
            while self._wants_own(worker, member):
                part = self._assignment.take(worker)
                assert part is not None
                self._send(worker, member, part)
        for worker, member in ready:
            if self._assignment.own(worker) is None and not member.has_suspect:
                self._steal(worker, member)

    def _wants_own(self, worker: int, member: _Member) -> bool:
        """Whether a worker is to get its next part: before it runs out of rows to admit. Suspect
        rows run by themselves."""
        own = self._assignment.own(worker)
        if own is None or member.has_suspect:
            return False
        return member.num_rows == 0 if own.deaths else member.num_rows < 2 * self._batch_size

    def _steal(self, thief: int, member: _Member) -> None:
        """Sends a worker a part of another's, when its steps are no longer full; one that is
        still loading, or whose next rows are suspect, is left alone until it has nothing to do."""
        if member.num_rows > self._batch_size // 2:
            return
        victims = [
            worker
            for worker, other in enumerate(self._members)
            if not member.num_rows or (other.is_ready and not self._assignment.has_suspect(worker))
        ]
        part = self._assignment.steal(thief, victims)
        if part is not None:
            self._send(thief, member, part)

    def _send(self, worker: int, member: _Member, part: Part) -> None:
        job = self._jobs[part.job_id]
        number = self._next_part
        self._next_part += 1
        if not member.parts:
            member.seen_s = self._clock()
        member.parts[number] = part
        member.num_rows += len(part)
        if self._ran_by is not None and self._table is job.tokens:
            self._ran_by[job.plan.order[part.places]] = worker
        self._crew.send(worker, number, part_job(job, part, prefix_cache=self._prefix_cache))

    def _cost(self, part: Part) -> float:
        """Tokens of a part that are computed: new ones of prompts, and of answers as expected."""
        job = self._jobs[part.job_id]
        rows = job.plan.order[part.places]
        lengths = np.asarray(job.tokens.offsets)[rows + 1] - np.asarray(job.tokens.offsets)[rows]
        answers = np.minimum(job.requests.max_tokens[rows], EXPECTED_ANSWER_TOKENS)
        return float((lengths - job.plan.lcp[part.places] + answers).sum())


def _given_up(num_deaths: int, reason: str) -> Completion:
    return Completion(
        job_id=0,
        row=0,
        token_ids=(),
        text="",
        finish_reason=FinishReason.ERROR,
        completion_tokens=0,
        error=RowError(
            RowErrorCode.WORKER_LOST,
            f"{num_deaths} workers were lost with this row, the last because {reason}; shorten "
            f"it, or run it without workers to see more",
        ),
    )
