"""Products of rows with the weights of their experts in Triton: two kernels and a sum.

A program multiplies a block of rows, which have one expert, with a strip of its weights. The first
kernel gathers the tokens' rows and gates in registers what it sums; the second weighs its
sums and scatters them to the place of each choice; the third adds a token's choices in order. No
atomics: a token's result does not depend on the tokens beside it but for the size of blocks.

Legend: T tokens, k choices of each, D hidden, F width of an expert, M rows and N outputs of a
program, K numbers multiplied at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from batchradix_kernels.moe_gemm.tiles import ExpertTiles, choose_tiles
from batchradix_kernels.moe_routing import ExpertOrder, sort_by_expert

__all__ = [
    "expert_down_kernel",
    "expert_gate_up_kernel",
    "moe_experts_triton",
    "sum_choices_kernel",
]

SUM_BLOCK = 1024


@triton.jit
def expert_gate_up_kernel(
    x, weights, out, rows, experts, num_blocks, num_rows, x_stride,
    NUM_CHOSEN: tl.constexpr, IN_DIM: tl.constexpr, OUT_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """silu(x · gate) · (x · up) of each row, rounded once. ``weights``: [N, 2F, D]."""
    block = tl.program_id(0)
    if block >= tl.load(num_blocks):
        return
    row_M = tl.load(rows + block * BLOCK_M + tl.arange(0, BLOCK_M))
    real_M = row_M < num_rows
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_MK = x + (row_M // NUM_CHOSEN).to(tl.int64)[:, None] * x_stride + k[None, :]
    weights += tl.load(experts + block).to(tl.int64) * (2 * OUT_DIM * IN_DIM)
    gate_NK = weights + n[:, None] * IN_DIM + k[None, :]
    up_NK = gate_NK + OUT_DIM * IN_DIM
    gate_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, IN_DIM, BLOCK_K):
        mask_M = real_M[:, None]
        mask_N = (n < OUT_DIM)[:, None]
        if IN_DIM % BLOCK_K:
            inside = (start + k < IN_DIM)[None, :]
            mask_M = mask_M & inside
            mask_N = mask_N & inside
        a_MK = tl.load(x_MK + start, mask=mask_M, other=0.0)
        gates = tl.load(gate_NK + start, mask=mask_N, other=0.0)
        ups = tl.load(up_NK + start, mask=mask_N, other=0.0)
        gate_MN = tl.dot(a_MK, tl.trans(gates), gate_MN, input_precision=PRECISION)
        up_MN = tl.dot(a_MK, tl.trans(ups), up_MN, input_precision=PRECISION)
    falling = tl.exp(-tl.abs(gate_MN))  # of the magnitude, which cannot overflow
    value = gate_MN * tl.where(gate_MN < 0.0, falling, 1.0) / (1.0 + falling) * up_MN
    at = out + row_M.to(tl.int64)[:, None] * OUT_DIM + n[None, :]
    mask = real_M[:, None] & (n < OUT_DIM)[None, :]
    tl.store(at, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def expert_down_kernel(
    x, weights, chosen_weights, out, rows, experts, num_blocks, num_rows,
    IN_DIM: tl.constexpr, OUT_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A row's product, times its weight in the mixture. ``weights``: [N, D, F]."""
    block = tl.program_id(0)
    if block >= tl.load(num_blocks):
        return
    row_M = tl.load(rows + block * BLOCK_M + tl.arange(0, BLOCK_M))
    real_M = row_M < num_rows
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_MK = x + row_M.to(tl.int64)[:, None] * IN_DIM + k[None, :]
    weights += tl.load(experts + block).to(tl.int64) * (OUT_DIM * IN_DIM)
    w_NK = weights + n[:, None] * IN_DIM + k[None, :]
    sums_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, IN_DIM, BLOCK_K):
        mask_M = real_M[:, None]
        mask_N = (n < OUT_DIM)[:, None]
        if IN_DIM % BLOCK_K:
            inside = (start + k < IN_DIM)[None, :]
            mask_M = mask_M & inside
            mask_N = mask_N & inside
        a_MK = tl.load(x_MK + start, mask=mask_M, other=0.0)
        strip = tl.load(w_NK + start, mask=mask_N, other=0.0)
        sums_MN = tl.dot(a_MK, tl.trans(strip), sums_MN, input_precision=PRECISION)
    weight_M = tl.load(chosen_weights + row_M, mask=real_M, other=0.0)
    at = out + row_M.to(tl.int64)[:, None] * OUT_DIM + n[None, :]
    mask = real_M[:, None] & (n < OUT_DIM)[None, :]
    tl.store(at, (sums_MN * weight_M[:, None]).to(out.dtype.element_ty), mask=mask)


