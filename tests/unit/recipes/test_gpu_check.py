"""The check for machines with a GPU: its parts hold on a CPU, and its report hides nothing."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

FOLDER = Path(__file__).parents[3] / "benchmarks"
CPU = torch.device("cpu")
EMPTY = {"checks": [], "timings": [], "error": None}


@pytest.fixture
def gpu() -> Iterator[SimpleNamespace]:
    path = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    try:
        yield SimpleNamespace(check=__import__("gpu_check"), parts=__import__("gpu_parts"))
    finally:
        sys.path[:] = path
        for name in ("gpu_check", "gpu_parts"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["rms_norm", "swiglu", "rope", "rope_delta", "masked_sampling"])
def test_each_part_agrees_and_is_timed_on_a_cpu(gpu, name, monkeypatch):
    part = gpu.parts.PARTS[name]
    monkeypatch.setattr(gpu.parts, "REPEAT", 1)
    some = gpu.parts.Part(
        lambda device, dtype: itertools.islice(part.compare(device, dtype), 7), part.calls
    )
    found = list(gpu.parts.check(some, CPU))
    assert len(found) >= 9
    assert [one for one in found if not one.ok] == []
    timed = list(gpu.parts.time_part(some, CPU))
    assert timed
    assert all(one.us > 0 for one in timed)
    assert timed[0].gbs > 0


def test_the_ceilings_are_rates(gpu, monkeypatch):
    monkeypatch.setattr(gpu.parts, "REPEAT", 1)
    measured = gpu.parts.ceilings(CPU)
    assert measured["copy_gbs"] > 0
    assert measured["matmul_tflops"] > 0


def test_a_wrong_kernel_is_found_and_ends_nothing(gpu):
    def compare(device, dtype):
        one = torch.ones(3, device=device, dtype=dtype)
        for label, actual in (("wrong", one + 1), ("broken", one * torch.nan), ("right", one)):
            yield gpu.parts.Comparison(label, actual, one.double(), gpu.parts.TOLERANCES[dtype])

    found = list(gpu.parts.check(gpu.parts.Part(compare, lambda device, n: iter(())), CPU))
    assert [one.ok for one in found] == [False, False, True] * 3
    assert "expected 1" in found[0].error
    assert found[0].label == "wrong float32"


def test_a_part_that_raises_is_reported_with_its_traceback(gpu, monkeypatch):
    def compare(device, dtype):
        raise ValueError("an illegal access")

    part = gpu.parts.Part(compare, lambda device, n: iter(()))
    monkeypatch.setitem(gpu.check.PARTS, "bad", part)
    result = gpu.check.run_part("bad", CPU)
    assert "Traceback" in result["error"]
    assert not gpu.check.is_good(result)
    assert gpu.check.report([result])[-1].strip() == "ValueError: an illegal access"


def test_a_process_that_dies_or_hangs_is_a_part_that_failed(gpu):
    dead = gpu.check.run_apart("no such part", CPU)
    assert dead["error"].startswith("exit code 2")
    hung = gpu.check.run_apart("swiglu", CPU, timeout_s=0.01)
    assert "not done after" in hung["error"]
    lines = gpu.check.report([dead, hung])
    assert [line for line in lines if line.startswith("FAILED")] == [
        "FAILED no such part",
        "FAILED swiglu",
    ]


def test_the_report_sets_kernels_beside_the_ceilings_and_names_what_failed(gpu):
    lines = gpu.check.report(
        [
            EMPTY | {"part": "ceilings", "ceilings": {"copy_gbs": 4000.0, "matmul_tflops": 700.0}},
            EMPTY
            | {
                "part": "swiglu",
                "checks": [
                    {"label": "3 × 7 float32", "ok": True, "error": None},
                    {"label": "3 × 7 float16", "ok": False, "error": "element 2 is 1"},
                ],
                "timings": [{"label": "rows", "us": 10.0, "gbs": 3000.0}],
            },
        ]
    )
    text = "\n".join(lines)
    assert "copy 4,000 GB/s, bfloat16 product 700.0 TFLOP/s" in text
    assert "3,000 GB/s, 75% of copy" in text
    assert "FAILED swiglu            1 of 2 comparisons agree" in text
    assert "3 × 7 float16: element 2 is 1" in text


def test_the_whole_runs_part_by_part_and_writes_a_file(gpu, tmp_path, capsys):
    out = tmp_path / "check.json"
    arguments = ["--device", "cpu", "--parts", "ceilings,rope_delta", "--out", str(out)]
    assert gpu.check.main(arguments) == 0
    written = json.loads(out.read_text())
    assert [part["part"] for part in written["parts"]] == ["ceilings", "rope_delta"]
    assert written["machine"]["torch"] == torch.__version__
    assert "9 of 9 comparisons agree" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_in_a_sentence(gpu, tmp_path, capsys):
    assert gpu.check.main(["--out", str(tmp_path / "check.json")]) == 2
    assert capsys.readouterr().err == gpu.check.NO_GPU + "\n"
    assert not list(tmp_path.iterdir())
