"""Rotary position embedding in Triton: a program some heads of a token, both halves of each.

Norms, angles and rotation are float32; a head is rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["heads_a_program", "rope_kernel", "rope_triton"]

_ELEMENTS_A_PROGRAM = 1024  # of one half, in four warps


@triton.jit
def rope_kernel(
    heads,
    cosines,
    sines,
    q_weight,
    k_weight,
    num_heads,
    num_q,
    num_qk,
    epsilon,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr,
    NORMALISED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    e = tl.arange(0, BLOCK_E)
    half = e < HALF
    mask = (head < num_qk)[:, None] & half[None, :]
    at = heads + (token * num_heads + head[:, None]) * (2 * HALF) + e[None, :]
    low = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    if NORMALISED:
        squares = tl.sum(low * low + high * high, axis=1) / (2 * HALF)
        factor = (1.0 / tl.sqrt(squares + epsilon))[:, None]
        is_query = (head < num_q)[:, None]
        q_low = tl.load(q_weight + e, mask=half, other=0.0).to(tl.float32)[None, :]
        k_low = tl.load(k_weight + e, mask=half, other=0.0).to(tl.float32)[None, :]
        q_high = tl.load(q_weight + HALF + e, mask=half, other=0.0).to(tl.float32)[None, :]
        k_high = tl.load(k_weight + HALF + e, mask=half, other=0.0).to(tl.float32)[None, :]
        low = low * factor * tl.where(is_query, q_low, k_low)
        high = high * factor * tl.where(is_query, q_high, k_high)
    cosine = tl.load(cosines + token * HALF + e, mask=half, other=0.0)[None, :]
    sine = tl.load(sines + token * HALF + e, mask=half, other=0.0)[None, :]
    kind: tl.constexpr = heads.dtype.element_ty
    tl.store(at, (low * cosine - high * sine).to(kind), mask=mask)
    tl.store(at + HALF, (high * cosine + low * sine).to(kind), mask=mask)


def heads_a_program(num_heads: int, block_e: int) -> int:
    """A power of two: as many heads of ``2 * block_e`` elements as registers hold well."""
    most = max(1, _ELEMENTS_A_PROGRAM // block_e)
    return int(min(most, triton.next_power_of_2(max(1, num_heads))))


def rope_triton(
    heads: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    num_q: int,
    num_k: int,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> None:
    """Same contract as `rope`, for tensors that Triton serves."""
    num_tokens, num_heads, head_dim = heads.shape
    num_rotated = num_q + num_k
    half = head_dim // 2
    assert heads.is_contiguous()
    assert cosines.is_contiguous()
    assert sines.is_contiguous()
    assert cosines.shape == sines.shape == (num_tokens, half)
    if num_tokens == 0 or num_rotated == 0:
        return
    q_weight, k_weight, epsilon = norms or (heads, heads, 0.0)
    block_e = triton.next_power_of_2(half)
    block_h = heads_a_program(num_rotated, block_e)
    rope_kernel[(num_tokens, triton.cdiv(num_rotated, block_h))](
        heads,
        cosines,
        sines,
        q_weight,
        k_weight,
        num_heads,
        num_q,
        num_rotated,
        epsilon,
        HALF=half,
        BLOCK_H=block_h,
        BLOCK_E=block_e,
        NORMALISED=norms is not None,
        num_warps=4,
    )
