"""Moving keys and values within a pool: two kernels, one to gather and one to scatter.

Programs run in no order, so slots that are both source and target go through a buffer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from batchradix_kernels.float8 import as_bytes

BLOCK_ELEMENTS = 4096


@triton.jit
def kv_copy_kernel(
    source,
    target,
    source_slots,
    target_slots,
    num_moves,
    source_plane_stride,
    target_plane_stride,
    GATHER: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """``GATHER``: targets are 0, 1, 2 …; otherwise sources are."""
    move = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    plane = tl.program_id(1).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    real = move < num_moves
    mask = real[:, None] & (e < HEAD_DIM)[None, :]
    if GATHER:
        read = tl.load(source_slots + move, mask=real, other=0)
        write = move
    else:
        read = move
        write = tl.load(target_slots + move, mask=real, other=0)
    from_ = plane * source_plane_stride + read.to(tl.int64)[:, None] * HEAD_DIM + e[None, :]
    to = plane * target_plane_stride + write.to(tl.int64)[:, None] * HEAD_DIM + e[None, :]
    tl.store(target + to, tl.load(source + from_, mask=mask), mask=mask)


def kv_move_triton(pool: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Same contract as `kv_move`, for a pool that Triton serves."""
    assert pool.is_contiguous()
    assert sources.shape == targets.shape
    assert sources.dtype == targets.dtype == torch.int32
    pool = as_bytes(pool)
    num_moves = len(sources)
    if num_moves == 0:
        return
    num_slots, head_dim = pool.shape[-2:]
    num_planes = pool.numel() // (num_slots * head_dim)
    buffer = pool.new_empty((num_planes, num_moves, head_dim))
    block_e = triton.next_power_of_2(head_dim)
    block_n = max(1, min(BLOCK_ELEMENTS // block_e, triton.next_power_of_2(num_moves)))
    strides = (num_slots * head_dim, num_moves * head_dim)
    for gather in (True, False):
        from_, to = (pool, buffer) if gather else (buffer, pool)
        kv_copy_kernel[(triton.cdiv(num_moves, block_n), num_planes)](
            from_,
            to,
            sources,
            targets,
            num_moves,
            *(strides if gather else strides[::-1]),
            GATHER=gather,
            HEAD_DIM=head_dim,
            BLOCK_N=block_n,
            BLOCK_E=block_e,
        )
