"""The library's C kernels: where they are, on which instruction set, with which threads.

They are built at installation where a compiler is. Without them every operation has its form
in torch. Each folder declares the functions of its own ``cpu.c`` beside the code that calls
them; tensors go in as pointers, so what calls must keep them alive and contiguous as stated.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

import torch

__all__ = ["FLOATS", "KINDS", "Level", "function", "level", "library", "limit_level"]

# The element types of `rows.h`.
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
FLOATS = (torch.float32, torch.bfloat16)  # those that activations may have

# Another build of the same sources may stand in, one with sanitizers say.
_FILE = Path(os.environ.get("BATCHRADIX_NATIVE") or Path(__file__).parent.with_name("_native.so"))


class Level(IntEnum):
    """Instruction sets, each including those before it (`native.h`)."""

    PLAIN = 0
    AVX2 = 1
    AVX512 = 2
    AVX512_BF16 = 3
    AMX = 4


@cache
def library() -> ctypes.CDLL | None:
    """The C kernels, ready to be called; None where they were not built."""
    try:
        loaded = ctypes.CDLL(str(_FILE))
    except OSError:
        return None
    assert torch.get_num_threads() >= 1  # torch's OpenMP runtime is in the process now
    process = ctypes.CDLL(None)
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    if all(hasattr(process, name) for name in names):
        loaded.bx_use_openmp(
            *(ctypes.cast(getattr(process, name), ctypes.c_void_p) for name in names)
        )
    return loaded


def function(name: str, argtypes: Sequence[type]) -> Callable[..., Any] | None:
    """A C function that returns nothing, for pointers (int or None) and numbers; None where
    the C kernels were not built."""
    loaded = library()
    if loaded is None:
        return None
    found: Callable[..., Any] = getattr(loaded, name)
    found.argtypes, found.restype = list(argtypes), None  # type: ignore[attr-defined]
    return found


def level() -> Level | None:
    """The instruction set that the C kernels use; None without them."""
    loaded = library()
    return None if loaded is None else Level(loaded.bx_current_level())


def limit_level(most: Level) -> Level | None:
    """Lets the C kernels use no better instruction set than ``most``; returns what they use.

    For tests and comparisons; holds for the whole process until it is called again.
    """
    loaded = library()
    return None if loaded is None else Level(loaded.bx_limit_level(int(most)))
