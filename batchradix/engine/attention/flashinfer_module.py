"""FlashInfer as the backends find it: whether it is there, its import, what its plans copy."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from batchradix.errors import OptionError

WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends
_DTYPES = (torch.bfloat16, torch.float16)


def missing_flashinfer(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why FlashInfer serves no model there, and what to do instead; None where it may."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "it needs a GPU of NVIDIA; use auto"
    if find_spec("flashinfer") is None:
        return "FlashInfer is not installed; run pip install 'batchradix[gpu]', or use triton"
    if not _has_kernels():
        return (
            "FlashInfer builds its kernels with nvcc, which is not there; install the CUDA "
            "toolkit, or use triton"
        )
    if dtype not in _DTYPES:
        name = str(dtype).removeprefix("torch.")
        return f"there is none for `dtype` {name}, only for bfloat16 and float16; use triton"
    if capability(device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or later; use triton"
    return None


def _has_kernels() -> bool:
    """Whether nvcc is where FlashInfer looks for it, or kernels that come built."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    if shutil.which("nvcc") is not None or Path(home, "bin", "nvcc").exists():
        return True
    if find_spec("flashinfer_jit_cache") is not None:
        return True
    spec = find_spec("flashinfer")
    folders = spec.submodule_search_locations if spec is not None else None
    return any(Path(folder, "data", "aot").is_dir() for folder in folders or ())


def import_flashinfer() -> Any:
    """The module. Raises `OptionError` where an installation is broken."""
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise OptionError(
            f"`attention` flashinfer cannot be used: FlashInfer does not import ({error}); run "
            f"pip install 'batchradix[gpu]', or use triton"
        ) from error


@contextmanager
def building_kernels() -> Iterator[None]:
    """Raises `OptionError` where FlashInfer fails to build a kernel on its first use."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (OSError, RuntimeError) as error:
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise OptionError(
            f"`attention` flashinfer cannot be used: FlashInfer did not build its kernels "
            f"({why[0]}); install the CUDA toolkit with nvcc, or use triton"
        ) from error


def capability(device: torch.device) -> tuple[int, int]:
    """Of a GPU; (0, 0) of a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def for_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array in memory of the host from which a device copies without anyone waiting."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory() if device.type == "cuda" else tensor


class PlanCopies:
    """Wrappers plan in page-locked memory of their own, from which the device copies in its time:
    nothing may be planned anew before it has."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._done: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Call it before wrappers plan."""
        if self._done is not None:
            self._done.synchronize()

    def note(self) -> None:
        """Call it when they have."""
        if self._is_cuda:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()
