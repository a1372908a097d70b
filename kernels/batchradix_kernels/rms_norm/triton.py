"""Normalisation behind a residual in Triton: a program a row, which it keeps in registers.

The sum with the residual is rounded to the dtype of ``x``, as it is stored; all else is float32
and rounded once. A row depends on itself alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["num_warps_of", "rms_norm_kernel", "rms_norm_triton"]

_ELEMENTS_A_WARP = 512
_MAX_WIDTH = 32_768


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    width,
    epsilon,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * width
    i = tl.arange(0, BLOCK)
    inside = i < width
    row = tl.load(x + first + i, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        added = tl.load(residual + first + i, mask=inside, other=0.0)
        row = (row.to(tl.float32) + added.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(x + first + i, row, mask=inside)
    row = row.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(row * row, axis=0) / width + epsilon)
    scaled = row * factor * tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + first + i, scaled.to(out.dtype.element_ty), mask=inside)


def num_warps_of(block: int) -> int:
    """Warps of a program that keeps ``block`` elements, a power of two, in registers."""
    return min(16, max(1, block // _ELEMENTS_A_WARP))


def rms_norm_triton(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Same contract as `rms_norm`, for tensors that Triton serves; rows of at most 32,768."""
    num_rows, width = x.shape
    assert width <= _MAX_WIDTH
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert residual is None or (residual.is_contiguous() and residual.shape == x.shape)
    out = torch.empty_like(x)
    if num_rows == 0:
        return out
    block = triton.next_power_of_2(width)
    rms_norm_kernel[(num_rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        width,
        epsilon,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        num_warps=num_warps_of(block),
    )
    return out
