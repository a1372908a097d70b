"""What `benchmarks/gpu_check.py` does with Triton alone, in the interpreter and in little."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu() -> Iterator[SimpleNamespace]:
    path = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    try:
        names = ("measure", "attention", "latents", "engine")
        yield SimpleNamespace(**{name: import_module(f"gpu_{name}") for name in names})
    finally:
        sys.path[:] = path


def test_pieces_in_slots_and_in_pages_agree_with_their_log_sum_exps(gpu, monkeypatch):
    monkeypatch.setattr(gpu.attention, "HEADS", gpu.attention.HEADS[1:2])
    monkeypatch.setattr(gpu.attention, "PAGE_SIZES", (1, 4))
    monkeypatch.setattr(gpu.attention, "PAGED_HEADS", [(4, 2, 32)] * 2)
    setting = gpu.measure.Setting(device=torch.device("cpu"))
    said = list(gpu.attention.compare(setting, "bfloat16"))
    found = [one for one in said if isinstance(one, gpu.measure.Found)]
    assert [one for one in found if not one.ok] == []
    triton = [one.label for one in found if "triton" in one.label]
    assert sum("pages of 4" in label for label in triton) == 10
    assert sum("log-sum-exps" in label for label in triton) == 10
    assert sum("pool after" in label for label in triton) == 5


def test_latent_attention_agrees_in_each_dtype(gpu, monkeypatch):
    monkeypatch.setattr(gpu.latents, "COMPARED", gpu.latents.COMPARED[:1])
    some = [
        gpu.attention.decoding("decode", 3, 30, 9),
        gpu.attention.prefilling("prefill behind a prefix", 17, 13),
    ]
    monkeypatch.setattr(gpu.latents, "cases", lambda is_small: some)
    said = list(gpu.latents.compare(gpu.measure.Setting(device=torch.device("cpu"))))
    found = [one for one in said if isinstance(one, gpu.measure.Found)]
    assert [one for one in found if not one.ok] == []
    assert sum(one.label.startswith("triton") for one in found) == 3 * len(some)


def test_the_engine_with_triton_answers_as_transformers(gpu, monkeypatch):
    monkeypatch.setattr(gpu.engine, "FAMILIES", ["Qwen2"])
    wanted = ("as it is", "overlap on")
    monkeypatch.setattr(
        gpu.engine, "VARIANTS", {name: gpu.engine.VARIANTS[name] for name in wanted}
    )
    monkeypatch.setattr(gpu.engine, "odd_rows", lambda num, vocab: rows(gpu, vocab))
    said = list(gpu.engine.tiny(gpu.measure.Setting(device=torch.device("cpu")), "triton"))
    assert [(one.ok, one.error) for one in said] == [(True, None)] * 2


def rows(gpu: SimpleNamespace, vocab: int) -> object:
    some = import_module("gpu_rows").odd_rows(7, vocab)
    return type(some)(some.prompts, [3] * 7)
