"""What a run is expected to take, and what it took, so that the next one is known better."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from batchradix.checkpoint.cache_folder import cache_folder
from batchradix.config import RunConfig
from batchradix.errors import ModelError
from batchradix.plan.tree import build_tree, flat_tree
from batchradix.report.history import history_file, read_runs
from batchradix.report.summary import Forecast
from batchradix.scratch import windows
from batchradix.settings import EngineSettings
from batchradix.types import I32, I64, EngineJob, Plan, StepObserver, StepStats

MOST_ROWS = 1024
"""More are scaled up from the first so many of the plan."""


def forecast(
    job: EngineJob,
    lengths: I64,
    settings: EngineSettings,
    model_hash: str,
    answer_tokens: float | None,
) -> Forecast:
    """What a job is expected to take. ``lengths``: int64[num_rows], tokens by table row.
    ``answer_tokens``: how many each answer is expected to choose, None for all of its
    ``max_tokens``. Seconds are known where a run of this model, with these settings, was measured
    on this machine."""
    from batchradix.engine.forecast import simulate
    from batchradix.engine.step_costs import costs_key, read_costs

    costs = read_costs(cache_folder(), costs_key(model_hash, settings))
    order = job.plan.order
    num_chosen = 0
    for window in windows(len(order)):
        num_chosen += int(_sampled(job, order[window], answer_tokens).sum(dtype=np.int64))
    computed, decode_steps = job.tree.distinct_tokens, num_chosen - len(order)
    part, scale = job, 1.0
    is_whole = len(order) <= MOST_ROWS
    if not is_whole:
        plan = Plan(order=order[:MOST_ROWS], lcp=job.plan.lcp[:MOST_ROWS])
        make_tree = build_tree if settings.prefix_cache else flat_tree
        part = replace(job, plan=plan, tree=make_tree(plan, lengths))
    sampled = _sampled(job, part.plan.order, answer_tokens)
    usage, seconds = simulate(part, settings, settings.kv_tokens, sampled, costs)
    if is_whole:
        computed, decode_steps = usage.computed_tokens, usage.decode_steps
    else:
        scale = (computed + decode_steps) / max(1, usage.computed_tokens + usage.decode_steps)
    return Forecast(
        computed_tokens=computed,
        recomputed_tokens=round(scale * usage.recomputed_tokens),
        decode_steps=decode_steps,
        forward_steps=round(scale * usage.forward_steps),
        peak_kv_tokens=usage.peak_kv_tokens,
        seconds=None if seconds is None else scale * seconds,
        answer_tokens=num_chosen / len(order) if len(order) else 0.0,
        is_guess=answer_tokens is None,
    )


def _sampled(job: EngineJob, rows: I64, answer_tokens: float | None) -> I32:
    """int32[n]: tokens that the answers of some table rows choose; over all rows as many on
    average as expected."""
    most = job.requests.max_tokens[rows].astype(np.int64)
    if job.requests.num_forced is not None:
        most -= job.requests.num_forced[rows]
    if answer_tokens is not None:
        # the fraction is spread over the rows, so that the mean is kept
        begins, ends = (np.floor(answer_tokens * places) for places in (rows, rows + 1))
        most = np.minimum(most, (ends - begins).astype(np.int64))
    sampled: I32 = np.maximum(most, 1).astype(np.int32)
    return sampled


def expected_answer_tokens(config: RunConfig) -> float | None:
    """What answers of the last run of this input and model chose on average, by the ledger."""
    path = history_file()
    if path is None or not isinstance(config.input, str):
        return None
    try:
        runs = read_runs(path).select(["input", "model", "answer_tokens"]).to_pylist()
    except (OSError, pa.ArrowException):
        return None
    for run in reversed(runs):
        if (run["input"], run["model"]) == (config.input, config.model) and run["answer_tokens"]:
            return float(run["answer_tokens"])
    return None


class Meter:
    """Measures what steps take while a run goes on, and keeps it for forecasts to come."""

    def __init__(self, model_hash: str, settings: EngineSettings) -> None:
        from batchradix.engine.step_costs import CostMeter

        self._costs = CostMeter()
        self._model_hash = model_hash
        self._settings = settings

    def __call__(self, step: StepStats) -> None:
        self._costs(step)

    def keep(self) -> None:
        """Writes what was found to the cache folder; what cannot be written is left."""
        from batchradix.engine.step_costs import costs_key, write_costs

        costs = self._costs.costs
        if costs is not None:
            with suppress(ModelError, OSError):
                write_costs(cache_folder(), costs_key(self._model_hash, self._settings), costs)


@dataclass(frozen=True, slots=True)
class Observers:
    """Several observers as one."""

    each: tuple[StepObserver, ...]

    def __call__(self, step: StepStats) -> None:
        for observer in self.each:
            observer(step)
