"""Which device the engine runs on, what it is called, and what it has free."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from batchradix.errors import OptionError


def find_device(wanted: str) -> tuple[str, int | None]:
    """The device for an option of ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Returns its name and its free memory in bytes (None for the CPU). Raises `OptionError`
    when a device is asked for that is not there.
    """
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return "cpu", None
    if wanted.split(":")[0] != "cuda":
        raise OptionError(f"`device` must be auto, cpu, cuda or cuda:N, not {wanted!r}")
    if not torch.cuda.is_available():
        raise OptionError(f"`device` {wanted} was asked for, but torch finds no CUDA here; use cpu")
    try:
        index = int(wanted.partition(":")[2] or 0)
        free, _ = torch.cuda.mem_get_info(index)
    except (ValueError, RuntimeError, AssertionError) as error:
        raise OptionError(
            f"there is no device {wanted}; this machine has {torch.cuda.device_count()}"
        ) from error
    return f"cuda:{index}", free


def open_device(name: str) -> torch.device:
    """The device of a name that `find_device` gave; raises `OptionError` where it fails."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # where Triton launches kernels
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise OptionError(
            f"the `device` {name!r} cannot be used here ({reason}); use cpu"
        ) from error
    return device


def processor_name(device: torch.device) -> str:
    """What the maker calls the GPU, or the CPU of this machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except (OSError, ValueError):
        pass
    return platform.processor() or platform.machine()
