"""A planned job cut into parts, each of which one worker runs in one piece."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from batchradix.pipeline.retries import plan_of
from batchradix.plan.shards import split_plan
from batchradix.plan.tree import build_tree, flat_tree
from batchradix.types import I32, I64, EngineJob, Plan, TokenTable

PARTS_A_WORKER = 8
"""At least, so that there is something left to take from a worker that falls behind."""

MOST_PART_TOKENS = 1 << 24
"""About; what is sent at once stays small beside what a machine has."""


@dataclass(slots=True, kw_only=True, eq=False)
class Part:
    """Rows of a job that go to a worker together. ``places``: int64[n], their plan positions,
    rising. ``deaths``: how many workers were lost with them. ``is_waiting``: bool[n], which rows
    have no completion yet."""

    job_id: int
    places: I64
    deaths: int = 0
    is_waiting: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.is_waiting = np.ones(len(self.places), dtype=np.bool_)

    def __len__(self) -> int:
        return len(self.places)

    @property
    def first(self) -> int:
        return int(self.places[0])

    @property
    def last(self) -> int:
        return int(self.places[-1])

    def left(self) -> Part:
        """The rows without a completion, as a part of its own."""
        return Part(job_id=self.job_id, places=self.places[self.is_waiting], deaths=self.deaths)

    def halves(self) -> list[Part]:
        """Two parts of half as many rows; of one row the part alone."""
        middle = len(self) // 2
        cut = [self.places[:middle], self.places[middle:]]
        return [
            Part(job_id=self.job_id, places=places, deaths=self.deaths)
            for places in cut
            if len(places)
        ]


def cut(job_id: int, job: EngineJob, num_workers: int) -> list[list[Part]]:
    """For each worker the parts of the planner's shard of that number, in order of the plan."""
    lengths, answers = job.tokens.lengths, job.requests.max_tokens
    shards = split_plan(job.plan, lengths, answers, num_workers).cuts.tolist()
    found = []
    for begin, stop in itertools.pairwise(shards):
        rows = job.plan.order[begin:stop]
        tokens = int(lengths[rows].sum())
        count = max(PARTS_A_WORKER, -(-tokens // MOST_PART_TOKENS))
        own = Plan(rows, _lcp(job.plan, np.arange(begin, stop)))
        edges = split_plan(own, lengths, answers, min(count, max(1, len(own)))).cuts + begin
        found.append(
            [
                Part(job_id=job_id, places=np.arange(first, last))
                for first, last in itertools.pairwise(edges)
                if first < last
            ]
        )
    return found


def cut_by_worker(
    job_id: int, job: EngineJob, workers: NDArray[np.int16], num_workers: int
) -> list[list[Part]]:
    """For each worker one part with the rows that it ran before. ``workers``: int16[num_rows]."""
    of_place = workers[job.plan.order]
    places = (np.flatnonzero(of_place == worker) for worker in range(num_workers))
    return [[Part(job_id=job_id, places=mine)] if len(mine) else [] for mine in places]


def part_job(job: EngineJob, part: Part, *, prefix_cache: bool) -> EngineJob:
    """A job of the part's rows alone, row ``i`` that at ``part.places[i]`` in the plan. Prefixes
    are retained: the part that comes next goes on where this one ends."""
    rows = job.plan.order[part.places]
    tokens = _tokens_of(job.tokens, rows)
    plan = Plan(np.arange(len(rows)), _lcp(job.plan, part.places))
    requests = job.requests
    used, settings_id = np.unique(requests.settings_id[rows], return_inverse=True)
    return EngineJob(
        tokens=tokens,
        plan=plan,
        tree=(build_tree if prefix_cache else flat_tree)(plan, tokens.lengths),
        requests=replace(
            requests,
            settings=tuple(requests.settings[one] for one in used.tolist()),
            settings_id=settings_id.astype(np.int32),
            max_tokens=np.asarray(requests.max_tokens[rows]),
            rng_key=np.asarray(requests.rng_key[rows]),
            num_forced=(
                None if requests.num_forced is None else np.asarray(requests.num_forced[rows])
            ),
        ),
        retain=True,
    )


def _tokens_of(table: TokenTable, rows: I64) -> TokenTable:
    lengths = np.asarray(table.offsets)[rows + 1] - np.asarray(table.offsets)[rows]
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    values = np.empty(int(offsets[-1]), dtype=np.uint32)
    for (begin, stop), row in zip(_pairs(offsets), rows.tolist(), strict=True):
        values[begin:stop] = table[row]
    return TokenTable(values, offsets)


def _pairs(offsets: I64) -> Iterator[tuple[int, int]]:
    bounds = offsets.tolist()
    return itertools.pairwise(bounds)


def _lcp(plan: Plan, places: I64) -> I32:
    if len(places) and places[-1] - places[0] + 1 == len(places):
        lcp = np.array(plan.lcp[places[0] : places[-1] + 1])
        lcp[0] = 0
        return lcp
    return plan_of(plan, places).lcp
