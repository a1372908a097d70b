"""The benchmark's own parts: its job is the same every time, and its gate finds wrong answers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"
MODULES = ("workloads", "peers", "measure", "structured")


@pytest.fixture
def benchmark() -> Iterator[SimpleNamespace]:
    """The modules of the folder, which are scripts and import each other by plain names."""
    path = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    try:
        yield SimpleNamespace(**{name: __import__(name) for name in MODULES})
    finally:
        sys.path[:] = path
        for name in MODULES:
            sys.modules.pop(name, None)


def test_a_workload_is_the_same_every_time_and_its_rows_differ_only_after_the_document(
    benchmark: SimpleNamespace,
) -> None:
    shared_documents = benchmark.workloads.shared_documents
    job = shared_documents(60, num_documents=6)
    again = shared_documents(60, num_documents=6)
    assert (job.digest, job.prompts) == (again.digest, again.prompts)
    assert job.digest != shared_documents(60, num_documents=5).digest
    assert len(set(job.prompts)) == 60
    beginnings = [prompt.split("\n\nReader ")[0] for prompt in job.prompts]
    assert {beginnings.count(text) for text in beginnings} == {10}
    assert all(text.startswith(benchmark.workloads.INSTRUCTION) for text in beginnings)


def test_a_subset_is_spread_over_the_job(benchmark: SimpleNamespace) -> None:
    job = benchmark.workloads.shared_documents(40, num_documents=4)
    assert job.subset(4).prompts == job.prompts[::10]
    assert len(job.subset(3).prompts) == 3
    assert job.subset(100).prompts == job.prompts


def test_more_documents_than_the_text_holds_are_refused(benchmark: SimpleNamespace) -> None:
    with pytest.raises(SystemExit, match="ask for fewer documents"):
        benchmark.workloads.passages(100_000, 2000)


def test_the_worked_examples_of_the_extraction_keep_to_its_schema(
    benchmark: SimpleNamespace,
) -> None:
    job = benchmark.workloads.extraction(60)
    assert len(set(job.prompts)) == 60
    assert len(job.schema["properties"]) == 6
    examples = re.findall(r"^Answer: (.*)$", benchmark.workloads.EXTRACTION, re.MULTILINE)
    assert len(examples) == 4
    for example in examples:
        value = json.loads(example)
        jsonschema.validate(value, job.schema)
        assert list(value) == list(job.schema["properties"])
        assert example == json.dumps(value, separators=(",", ":"))


def test_the_classification_has_eight_topics_and_as_many_passages_as_asked_for(
    benchmark: SimpleNamespace,
) -> None:
    job = benchmark.workloads.classification(256)
    assert len(set(job.prompts)) == job.num_rows == 256
    assert len(set(job.schema["properties"]["topic"]["enum"])) == 8


@pytest.mark.parametrize(
    ("answers", "gaps", "num_wrong", "num_ties"),
    [
        ([[1, 2, 3]], [[1.0, 1.0, 1.0]], 0, 0),
        ([[1, 9, 9]], [[1.0, 0.5, 1.0]], 1, 0),
        ([[1, 9, 9]], [[1.0, 0.0005, 1.0]], 0, 1),
        ([[1, 2]], [[1.0, 1.0, 0.5]], 1, 0),
        ([[1, 2, 3, 4]], [[1.0, 1.0, 1.0]], 1, 0),
    ],
)
def test_the_gate_takes_equal_answers_and_ties_and_nothing_else(
    benchmark: SimpleNamespace,
    answers: list[list[int]],
    gaps: list[list[float]],
    num_wrong: int,
    num_ties: int,
) -> None:
    measurement = benchmark.peers.Measurement
    oracle = measurement(system="oracle", prompt_tokens=5, answers=[[1, 2, 3]], gaps=gaps)
    ours = measurement(system="ours", prompt_tokens=5, answers=answers)
    wrong, ties = benchmark.measure.disagreements(ours, oracle)
    assert (len(wrong), ties) == (num_wrong, num_ties)


def test_the_gate_finds_other_prompt_tokens(benchmark: SimpleNamespace) -> None:
    measurement = benchmark.peers.Measurement
    oracle = measurement(system="oracle", prompt_tokens=5, answers=[[1]], gaps=[[1.0]])
    ours = measurement(system="ours", prompt_tokens=6, answers=[[1]])
    wrong, _ = benchmark.measure.disagreements(ours, oracle)
    assert wrong == ["prompts have 6 tokens, not 5"]


def test_rates_are_of_the_median_run(benchmark: SimpleNamespace) -> None:
    def run(seconds: float) -> object:
        return benchmark.peers.Measurement(
            system="x", rows=10, prompt_tokens=400, computed_tokens=100, run_s=seconds
        )

    rates = benchmark.measure.rates([run(9.0), run(1.0), run(2.0)])
    assert (rates["median_run_s"], rates["rows_per_s"]) == (2.0, 5.0)
    assert (rates["prompt_tokens_per_s"], rates["computed_share"]) == (200.0, 0.25)
    assert rates["run_s"] == [9.0, 1.0, 2.0]


@pytest.mark.model
@pytest.mark.timeout(900)
def test_a_small_run_passes_its_gate_and_writes_its_record(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    sizes = {"rows": 8, "documents": 2, "new-tokens": 4, "peer-rows": 2, "gate-rows": 1}
    options = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
    options += ["--dtype", "float32"]  # CPUs without bfloat16 take minutes otherwise
    done = subprocess.run(
        [sys.executable, str(FOLDER / "run.py"), *options, "--out", str(out)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text(encoding="utf-8"))
    ours, peer = record["systems"]["batchradix"], record["systems"]["transformers"]
    assert (ours["rows"], peer["rows"]) == (8, 2)
    assert ours["computed_tokens"] == ours["distinct_tokens"] < ours["prompt_tokens"]
    assert (ours["output_tokens"], peer["output_tokens"]) == (32, 8)
    assert record["gate"]["rows"] == 1
    assert record["prefill"]["share_of_ceiling"] > 0


@pytest.mark.model
@pytest.mark.timeout(900)
def test_shortcuts_cost_fewer_decode_steps_than_none(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    options = ["--workload", "structured-6-fields", "--rows", "4", "--enum-rows", "4"]
    options += ["--dtype", "float32"]
    done = subprocess.run(
        [sys.executable, str(FOLDER / "run.py"), *options, "--out", str(out)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    workloads = json.loads(out.read_text(encoding="utf-8"))["workloads"]
    for name, numbers in workloads.items():
        on, off = numbers["modes"]["on"], numbers["modes"]["off"]
        assert on["statuses"] == off["statuses"] == {"ok": 4}, name
        assert on["sampled_tokens"] + on["forced_tokens"] == on["completion_tokens"]
        assert off["forced_tokens"] == 0
        assert on["decode_steps"] < off["decode_steps"] / 2
        assert 0 <= on["decode_s"] <= on["answer_s"] < on["total_s"]
