"""The parts for latent attention and experts hold on a CPU, and what they time can be called."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def parts() -> Iterator[ModuleType]:
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    try:
        yield __import__("gpu_parts_mla")
    finally:
        sys.path.remove(str(FOLDER))
        for name in set(sys.modules) - before:
            if name.startswith("gpu_"):
                del sys.modules[name]


@pytest.mark.parametrize("name", ["latent_store", "mla_attention", "moe_routing", "moe_gemm"])
def test_every_part_agrees_and_can_be_timed(parts, name):
    part = parts.MLA_KERNELS[name]
    measure = sys.modules["gpu_measure"]
    found = list(measure.compare_all(part.compare, torch.device("cpu")))
    assert found
    assert [one for one in found if not one.ok] == []
    calls = list(part.calls(torch.device("cpu"), 1 << 14))
    assert calls
    for call in calls:
        assert call.num_bytes > 0
        call.run()
