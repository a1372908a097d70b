"""Memory that runs out: a sentence with the remedy, and nothing committed is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from batchradix.engine.grammar.child import CompilerChild
from batchradix.engine.model_runner import ModelRunner
from batchradix.engine.models.batch import Batch
from batchradix.engine.models.llama import Llama
from batchradix.engine.sampling import Sampler
from batchradix.report import machine
from batchradix.sink import shards

Run = Callable[..., tuple[int, str, str]]
HARD = '{"type": "object", "additionalProperties": {"$ref": "#"}}'  # not compiled in this process


@pytest.fixture
def job(
    tmp_path: Path, tiny_model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> list[object]:
    monkeypatch.setattr(shards, "COMMIT_ROWS", 2)
    rows = [{"id": str(i), "prompt": f"{i} c"} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["run", tmp_path / "rows.jsonl", "--model", tiny_model_folder("markov"), "--json"]
    return [*words, "--max-tokens", 3, "--batch-size", 2, "-o", tmp_path / "out.arrow"]


def failing(number: int, error: Exception, function: Any) -> Any:
    """A function that fails from its ``number``-th call on."""
    left = [number]

    def call(*args: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] <= 0:
            raise error
        return function(*args, **named)

    return call


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate "
                     "memory: you tried to allocate 8589934592 bytes."),
        RuntimeError("could not create a primitive"),
        MemoryError(),
    ],
    ids=["device", "host", "onednn", "numpy"],
)  # fmt: skip
@pytest.mark.parametrize(
    ("owner", "name", "said"),
    [
        (ModelRunner, "_run", "in a step of "),
        (Sampler, "sample", "while choosing the tokens of 2 rows"),
    ],
)
def test_memory_that_runs_out_in_a_step_ends_the_run_and_keeps_what_was_committed(
    job: list[object],
    batchradix: Run,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    owner: type,
    name: str,
    said: str,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing(8, error, getattr(owner, name)))
        code, _, shown = batchradix(*job)
    assert code == 3
    [line] = [line for line in shown.splitlines() if line.startswith("error: ")]
    assert f"memory ran out {said}" in line
    assert "; lower --" in line
    assert "--batch-size" in line
    assert "Traceback" not in shown
    code, output, shown = batchradix(*job)
    assert code == 0
    assert "did not come to its end" not in shown
    assert json.loads(output)["resumed_rows"] == 4
    output_file = job[-1]
    assert isinstance(output_file, Path)
    assert pl.read_ipc(output_file)["text"].to_list() == ["def"] * 8


def test_memory_for_less_than_a_step_is_warned_about_once_and_costs_no_row(
    job: list[object], batchradix: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Llama.forward

    def small(model: Llama, batch: Batch) -> torch.Tensor:
        if len(batch.token_ids) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return forward(model, batch)

    monkeypatch.setattr(Llama, "forward", small)
    code, output, shown = batchradix(*job)
    assert code == 0
    [line] = [line for line in shown.splitlines() if "memory ran out" in line]
    assert line.startswith("warning: memory ran out in a forward pass of ")
    assert "lower --prefill-tokens, --batch-size or --kv-tokens" in line
    summary = json.loads(output)
    assert line.removeprefix("warning: ") in summary["warnings"]
    assert summary["ok"] == 8
    assert summary["recomputed_tokens"] == 0
    output_file = job[-1]
    assert isinstance(output_file, Path)
    assert pl.read_ipc(output_file)["text"].to_list() == ["def"] * 8


def test_a_grammar_process_that_the_kernel_kills_is_said_to_have_been_killed(
    job: list[object], batchradix: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = CompilerChild._send

    def killed(child: CompilerChild, request: dict[str, Any]) -> None:
        send(child, request)
        if "source" in request:
            os.kill(child.pid, signal.SIGKILL)

    monkeypatch.setattr(CompilerChild, "_send", killed)
    code, _, shown = batchradix(*job, "--schema", HARD)
    assert code == 2
    assert "was killed, most likely because the machine ran out of memory" in shown
    assert "--grammar-memory" in shown
    assert "Traceback" not in shown


def test_the_run_after_one_that_was_killed_says_so(
    job: list[object], batchradix: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert batchradix(*job)[0] == 0
    lock = tmp_path / "out.arrow.batchradix" / "lock"
    assert lock.read_text() == ""  # who ends takes its name out
    for num_kills, said in ((0, "it was killed, or its machine stopped"), (2, "memory ran out")):
        monkeypatch.setattr("batchradix.pipeline.job.num_oom_kills", lambda num=num_kills: num)
        lock.write_text('{"pid": 5, "host": "h"}')
        code, output, shown = batchradix(*job)
        assert code == 0
        assert "(process 5 on host h) did not come to its end: " in shown
        assert said in shown
        assert shown.startswith("warning: ")
        assert "did not come to its end" in json.loads(output)["warnings"][0]


def test_kills_for_want_of_memory_are_read_from_the_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    assert machine.num_oom_kills() == 0
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 3\noom_kill 2\n")
    assert machine.num_oom_kills() == 2


def test_more_disk_for_keys_and_values_than_there_is_is_refused_and_than_is_free_warned_about(
    job: list[object], batchradix: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, shown = batchradix(*job, "--kv-disk", "1e16TiB")
    assert code == 2
    assert "error: --kv-disk is 10,240,000,000,000,000,000.0 GiB, and the whole disk of " in shown
    usage = shutil.disk_usage("/")._replace(total=2**40, free=2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    assert batchradix(*job, "--kv-disk", "1025GiB")[0] == 2
    code, output, shown = batchradix(*job, "--kv-disk", "3GiB")
    assert code == 0
    [warning] = json.loads(output)["warnings"]
    assert "--kv-disk may take 3.0 GiB, and 1.0 GiB of " in warning
    assert f"warning: {warning}\n" in shown


def test_a_pool_larger_than_the_free_memory_is_warned_about(
    job: list[object], batchradix: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchradix.pipeline.planned.free_memory_bytes", lambda: 2**16)
    code, output, shown = batchradix(*job, "--kv-tokens", 300)
    assert code == 0
    assert "warning: the weights and room for 300 tokens of keys and values take " in shown
    assert "lower --kv-tokens" in json.loads(output)["warnings"][0]
