"""Rows whose finished answer is invalid run again, warmer and with other random numbers.

What an attempt draws is a function of the row's content (and seed, where it is sampled anyway)
and the attempt's number, so a row ends alike whatever ran beside it or was resumed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import numpy as np

from batchradix.pipeline.parts import Parts
from batchradix.pipeline.planned import Planned, rng_keys_of
from batchradix.plan.tree import build_tree, flat_tree
from batchradix.scratch import windows
from batchradix.types import I64, EngineJob, Plan, RequestTable, RowSettings

FIRST_TEMPERATURE = 0.5
TEMPERATURE_STEP = 0.2
MAX_TEMPERATURE = 1.0


def raised(settings: RowSettings, attempt: int) -> RowSettings:
    """The settings of an attempt (from 1 on): at least 0.5, 0.2 more with each, up to 1.0.

    A temperature that is above 1.0 already stays.
    """
    warmer = max(settings.temperature, FIRST_TEMPERATURE) + TEMPERATURE_STEP * (attempt - 1)
    temperature = max(settings.temperature, min(warmer, MAX_TEMPERATURE))
    return replace(settings, temperature=temperature)


def plan_of(whole: Plan, positions: I64) -> Plan:
    """The plan of the rows that stand at ``positions`` (int64[m], distinct) of ``whole``."""
    positions = np.sort(positions)
    lcp = np.zeros(len(positions), dtype=np.int32)
    for i, (before, here) in enumerate(pairwise(positions.tolist())):
        lcp[i + 1] = whole.lcp[before + 1 : here + 1].min()
    return Plan(whole.order[positions], lcp)


class Retries:
    """Makes the jobs that run rows again, at most ``most`` times each.

    ``num_rows`` counts the rows that ran again, ``num_tokens`` the answer tokens thrown away.
    """

    def __init__(self, planned: Planned, *, most: int, run_seed: int, prefix_cache: bool) -> None:
        self.most = most
        self.num_rows = 0
        self.num_tokens = 0
        self._planned = planned
        self._run_seed = run_seed
        self._prefix_cache = prefix_cache
        self._requests: dict[int, RequestTable] = {}
        order = planned.plan.order
        self._position = planned.scratch.full(len(planned.rows), -1, np.int64)
        for part in windows(len(order)):
            self._position[order[part]] = np.arange(part.start, part.stop)

    def job(self, rows: Iterable[int], attempt: int) -> EngineJob:
        """The job that runs ``rows``, distinct rows of the plan, for the ``attempt``-th time."""
        plan = plan_of(self._planned.plan, self._position[np.fromiter(rows, dtype=np.int64)])
        tokens = self._planned.rows.tokens
        return EngineJob(
            tokens=tokens,
            plan=plan,
            tree=(build_tree if self._prefix_cache else flat_tree)(
                plan, self._planned.rows.lengths
            ),
            requests=self._requests_of(attempt),
            retain=True,
        )

    def _requests_of(self, attempt: int) -> RequestTable:
        if attempt not in self._requests:
            from batchradix.engine.rng import attempt_keys

            rows, scratch = self._planned.rows, self._planned.scratch
            requests = rows.requests
            # Greedy rows of different seeds have one answer, so they have to draw alike here.
            keys = rng_keys_of(rows, self._run_seed, scratch, greedy_have_seeds=False)
            for part in scratch.windows(len(keys)):
                keys[part] = attempt_keys(keys[part], attempt)
            self._requests[attempt] = replace(
                requests,
                settings=tuple(raised(settings, attempt) for settings in requests.settings),
                rng_key=keys,
            )
        return self._requests[attempt]


def open_retries(parts: Parts, planned: Planned) -> Retries | None:
    """What runs invalid rows of this job again, None where nothing does."""
    config = parts.config
    if config.retries == 0:
        return None
    return Retries(
        planned,
        most=config.retries,
        run_seed=config.sampling.seed or 0,
        prefix_cache=config.engine.prefix_cache,
    )
