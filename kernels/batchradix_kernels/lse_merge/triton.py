"""Merging partial attention: a program a query and block of heads, over the query's parts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_ELEMENTS = 2048  # of the sums that a program of four warps keeps in registers


@triton.jit
def merge_parts_kernel(
    outputs,
    lses,
    offsets,
    parts,
    out,
    out_lse,
    sinks,
    num_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr,
    WITH_LSE: tl.constexpr,
    WITH_SINKS: tl.constexpr,
):
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    e = tl.arange(0, BLOCK_E)
    real = head < num_heads
    mask = real[:, None] & (e < HEAD_DIM)[None, :]
    at = head[:, None] * HEAD_DIM + e[None, :]
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    sums = tl.zeros([BLOCK_H, BLOCK_E], tl.float32)
    for place in range(tl.load(offsets + query), tl.load(offsets + query + 1)):
        part = tl.load(parts + place).to(tl.int64) * num_heads
        lse = tl.load(lses + part + head, mask=real, other=float("-inf"))
        output = tl.load(outputs + part * HEAD_DIM + at, mask=mask, other=0.0)
        higher = tl.maximum(top, lse)
        base = tl.where(higher == float("-inf"), 0.0, higher)  # exp of -inf - -inf is NaN
        kept = tl.exp(top - base)
        weight = tl.exp(lse - base)
        total = total * kept + weight
        sums = sums * kept[:, None] + output * weight[:, None]
        top = higher
    divisor = tl.where(total == 0.0, 1.0, total)
    if WITH_SINKS:
        sink = tl.load(sinks + head, mask=real, other=0.0)
        merged = sums / (divisor + tl.exp(sink - top))[:, None]
    else:
        merged = sums / divisor[:, None]
    tl.store(out + query * num_heads * HEAD_DIM + at, merged.to(out.dtype.element_ty), mask=mask)
    if WITH_LSE:
        tl.store(out_lse + query * num_heads + head, top + tl.log(divisor), mask=real)


def merge_parts_triton(
    outputs: torch.Tensor,
    lses: torch.Tensor,
    offsets: torch.Tensor,
    parts: torch.Tensor,
    out: torch.Tensor,
    out_lse: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Same contract as `merge_parts`, for tensors that Triton serves; one kernel."""
    num_queries, num_heads, head_dim = out.shape
    assert outputs.shape[1:] == (num_heads, head_dim)
    assert lses.shape == outputs.shape[:2]
    assert outputs.dtype == lses.dtype == torch.float32
    assert offsets.dtype == parts.dtype == torch.int32
    assert len(offsets) == num_queries + 1
    assert outputs.is_contiguous()
    assert lses.is_contiguous()
    assert out.is_contiguous()
    if num_queries == 0:
        return
    block_e = triton.next_power_of_2(head_dim)
    block_h = max(1, min(BLOCK_ELEMENTS // block_e, triton.next_power_of_2(num_heads)))
    merge_parts_kernel[(num_queries, triton.cdiv(num_heads, block_h))](
        outputs,
        lses,
        offsets,
        parts,
        out,
        lses if out_lse is None else out_lse,
        lses if sinks is None else sinks,
        num_heads,
        HEAD_DIM=head_dim,
        BLOCK_H=block_h,
        BLOCK_E=block_e,
        WITH_LSE=out_lse is not None,
        WITH_SINKS=sinks is not None,
    )
