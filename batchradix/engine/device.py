"""Which device the engine runs on, and what it has free."""

from __future__ import annotations

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
