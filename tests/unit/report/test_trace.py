"""The files of a trace: what is in them, when they appear, and what becomes of bad ones."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchradix.errors import InputError
from batchradix.report.figures import figures, tokens_by_kind
from batchradix.report.trace import PARTS, PLAN, TracedPlan, TraceWriter, read_trace
from batchradix.types import StepStats, Usage

FACTS = {
    "started": "2026-11-30T00:00:00+00:00", "model": "m", "dtype": "float32", "rows": 4,
    "kv_tokens": 100, "planned_tokens": 40, "distinct_tokens": 25,
    "bin_planned_tokens": [10, 30], "bin_distinct_tokens": [10, 15],
}  # fmt: skip
PLANNED = TracedPlan(facts=FACTS, pieces=PLAN.empty_table())


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def step(started_s: float, usage: Usage, *, model_tokens: int = 10) -> StepStats:
    """A step of a second: a tenth for scheduling, the rest for the forward pass."""
    return StepStats(
        started_s=started_s,
        schedule_s=0.1,
        forward_s=0.9,
        mask_s=0.0,
        sample_s=0.0,
        collect_s=0.0,
        model_tokens=model_tokens,
        running_rows=2,
        waiting_rows=1,
        finished_rows=1,
        kv_tokens=50,
        usage=usage,
    )


def write(folder: Path, starts_s: list[float], *, closed: bool = True) -> list[str]:
    """Steps that begin at these seconds of the run, each with three tokens computed and two
    decoded; the warnings."""
    clock, warnings = Clock(), []
    writer = TraceWriter(folder, warnings.append, clock=clock)
    writer.begin(PLANNED)
    for place, start_s in enumerate(starts_s, 1):
        writer(step(1000.0 + start_s, Usage(computed_tokens=3 * place, decode_steps=2 * place)))
    if closed:
        clock.now_s = 1000.0 + starts_s[-1] + 1.5
        writer.close()
    return warnings


def test_a_row_a_step_holds_what_the_step_added_and_the_time_until_the_next(tmp_path: Path) -> None:
    assert write(tmp_path / "t", [0.25, 2.25, 4.0]) == []
    [run] = read_trace(tmp_path / "t")
    steps = run.steps.to_pydict()
    assert steps["step"] == [0, 1, 2]
    assert steps["time_s"] == [0.25, 2.25, 4.0]
    assert steps["computed_tokens"] == [3, 3, 3]
    assert steps["decode_steps"] == [2, 2, 2]
    assert steps["sink_s"] == pytest.approx([1.0, 0.75, 0.5])
    assert run.plan.facts == FACTS


def test_what_a_killed_run_wrote_is_whole_and_no_more_than_some_seconds_behind(
    tmp_path: Path,
) -> None:
    write(tmp_path, [float(k) for k in range(25)], closed=False)
    [run] = read_trace(tmp_path)
    assert run.steps["step"].to_pylist() == list(range(20))
    assert sum(run.steps["sink_s"].to_pylist()) == pytest.approx(0)


def test_the_files_of_a_long_run_are_hundreds(tmp_path: Path) -> None:
    ten_hours = 36_000
    write(tmp_path, [float(k) for k in range(0, ten_hours, 5)])
    assert 100 < len(list(tmp_path.glob("steps-*.parquet"))) < 600


def test_a_further_run_adds_to_the_trace(tmp_path: Path) -> None:
    for _ in range(2):
        write(tmp_path, [0.0, 1.0])
    (tmp_path / "other.parquet").write_text("no file of a trace")
    (tmp_path / ".steps-0002-00000.parquet").write_text("left by a kill")
    runs = read_trace(tmp_path)
    assert [(run.number, len(run.steps)) for run in runs] == [(0, 2), (1, 2)]
    assert runs[1].steps["run"].to_pylist() == [1, 1]


def test_sums_of_all_runs_stand_beside_those_of_each(tmp_path: Path) -> None:
    write(tmp_path, [0.0, 1.0])
    write(tmp_path, [0.0])
    numbers = figures(read_trace(tmp_path))
    assert (numbers["computed_tokens"], numbers["decode_steps"], numbers["steps"]) == (9, 6, 3)
    assert [run["computed_tokens"] for run in numbers["runs"]] == [6, 3]
    assert numbers["runs"][0]["predicted"] == {
        "planned_tokens": 40, "distinct_tokens": 25, "cached_tokens": 15,
    }  # fmt: skip
    assert numbers["seconds"]["forward"] == pytest.approx(2.7)
    assert numbers["seconds"]["sink"] == pytest.approx(1.0)
    assert numbers["seconds"]["total"] == pytest.approx(4.0)
    assert numbers["rows_per_second"] == pytest.approx(3 / 4, abs=1e-3)
    assert set(numbers["seconds"]) == {part.removesuffix("_s") for part in PARTS} | {"total"}


def test_the_kinds_of_tokens_are_all_that_went_through_the_model(tmp_path: Path) -> None:
    write(tmp_path, [0.0, 1.0])
    [run] = read_trace(tmp_path)
    kinds = tokens_by_kind(run.steps)
    assert {kind: values.tolist() for kind, values in kinds.items()} == {
        "computed": [3, 3], "again": [0, 0], "decoded": [2, 2], "appended": [5, 5],
        "guessed": [0, 0],
    }  # fmt: skip


def test_a_run_without_a_step_is_in_the_trace(tmp_path: Path) -> None:
    TraceWriter(tmp_path, pytest.fail).begin(PLANNED)
    [run] = read_trace(tmp_path)
    assert len(run.steps) == 0
    assert figures([run])["rows_per_second"] is None


def test_what_cannot_be_written_is_told_once_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("a file where the folder should be")
    [warning] = write(tmp_path / "t", [0.0, 20.0, 40.0])
    assert warning.startswith("no trace is written any more: ")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    write(tmp_path, [0.0])
    (tmp_path / "steps-0000-00000.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"the trace in .* cannot be read"):
        read_trace(tmp_path)


def test_a_folder_without_a_plan_has_no_runs(tmp_path: Path) -> None:
    assert read_trace(tmp_path) == []
    (tmp_path / ".plan-0000.parquet").write_bytes(b"PAR1")  # killed while it was written
    assert read_trace(tmp_path) == []


def test_files_that_are_no_part_of_a_trace_are_named_in_one_sentence(tmp_path: Path) -> None:
    plan = tmp_path / "plan-0000.parquet"
    for metadata in ({}, {"batchradix.run": "{"}, {"batchradix.run": "{}"}):
        pq.write_table(PLAN.empty_table().replace_schema_metadata(metadata), plan)
        with pytest.raises(InputError, match=r"plan-0000\.parquet is damaged or no file[^\n]*$"):
            read_trace(tmp_path)
    pq.write_table(pa.table({"other": [1]}), plan)
    with pytest.raises(InputError, match=r"plan-0000\.parquet is damaged or no file[^\n]*$"):
        read_trace(tmp_path)
