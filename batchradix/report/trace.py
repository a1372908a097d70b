"""The trace of a run: a row for each step of the engine, in Parquet files of one folder.

``steps-RRRR-NNNNN.parquet`` are the steps of the ``RRRR``-th run that worked on the output, a
file for some seconds of them; all together are one table. ``plan-RRRR.parquet`` is what that run
had to do: pieces of the prompts' tree (`TracedPlan`), with the run's `facts` in its metadata.
Each file appears by rename, so that a kill leaves whole ones.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchradix.errors import InputError
from batchradix.types import StepStats, Usage

COUNTERS = (
    "computed_tokens",
    "recomputed_tokens",
    "loaded_tokens",
    "reloaded_tokens",
    "cached_tokens",
    "decode_steps",
    "completion_tokens",
    "forced_tokens",
    "drafted_tokens",
    "accepted_tokens",
    "evicted_tokens",
    "preemptions",
    "forward_steps",
)
"""Columns that hold by how much a counter of `types.Usage` grew in the step."""
PARTS = ("schedule_s", "forward_s", "mask_s", "sample_s", "collect_s", "sink_s")
"""Columns with seconds, which together fill the run: those of `types.StepStats` and, from the
end of the step to the next one, judging answers and writing them (``sink_s``)."""
COUNTS = ("model_tokens", "running_rows", "waiting_rows", "finished_rows", "kv_tokens")

STEPS = pa.schema(
    [("run", pa.int32()), ("step", pa.int64()), ("time_s", pa.float64())]
    + [(name, pa.float64()) for name in PARTS]
    + [(name, pa.int64()) for name in (*COUNTS, *COUNTERS)]
)
PLAN = pa.schema(
    [(name, pa.int64()) for name in ("first", "last", "start")]
    + [("is_node", pa.bool_()), ("num_nodes", pa.int64())]
    + [("planned_tokens", pa.int64()), ("distinct_tokens", pa.int64()), ("label", pa.string())]
)

_FACTS = b"batchradix.run"
_FACT_NAMES = {"rows", "kv_tokens", "planned_tokens", "distinct_tokens"} | {
    "bin_planned_tokens",
    "bin_distinct_tokens",
}
_STEPS_NAME = re.compile(r"steps-(\d{4,})-(\d{5,})\.parquet")
_PLAN_NAME = re.compile(r"plan-(\d{4,})\.parquet")
_LEAST_PAUSE_S = 10.0
_PAUSE_SHARE = 0.01  # of the time run so far, so that a long run has no more files than hundreds
_MOST_STEPS = 1 << 16

_steps_times = attrgetter("started_s", *(name for name in PARTS if name != "sink_s"))
_steps_counts = attrgetter(*COUNTS)
_counters = attrgetter(*COUNTERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedPlan:
    """What a run has to do: ``pieces`` of the prompts' tree in the columns of `PLAN` (see
    `plan.outline.TreeOutline`; ``label`` is how a node's text begins), and ``facts``, a JSON
    object: ``model dtype device batch_size kv_tokens`` (slots of the pool) ``rows`` (to run)
    ``planned_tokens distinct_tokens`` (of their prompts with openings) ``bin_planned_tokens
    bin_distinct_tokens`` (lists, over the plan) ``started`` (ISO 8601)."""

    facts: Mapping[str, Any]
    pieces: pa.Table


class TraceWriter:
    """Writes the steps of one run below ``folder``; a `types.StepObserver`.

    The first one of an output makes the folder; each further run adds its files. What cannot be
    written is told to ``warn`` once, and the rest of the trace is dropped: no run fails for it.
    """

    def __init__(
        self,
        folder: Path,
        warn: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._folder = folder
        self._warn = warn
        self._clock = clock
        self._run = 0
        self._part = 0
        self._num_written = 0
        self._is_open = True
        self._began_s = self._due_s = clock()
        self._waiting: list[StepStats] = []
        self._before = np.array(_counters(Usage()), dtype=np.int64)

    def begin(self, plan: TracedPlan) -> None:
        """Takes the next number of a run, writes its plan and lets its clock begin."""
        try:
            self._folder.mkdir(exist_ok=True)
            names = [path.name for path in self._folder.iterdir()]
        except OSError as error:
            self._give_up(error)
            return
        self._run = (
            max((int(m[1]) for n in names if (m := _PLAN_NAME.fullmatch(n))), default=-1) + 1
        )
        metadata = {_FACTS: json.dumps(dict(plan.facts))}
        table = plan.pieces.cast(PLAN).replace_schema_metadata(metadata)
        self._write(table, f"plan-{self._run:04d}.parquet")
        self._began_s = self._clock()
        self._due_s = self._began_s + _LEAST_PAUSE_S

    def __call__(self, step: StepStats) -> None:
        """Takes one step; writes those before it when it is time to."""
        if not self._is_open:
            return
        self._waiting.append(step)
        if step.started_s >= self._due_s or len(self._waiting) > _MOST_STEPS:
            self._flush(self._waiting[:-1], step.started_s)
            self._waiting = [step]
            ran_s = step.started_s - self._began_s
            self._due_s = step.started_s + max(_LEAST_PAUSE_S, _PAUSE_SHARE * ran_s)

    def close(self) -> None:
        """Writes what is left; idempotent."""
        self._flush(self._waiting, self._clock())
        self._waiting = []

    def _flush(self, steps: list[StepStats], until_s: float) -> None:
        """Writes steps that end where the next one, not among them, begins: ``until_s``."""
        if not steps or not self._is_open:
            return
        times = np.array([_steps_times(step) for step in steps])
        counts = np.array([_steps_counts(step) for step in steps], dtype=np.int64)
        totals = np.array([self._before, *(_counters(step.usage) for step in steps)], np.int64)
        self._before = totals[-1]
        nexts = np.append(times[1:, 0], until_s)
        columns = [
            np.full(len(steps), self._run, dtype=np.int32),
            np.arange(self._num_written, self._num_written + len(steps)),
            times[:, 0] - self._began_s,
            *times[:, 1:].T,
            np.maximum(0.0, nexts - times.sum(axis=1)),
            *counts.T,
            *np.diff(totals, axis=0).T,
        ]
        table = pa.Table.from_arrays([pa.array(column) for column in columns], schema=STEPS)
        self._write(table, f"steps-{self._run:04d}-{self._part:05d}.parquet")
        self._num_written += len(steps)
        self._part += 1

    def _write(self, table: pa.Table, name: str) -> None:
        partial = self._folder / f".{name}"
        try:
            pq.write_table(table, partial, compression="zstd")
            os.replace(partial, self._folder / name)
        except (OSError, pa.ArrowException) as error:
            partial.unlink(missing_ok=True)
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._is_open = False
        self._warn(f"no trace is written any more: {getattr(error, 'strerror', None) or error}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRun:
    """One run of a trace: its number, its plan and its steps in the columns of `STEPS`."""

    number: int
    plan: TracedPlan
    steps: pa.Table


def read_trace(folder: Path) -> list[TracedRun]:
    """The runs of a trace in order, those without a step included.

    Empty where no plan of a run is there. Raises `InputError` when a file cannot be read.
    """
    files: dict[int, list[Path]] = {}
    plans: dict[int, Path] = {}
    try:
        for path in sorted(folder.iterdir(), key=_place):
            if found := _PLAN_NAME.fullmatch(path.name):
                plans[int(found[1])] = path
            elif found := _STEPS_NAME.fullmatch(path.name):
                files.setdefault(int(found[1]), []).append(path)
        return [
            TracedRun(
                number=number,
                plan=_read_plan(plans[number]),
                steps=pa.concat_tables(
                    [STEPS.empty_table(), *(_read(path, STEPS) for path in files.get(number, []))]
                ),
            )
            for number in sorted(plans)
        ]
    except OSError as error:
        raise InputError(f"the trace in {folder} cannot be read: {error}") from None


def _place(path: Path) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", path.name))


def _read_plan(path: Path) -> TracedPlan:
    table = _read(path, PLAN)
    try:
        facts = json.loads(table.schema.metadata[_FACTS])
    except (TypeError, KeyError, ValueError):
        facts = None
    if not isinstance(facts, dict) or not facts.keys() >= _FACT_NAMES:
        raise _damaged(path)
    return TracedPlan(facts=facts, pieces=table)


def _read(path: Path, schema: pa.Schema) -> pa.Table:
    # From a handle: the name alone could be taken for a pattern or a partition.
    with path.open("rb") as file:
        try:
            table = pq.read_table(file, columns=schema.names)
            return table.cast(schema.with_metadata(table.schema.metadata))
        except (pa.ArrowException, OSError, ValueError, KeyError):
            raise _damaged(path) from None


def _damaged(path: Path) -> InputError:
    return InputError(
        f"the trace in {path.parent} cannot be read: {path.name} is damaged or no file of a trace; "
        f"remove it to see the rest"
    )
