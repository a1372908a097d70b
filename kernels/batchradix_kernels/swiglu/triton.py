"""The gated activation in Triton: a program a part of a row, float32 inside and rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["BLOCK", "swiglu_kernel", "swiglu_triton"]

BLOCK = 1024  # elements of the result that a program of four warps makes


@triton.jit
def swiglu_kernel(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    gates = gate_up + row * 2 * width + i
    gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + width, mask=inside, other=0.0).to(tl.float32)
    falling = tl.exp(-tl.abs(gate))  # of the magnitude, which cannot overflow
    value = gate * tl.where(gate < 0.0, falling, 1.0) / (1.0 + falling) * up
    tl.store(out + row * width + i, value.to(out.dtype.element_ty), mask=inside)


def swiglu_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """Same contract as `swiglu`, for tensors that Triton serves."""
    num_rows, double_width = gate_up.shape
    width = double_width // 2
    assert gate_up.is_contiguous()
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid = (num_rows, triton.cdiv(width, BLOCK))
        swiglu_kernel[grid](gate_up, out, width, BLOCK=BLOCK, num_warps=4)
    return out
