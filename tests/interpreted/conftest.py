"""Tests of Triton kernels in Triton's interpreter, on the CPU.

The interpreter is chosen for a process when kernels are imported, so these modules are collected
with ``TRITON_INTERPRET=1`` only; `tests/kernels/test_interpreted.py` runs them so.
"""

from __future__ import annotations

import pytest
import torch

from batchradix_kernels.triton_runtime import interprets, serves

collect_ignore_glob = [] if interprets() else ["test_*.py"]


@pytest.fixture(autouse=True)
def interpreter() -> None:
    """These tests prove nothing where the kernels do not run."""
    assert serves(torch.device("cpu"))
