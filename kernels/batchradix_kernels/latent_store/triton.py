"""Writing new latents and rope keys to a pool: a program a block of tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["latent_store_kernel", "latent_store_triton"]

BLOCK_ELEMENTS = 4096  # of latents in a program of four warps


@triton.jit
def latent_store_kernel(
    latents,
    ropes,
    slots,
    pool,
    num_tokens,
    latent_stride,
    rope_stride,
    LATENT_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = tl.load(slots + token, mask=token < num_tokens, other=-1)
    real = (slot >= 0)[:, None]
    row = token.to(tl.int64)[:, None]
    to = pool + slot.to(tl.int64)[:, None] * (LATENT_DIM + ROPE_DIM)
    c = tl.arange(0, BLOCK_C)[None, :]
    mask = real & (c < LATENT_DIM)
    new = tl.load(latents + row * latent_stride + c, mask=mask)
    tl.store(to + c, new.to(pool.dtype.element_ty), mask=mask)
    r = tl.arange(0, BLOCK_R)[None, :]
    mask = real & (r < ROPE_DIM)
    new = tl.load(ropes + row * rope_stride + r, mask=mask)
    tl.store(to + LATENT_DIM + r, new.to(pool.dtype.element_ty), mask=mask)


def latent_store_triton(
    latents: torch.Tensor, ropes: torch.Tensor, slots: torch.Tensor, pool: torch.Tensor
) -> None:
    """Same contract as `latent_store`, for a pool that Triton serves; one kernel."""
    num_tokens, latent_dim = latents.shape
    rope_dim = ropes.shape[1]
    assert len(ropes) == len(slots) == num_tokens
    assert pool.shape[1] == latent_dim + rope_dim
    assert pool.is_contiguous()
    assert latents.stride(1) == ropes.stride(1) == 1
    assert slots.dtype == torch.int32
    if num_tokens == 0:
        return
    block_c = triton.next_power_of_2(latent_dim)
    block_t = max(1, min(BLOCK_ELEMENTS // block_c, triton.next_power_of_2(num_tokens)))
    latent_store_kernel[(triton.cdiv(num_tokens, block_t),)](
        latents,
        ropes,
        slots,
        pool,
        num_tokens,
        latents.stride(0),
        ropes.stride(0),
        LATENT_DIM=latent_dim,
        ROPE_DIM=rope_dim,
        BLOCK_T=block_t,
        BLOCK_C=block_c,
        BLOCK_R=triton.next_power_of_2(rope_dim),
    )
