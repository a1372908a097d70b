"""Where Triton kernels run: on a GPU, or in Triton's interpreter on the CPU, for tests.

``TRITON_INTERPRET=1`` must be set before a module with kernels is imported, and holds for the
process. The interpreter is no proof of races, reads out of bounds or reduced precision.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch


@cache
def is_installed() -> bool:
    return find_spec("triton") is not None


def interprets() -> bool:
    """Whether kernels imported in this process run in the interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on", "yes", "y")


def serves(device: torch.device) -> bool:
    """Whether Triton kernels can run on tensors of this device, here."""
    if not is_installed():
        return False
    if device.type == "cuda":
        return not interprets()
    if device.type == "cpu" and interprets():
        _repair_conversions()
        return True
    return False


@cache
def _repair_conversions() -> None:
    """Makes the interpreter treat bfloat16 and float8e4nv as GPUs do (it is wrong in Triton 3.6 to
    3.9).

    It holds bfloat16 as 16-bit integers, which `tl.dot` multiplies, and cuts numbers off where
    ``.to(tl.bfloat16)`` rounds them to the nearest, ties to even. Of float8e4nv it reads NaN as
    480, and rounds to it without a carry.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain_dot, plain_cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl
    plain_convert = InterpreterBuilder.create_fp_to_fp
    # how torch calls a dtype, and what the interpreter holds it as
    held = {
        tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
        tl.bfloat16: (torch.bfloat16, torch.uint16),
        tl.float16: (torch.float16, torch.float16),
        tl.float32: (torch.float32, torch.float32),
    }

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return plain_dot(self, _widen(a), _widen(b), *others)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return plain_cast(self, source, target)
        rounded = torch.from_numpy(source.data.copy()).bfloat16()
        return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        kinds = source.dtype.scalar, target.scalar
        if tl.float8e4nv not in kinds:
            return plain_convert(self, source, target, rounding)
        (from_, _), (to, holder) = (held[kind] for kind in kinds)
        converted = torch.from_numpy(source.data.copy()).view(from_).float().to(to)
        return TensorHandle(converted.view(holder).numpy(), target.scalar)

    def _widen(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype("uint32") << 16).view("float32"), tl.float32)

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl
    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp
