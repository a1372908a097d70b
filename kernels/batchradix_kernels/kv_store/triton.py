"""Writing new keys and values to a pool: a program a key head and block of tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from batchradix_kernels.float8 import LARGEST

BLOCK_ELEMENTS = 4096  # of keys, and as many of values, in a program of four warps
_LARGEST = tl.constexpr(LARGEST)


@triton.jit
def _stored(x, DTYPE: tl.constexpr):
    """As `float8.stored`."""
    if tl.float8e4nv == DTYPE:
        x = x.to(tl.float32)
        x = tl.where(x > _LARGEST, _LARGEST, tl.where(x < -_LARGEST, -_LARGEST, x))  # NaN stays
    return x.to(DTYPE)


@triton.jit
def kv_store_kernel(
    k,
    v,
    slots,
    pool,
    num_tokens,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    num_slots,
    HEAD_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    slot = tl.load(slots + token, mask=token < num_tokens, other=-1)
    mask = (slot >= 0)[:, None] & (e < HEAD_DIM)[None, :]
    at = (head * num_slots + slot)[:, None] * HEAD_DIM + e[None, :]
    values = pool + tl.num_programs(1).to(tl.int64) * num_slots * HEAD_DIM
    rows = token.to(tl.int64)[:, None]
    new = tl.load(k + rows * k_token_stride + head * k_head_stride + e[None, :], mask=mask)
    tl.store(pool + at, _stored(new, pool.dtype.element_ty), mask=mask)
    new = tl.load(v + rows * v_token_stride + head * v_head_stride + e[None, :], mask=mask)
    tl.store(values + at, _stored(new, pool.dtype.element_ty), mask=mask)


def kv_store_triton(
    k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, pool: torch.Tensor
) -> None:
    """Same contract as `kv_store`, for a pool that Triton serves; one kernel."""
    num_tokens, num_kv_heads, head_dim = k.shape
    assert v.shape == k.shape
    assert pool.shape[:2] == (2, num_kv_heads)
    assert pool.shape[3] == head_dim
    assert pool.is_contiguous()
    assert k.stride(2) == v.stride(2) == 1
    assert slots.dtype == torch.int32
    if num_tokens == 0:
        return
    block_e = triton.next_power_of_2(head_dim)
    block_t = max(1, min(BLOCK_ELEMENTS // block_e, triton.next_power_of_2(num_tokens)))
    kv_store_kernel[(triton.cdiv(num_tokens, block_t), num_kv_heads)](
        k,
        v,
        slots,
        pool,
        num_tokens,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        pool.shape[2],
        HEAD_DIM=head_dim,
        BLOCK_T=block_t,
        BLOCK_E=block_e,
    )
