"""Tests of Triton kernels in Triton's interpreter, on the CPU.

The interpreter is chosen for a process when kernels are imported, so these modules are collected
with ``TRITON_INTERPRET=1`` only; `tests/kernels/test_interpreted.py` runs them so.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from batchradix_kernels.triton_runtime import interprets, serves

HARNESS = Path(__file__).parents[1] / "e2e" / "conftest.py"

collect_ignore_glob = [] if interprets() else ["test_*.py"]


@pytest.fixture(autouse=True)
def interpreter() -> None:
    """These tests prove nothing where the kernels do not run."""
    assert serves(torch.device("cpu"))


@pytest.fixture(scope="module")
def harness() -> ModuleType:
    """Engines, jobs and runs of the tests end to end."""
    spec = importlib.util.spec_from_file_location("e2e_harness", HARNESS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
