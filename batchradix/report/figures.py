"""A trace in numbers: totals of each run and of all, predicted beside achieved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchradix.report.trace import COUNTERS, PARTS, TracedRun

Floats = NDArray[np.float64]

KINDS = ("computed", "again", "decoded", "appended", "guessed")
"""What a token goes through the model for, see `tokens_by_kind`."""


def figures(runs: Sequence[TracedRun]) -> dict[str, Any]:
    """The object that ``batchradix report --json`` prints.

    Counters have the names and meanings of ``run --json`` and are summed over all steps, of the
    whole trace and, in ``runs``, of each run, which has what its plan predicted beside them
    (``predicted``). ``seconds`` are those of the steps by part, ``total`` is their sum.
    """
    per_run = [
        {
            "run": run.number,
            **{name: run.plan.facts.get(name) for name in ("started", "model", "dtype")},
            "rows": int(run.plan.facts["rows"]),
            "kv_tokens": int(run.plan.facts["kv_tokens"]),
            "predicted": _predicted(run.plan.facts),
            **_totals(run.steps),
        }
        for run in runs
    ]
    return {
        **_totals(pa.concat_tables([run.steps for run in runs])),
        "kinds": _kinds(runs),
        "runs": per_run,
    }


def tokens_by_kind(steps: pa.Table) -> dict[str, Floats]:
    """float64[n] each, which together are ``model_tokens``.

    ``computed``: of prompts and openings, for the first time; ``again``: those that were lost;
    ``decoded``: answer tokens that led to a sampled one; ``guessed``: drafts, in vain or not;
    ``appended``: the other answer tokens, forced ones above all.
    """
    of = {name: column(steps, name) for name in ("model_tokens", *COUNTERS)}
    known = {
        "computed": of["computed_tokens"],
        "again": of["recomputed_tokens"],
        "decoded": of["decode_steps"],
        "guessed": of["drafted_tokens"],
    }
    appended = np.maximum(0.0, of["model_tokens"] - sum(known.values()))
    return {kind: {**known, "appended": appended}[kind] for kind in KINDS}


def lasted_s(steps: pa.Table) -> Floats:
    """float64[n]: seconds from the beginning of each step to that of the next."""
    lasted: Floats = np.sum([column(steps, part) for part in PARTS], axis=0)
    return lasted


def column(steps: pa.Table, name: str) -> Floats:
    """A column of the steps as float64[n]."""
    values: Floats = steps.column(name).to_numpy().astype(np.float64)
    return values


def _predicted(facts: Mapping[str, Any]) -> dict[str, int]:
    planned, distinct = int(facts["planned_tokens"]), int(facts["distinct_tokens"])
    return {
        "planned_tokens": planned,
        "distinct_tokens": distinct,
        "cached_tokens": planned - distinct,
    }


def _totals(steps: pa.Table) -> dict[str, Any]:
    seconds = {name.removesuffix("_s"): _sum(steps, name) for name in PARTS}
    seconds["total"] = sum(seconds.values())
    sums = {name: int(_sum(steps, name)) for name in ("finished_rows", "model_tokens", *COUNTERS)}
    total_s = seconds["total"]
    return {
        "steps": len(steps),
        **sums,
        "peak_running_rows": _max(steps, "running_rows"),
        "peak_kv_tokens": _max(steps, "kv_tokens"),
        "rows_per_second": round(sums["finished_rows"] / total_s, 3) if total_s else None,
        "model_tokens_per_second": round(sums["model_tokens"] / total_s, 3) if total_s else None,
        "seconds": {name: round(value, 6) for name, value in seconds.items()},
    }


def _kinds(runs: Sequence[TracedRun]) -> dict[str, int]:
    kinds = [tokens_by_kind(run.steps) for run in runs]
    return {kind: int(sum(each[kind].sum() for each in kinds)) for kind in KINDS}


def _sum(steps: pa.Table, name: str) -> float:
    return float(pc.sum(steps.column(name)).as_py() or 0)


def _max(steps: pa.Table, name: str) -> int:
    return int(pc.max(steps.column(name)).as_py() or 0)
