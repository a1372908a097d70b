"""Workers on Ray give the table of one process, whatever happens to them."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import batchradix
from batchradix.config import EngineOptions, SamplingOptions

pytestmark = pytest.mark.dist
pytest.importorskip("ray")

WORDS = ["red", "green", "stone", "river", "cloud", "seven", "lamp", "tea", "42", "the", "of"]
MAX_TOKENS = 40


@pytest.fixture(scope="module")
def rows() -> list[str]:
    """240 prompts about 12 documents under one instruction, in mixed order."""
    draw = random.Random(4)
    documents = [" ".join(draw.choices(WORDS, k=20)) for _ in range(12)]
    found = [
        f"Answer from the text. {documents[number % 12]}. {' '.join(draw.choices(WORDS, k=3))}?"
        for number in range(240)
    ]
    draw.shuffle(found)
    return found


@pytest.fixture(scope="module")
def model(tiny_model_folder: Any) -> str:
    return str(tiny_model_folder("random", family="llama", seed=7))


@pytest.fixture
def job(rows: list[str], model: str, tmp_path: Path) -> list[Any]:
    """The arguments of a run but for its output and workers."""
    path = tmp_path / "jobs.jsonl"
    path.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    return [path, "--model", model, "--dtype", "float32", "--device", "cpu", "--json",
            "--max-tokens", MAX_TOKENS, "--batch-size", 4, "--kv-tokens", 4000]  # fmt: skip


@pytest.fixture(scope="module")
def alone(rows: list[str], model: str) -> list[dict[str, Any]]:
    """The table of one process."""
    result = batchradix.run(
        [{"prompt": row} for row in rows],
        model=model,
        keep=[],
        sampling=SamplingOptions(max_tokens=MAX_TOKENS),
        engine=EngineOptions(dtype="float32", device="cpu", batch_size=4, kv_tokens=4000),
    )
    assert result.summary.ok == len(rows)
    return answers(result.to_arrow().to_pylist())


def answers(table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = ("row", "status", "text", "finish_reason", "prompt_tokens", "cached_tokens",
             "completion_tokens")  # fmt: skip
    return [{name: row[name] for name in names} for row in table]


def read(path: Path) -> list[dict[str, Any]]:
    return answers([json.loads(line) for line in path.read_text().splitlines()])


def test_two_workers_give_the_table_of_one_process(
    start: Callable[..., Any], job: list[Any], alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    output = tmp_path / "answers.jsonl"
    run = start(*job, "-o", output, "--workers", 2)
    summary = run.summary()
    assert read(output) == alone
    assert summary["ok"] == len(alone)
    computed = summary["distinct_tokens"] + summary["duplicated_tokens"]
    assert summary["computed_tokens"] == computed
    assert 0 < summary["duplicated_tokens"] < summary["distinct_tokens"] / 4
    assert not run.left()


def test_a_worker_that_is_killed_three_times_changes_no_answer(
    start: Callable[..., Any],
    until: Callable[..., Any],
    job: list[Any],
    alone: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    output = tmp_path / "answers.jsonl"
    run = start(*job, "-o", output, "--workers", 2)
    killed: set[int] = set()
    for _ in range(3):
        pids = until(lambda: set(run.workers()) - killed or run.process.poll() is not None)
        assert pids is not True, "the run ended before it could be disturbed"
        killed.add(pid := min(pids))
        os.kill(pid, signal.SIGKILL)
    summary = run.summary()
    assert read(output) == alone
    assert sum("was lost and replaced" in text for text in summary["warnings"]) >= 1
    assert not run.left()


def test_a_driver_that_is_killed_leaves_no_process_and_any_number_of_workers_goes_on(
    start: Callable[..., Any],
    until: Callable[..., Any],
    job: list[Any],
    alone: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    output = tmp_path / "answers.jsonl"
    run = start(*job, "-o", output, "--workers", 2)
    until(run.workers)
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    until(lambda: not run.left(), 150, run.left_in_words)  # Ray's agents take their time
    again = start(*job, "-o", output, "--workers", 1)
    summary = again.summary()
    assert read(output) == alone
    assert summary["duplicated_tokens"] == 0
    assert not again.left()


def test_a_signal_ends_workers_and_ray_too(
    start: Callable[..., Any], until: Callable[..., Any], job: list[Any], tmp_path: Path
) -> None:
    run = start(*job, "-o", tmp_path / "answers.jsonl", "--workers", 2)
    until(run.workers)
    os.kill(run.process.pid, signal.SIGTERM)
    code, _, err = run.end()
    assert code == 143, err
    assert "Traceback" not in err
    assert not run.left()
