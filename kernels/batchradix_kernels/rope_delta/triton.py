"""Moving stored keys to other positions in Triton: a program some slots of one layer and head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["rope_delta_kernel", "rope_delta_triton", "slots_a_program"]

_ELEMENTS_A_PROGRAM = 1024  # of one half, in four warps


@triton.jit
def rope_delta_kernel(
    keys,
    slots,
    cosines,
    sines,
    num_slots,
    num_heads,
    layer_stride,
    head_stride,
    slot_stride,
    angle_stride,
    HALF: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    layer = (tl.program_id(1) // num_heads).to(tl.int64)
    head = (tl.program_id(1) % num_heads).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    real = n < num_slots
    mask = real[:, None] & (e < HALF)[None, :]
    slot = tl.load(slots + n, mask=real, other=0).to(tl.int64)
    plane = keys + layer * layer_stride + head * head_stride
    at = plane + slot[:, None] * slot_stride + e[None, :]
    angle = n.to(tl.int64)[:, None] * angle_stride + e[None, :]
    low = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    cosine = tl.load(cosines + angle, mask=mask, other=0.0)
    sine = tl.load(sines + angle, mask=mask, other=0.0)
    kind: tl.constexpr = keys.dtype.element_ty
    tl.store(at, (low * cosine - high * sine).to(kind), mask=mask)
    tl.store(at + HALF, (high * cosine + low * sine).to(kind), mask=mask)


def slots_a_program(block_e: int) -> int:
    """A power of two: as many slots of ``2 * block_e`` elements as registers hold well."""
    return max(1, _ELEMENTS_A_PROGRAM // block_e)


def rope_delta_triton(
    keys: torch.Tensor, slots: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> None:
    """Same contract as `rope_delta`, for tensors that Triton serves."""
    num_layers, num_heads, _, head_dim = keys.shape
    num_slots, half = len(slots), head_dim // 2
    assert keys.stride(3) == 1
    assert slots.dtype == torch.int32
    assert cosines.shape == sines.shape == (num_slots, half)
    assert cosines.stride(1) == sines.stride(1) == 1
    assert cosines.stride(0) == sines.stride(0)
    if num_slots == 0:
        return
    block_e = triton.next_power_of_2(half)
    block_n = slots_a_program(block_e)
    rope_delta_kernel[(triton.cdiv(num_slots, block_n), num_layers * num_heads)](
        keys,
        slots,
        cosines,
        sines,
        num_slots,
        num_heads,
        *keys.stride()[:3],
        cosines.stride(0),
        HALF=half,
        BLOCK_N=block_n,
        BLOCK_E=block_e,
        num_warps=4,
    )
