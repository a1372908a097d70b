"""A traced run: what its steps add up to, and what a stopped and a resumed one leave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchradix import pipeline
from batchradix.config import EngineOptions, OutputOptions, RunConfig, SamplingOptions
from batchradix.errors import OptionError
from batchradix.report.figures import column, figures, tokens_by_kind
from batchradix.report.progress import Silent
from batchradix.report.summary import Summary
from batchradix.report.trace import COUNTERS, TracedRun, read_trace

MakeTinyModel = Callable[..., Path]
ENGINE: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "batch_size": 6}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "kind": {"enum": ["ab", "abc"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
UNIQUE = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2} | {
    "uniqueItems": True  # which decoding does not enforce
}
ROWS = [{"prompt": f"a beginning, {'more ' * (i % 3)}and {i // 2}, {i}"} for i in range(16)]


@pytest.fixture(scope="module")
def model(tiny_model_folder: MakeTinyModel) -> str:
    return str(tiny_model_folder("random", family="llama", seed=7))


def traced(
    model: str, output: Path, *, stop_after: int | None = None, **changes: Any
) -> tuple[Summary, list[TracedRun]]:
    options = {"max_tokens": 12} | changes.pop("sampling", {})
    job = RunConfig(
        input=ROWS,
        model=model,
        engine=EngineOptions(**ENGINE | changes.pop("engine", {})),
        sampling=SamplingOptions(**options),
        output=OutputOptions(path=output, trace=True),
        **changes,
    )
    asked = iter(range(10**9))
    outcome = pipeline.run(job, stop_requested=lambda: 15 if next(asked) == stop_after else None)
    return outcome.summary, read_trace(output.with_name(output.name + ".batchradix") / "trace")


@pytest.mark.parametrize(
    ("shows", "changes"),
    [
        ("cached_tokens", {}),
        ("preemptions", {"engine": {"kv_tokens": 60}}),
        ("computed_tokens", {"engine": {"prefix_cache": False}}),
        ("forced_tokens", {"schema": SCHEMA, "sampling": {"max_tokens": 60}}),
        (
            "drafted_tokens",
            {"schema": SCHEMA, "sampling": {"max_tokens": 60}, "engine": {"speculate": 4}},
        ),
        (
            "decode_steps",
            {"schema": {"enum": ["ab", "abd", "b"]}, "sampling": {"probabilities": True}},
        ),
        ("completion_tokens", {"schema": UNIQUE, "retries": 2, "sampling": {"max_tokens": 20}}),
    ],
    ids=["plain", "short-of-slots", "no-cache", "schema", "drafts", "scored", "retries"],
)
def test_the_steps_add_up_to_the_counters_of_the_summary(
    model: str, tmp_path: Path, shows: str, changes: dict[str, Any]
) -> None:
    summary, [run] = traced(model, tmp_path / "o.arrow", **changes)
    assert getattr(summary.usage, shows) > 0, "the run is no test of this"
    for name in COUNTERS:
        assert sum(run.steps[name].to_pylist()) == getattr(summary.usage, name), name
    assert max(run.steps["kv_tokens"].to_pylist()) <= summary.usage.peak_kv_tokens
    kinds = tokens_by_kind(run.steps)
    assert (sum(kinds.values()) == column(run.steps, "model_tokens")).all()
    if "retries" not in changes:
        assert sum(run.steps["finished_rows"].to_pylist()) == len(ROWS)
        [numbers] = figures([run])["runs"]
        assert numbers["predicted"]["distinct_tokens"] == numbers["computed_tokens"]
        if "engine" not in changes or "kv_tokens" not in changes["engine"]:
            assert numbers["predicted"]["cached_tokens"] == numbers["cached_tokens"]


def test_the_plan_of_the_trace_is_that_of_the_rows(model: str, tmp_path: Path) -> None:
    summary, [run] = traced(model, tmp_path / "o.arrow")
    facts, pieces = run.plan.facts, run.plan.pieces.to_pydict()
    assert facts["rows"] == len(ROWS)
    assert facts["distinct_tokens"] == summary.distinct_tokens == sum(pieces["distinct_tokens"])
    assert facts["planned_tokens"] == summary.prompt_tokens == sum(pieces["planned_tokens"])
    assert pieces["label"][0] == "a beginning, "
    assert sum(facts["bin_distinct_tokens"]) == facts["distinct_tokens"]


def test_a_stopped_run_that_goes_on_leaves_two_runs_of_all_rows_together(
    model: str, tmp_path: Path
) -> None:
    first, [_] = traced(model, tmp_path / "o.arrow", stop_after=14)
    assert 0 < first.rows < len(ROWS)
    second, runs = traced(model, tmp_path / "o.arrow")
    assert second.rows == len(ROWS)
    finished = [sum(run.steps["finished_rows"].to_pylist()) for run in runs]
    assert finished == [first.rows, len(ROWS) - first.rows]
    assert runs[1].plan.facts["rows"] == len(ROWS) - first.rows
    again, runs = traced(model, tmp_path / "o.arrow")
    assert len(runs) == 2, "a finished run has nothing to trace"
    assert again.resumed_rows == len(ROWS)


def test_nothing_is_traced_unless_asked_for(model: str, tmp_path: Path) -> None:
    output = OutputOptions(path=tmp_path / "o.arrow")
    pipeline.run(RunConfig(input=ROWS[:2], model=model, engine=EngineOptions(**ENGINE),
                           sampling=SamplingOptions(max_tokens=2), output=output))  # fmt: skip
    assert not (tmp_path / "o.arrow.batchradix" / "trace").exists()
    with pytest.raises(OptionError, match="give an output file"):
        OutputOptions(trace=True)


def test_a_trace_that_cannot_be_written_costs_no_answer(model: str, tmp_path: Path) -> None:
    folder = tmp_path / "o.arrow.batchradix"
    folder.mkdir()
    (folder / "trace").write_text("in the way")
    warnings: list[str] = []

    class Listening(Silent):
        def warn(self, text: str) -> None:
            warnings.append(text)

    job = RunConfig(input=ROWS[:2], model=model, engine=EngineOptions(**ENGINE),
                    sampling=SamplingOptions(max_tokens=2),
                    output=OutputOptions(path=tmp_path / "o.arrow", trace=True))  # fmt: skip
    outcome = pipeline.run(job, progress=Listening())
    assert outcome.summary.ok == 2
    assert [text for text in warnings if text.startswith("no trace is written any more")]