@triton.jit
def sum_choices_kernel(choices, out, width, NUM_CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    total = tl.zeros([BLOCK], tl.float32)
    for j in range(NUM_CHOSEN):
        row = choices + (token * NUM_CHOSEN + j) * width
        total += tl.load(row + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + i, total.to(out.dtype.element_ty), mask=inside)


def moe_experts_triton(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Same contract as `moe_experts`, for tensors that Triton serves; five kernels."""
    num_experts, hidden, width = down.shape
    num_tokens, num_chosen = expert_ids.shape
    assert x.shape == (num_tokens, hidden)
    assert x.stride(1) == 1
    assert gate_up.shape == (num_experts, 2 * width, hidden)
    assert x.dtype == gate_up.dtype == down.dtype
    assert gate_up.is_contiguous()
    assert down.is_contiguous()
    assert weights.shape == expert_ids.shape
    assert weights.dtype == torch.float32
    assert weights.is_contiguous()
    out = x.new_empty((num_tokens, hidden))
    if num_tokens == 0:
        return out
    num_rows = num_tokens * num_chosen
    tiles = _suit(num_rows / num_experts, x.dtype, x.device)
    order = sort_by_expert(expert_ids, num_experts, tiles.block_rows)
    gated = x.new_empty((num_rows, width))
    results = x.new_empty((num_rows, hidden))
    expert_gate_up_kernel[_grid(order, width, tiles.gate_up.outputs)](
        *(x, gate_up, gated, *order[:3], num_rows, x.stride(0)),
        NUM_CHOSEN=num_chosen,
        IN_DIM=hidden,
        OUT_DIM=width,
        BLOCK_M=tiles.block_rows,
        BLOCK_N=tiles.gate_up.outputs,
        BLOCK_K=tiles.gate_up.depth,
        PRECISION="ieee",
        num_warps=tiles.gate_up.num_warps,
        num_stages=tiles.gate_up.num_stages,
    )
    expert_down_kernel[_grid(order, hidden, tiles.down.outputs)](
        *(gated, down, weights, results, *order[:3], num_rows),
        IN_DIM=width,
        OUT_DIM=hidden,
        BLOCK_M=tiles.block_rows,
        BLOCK_N=tiles.down.outputs,
        BLOCK_K=tiles.down.depth,
        PRECISION="ieee",
        num_warps=tiles.down.num_warps,
        num_stages=tiles.down.num_stages,
    )
    sum_choices_kernel[(num_tokens, triton.cdiv(hidden, SUM_BLOCK))](
        results, out, hidden, NUM_CHOSEN=num_chosen, BLOCK=SUM_BLOCK
    )
    return out


def _grid(order: ExpertOrder, num_outputs: int, outputs: int) -> tuple[int, int]:
    """Blocks of rows beside each other share a strip of weights where they share an expert."""
    return len(order.experts), triton.cdiv(num_outputs, outputs)


def _suit(rows_an_expert: float, dtype: torch.dtype, device: torch.device) -> ExpertTiles:
    """Tiles for the device."""
    if device.type != "cuda":
        return choose_tiles(rows_an_expert, dtype)
    if torch.version.hip:
        return choose_tiles(rows_an_expert, dtype, "gfx942")
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    tiles = choose_tiles(rows_an_expert, dtype)
    return tiles.fitting(dtype.itemsize, properties["max_shared_mem"])
