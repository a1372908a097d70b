"""Choosing experts in Triton, a program a token; and sorting by them, a program an expert.

The order of rows is deterministic: no atomics, each expert counts and places its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from batchradix_kernels.moe_routing.reference import WEIGHT_FLOOR, Routing

if TYPE_CHECKING:
    from batchradix_kernels.moe_routing import ExpertOrder

__all__ = [
    "count_rows_kernel",
    "moe_routing_kernel",
    "moe_routing_triton",
    "place_rows_kernel",
    "sort_by_expert_triton",
]

BLOCK = 1024  # rows that an expert looks at at a time


@triton.jit
def _first_best(scores, open_, places, NONE: tl.constexpr):
    """The place of the largest of the open scores, the first of equal ones; of any shape."""
    best = tl.max(tl.where(open_, scores, float("-inf")))
    return tl.min(tl.where(open_ & (scores == best), places, NONE))


@triton.jit
def moe_routing_kernel(
    logits, bias, expert_ids, weights, logits_stride, scaling, floor,
    NUM_EXPERTS: tl.constexpr, NUM_GROUPS: tl.constexpr, NUM_GROUPS_KEPT: tl.constexpr,
    NUM_CHOSEN: tl.constexpr, SIGMOID: tl.constexpr, BEST_TWO: tl.constexpr,
    NORMALISE: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Experts lie as groups by experts of a group, each padded to a power of two."""
    token = tl.program_id(0).to(tl.int64)
    PER_GROUP: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    NONE: tl.constexpr = BLOCK_G * BLOCK_E * 2
    g = tl.arange(0, BLOCK_G)
    e = tl.arange(0, BLOCK_E)
    place = g[:, None] * PER_GROUP + e[None, :]
    real = (g < NUM_GROUPS)[:, None] & (e < PER_GROUP)[None, :]
    x = tl.load(logits + token * logits_stride + place, mask=real, other=float("-inf"))
    x = x.to(tl.float32)
    if SIGMOID:
        falling = tl.exp(-tl.abs(x))  # of the magnitude, which cannot overflow
        scores = tl.where(x < 0.0, falling, 1.0) / (1.0 + falling)
    else:
        raised = tl.exp(x - tl.max(x))
        scores = raised / tl.sum(raised)
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias + place, mask=real, other=0.0)
    choice = tl.where(choice == choice, choice, float("-inf"))  # NaN comes last
    open_ = real
    if NUM_GROUPS_KEPT < NUM_GROUPS:
        inside = tl.where(real, choice, float("-inf"))
        group_scores = tl.max(inside, 1)
        if BEST_TWO:
            at_best = tl.where(inside == group_scores[:, None], e[None, :], BLOCK_E)
            others = tl.where(e[None, :] == tl.min(at_best, 1)[:, None], float("-inf"), inside)
            group_scores += tl.max(others, 1)
        groups_open = g < NUM_GROUPS
        for _ in range(NUM_GROUPS_KEPT):
            kept = _first_best(group_scores, groups_open, g, NONE)
            groups_open = groups_open & (g != kept)
        open_ = open_ & (groups_open == 0)[:, None]
    k = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    found = tl.zeros([BLOCK_K], tl.float32)
    for j in range(NUM_CHOSEN):
        expert = _first_best(choice, open_, place, NONE)
        here = place == expert
        open_ = open_ & (here == 0)
        chosen = tl.where(k == j, expert, chosen)
        found = tl.where(k == j, tl.sum(tl.where(here & real, scores, 0.0)), found)
    if NORMALISE:
        found = found / (tl.sum(found) + floor)
    at = token * NUM_CHOSEN + k
    tl.store(expert_ids + at, chosen.to(tl.int64), mask=k < NUM_CHOSEN)
    tl.store(weights + at, found * scaling, mask=k < NUM_CHOSEN)


@triton.jit
def count_rows_kernel(expert_ids, counts, num_rows, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        chosen = tl.load(expert_ids + row, mask=row < num_rows, other=-1)
        count += (chosen == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(count))


@triton.jit
def place_rows_kernel(
    expert_ids, counts, rows, experts, num_blocks, num_rows,
    NUM_EXPERTS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    blocks = tl.load(counts + e, mask=e < NUM_EXPERTS, other=0)
    blocks = (blocks + BLOCK_ROWS - 1) // BLOCK_ROWS
    first = tl.sum(tl.where(e < expert, blocks, 0))
    if expert == 0:
        tl.store(num_blocks, tl.sum(blocks))
    placed = first * BLOCK_ROWS
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        chosen = tl.load(expert_ids + row, mask=row < num_rows, other=-1)
        own = (chosen == expert).to(tl.int32)
        tl.store(rows + placed + tl.cumsum(own) - own, row, mask=own == 1)
        placed += tl.sum(own)
    last = first + tl.sum(tl.where(e == expert, blocks, 0))
    for block in range(first, last):
        tl.store(experts + block, expert)
    r = placed + tl.arange(0, BLOCK_ROWS)
    tl.store(rows + r, num_rows, mask=r < last * BLOCK_ROWS)


def moe_routing_triton(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same contract as `moe_routing`, for logits that Triton serves; one kernel."""
    num_tokens, num_experts = logits.shape
    num_chosen = routing.num_chosen
    assert logits.stride(1) == 1
    assert bias is None or (bias.dtype == torch.float32 and bias.is_contiguous())
    limited = routing.num_groups_kept < routing.num_groups
    num_groups = routing.num_groups if limited else 1
    assert num_experts % num_groups == 0
    assert num_chosen <= num_experts // num_groups * (routing.num_groups_kept if limited else 1)
    size = (num_tokens, num_chosen)
    expert_ids = torch.empty(size, dtype=torch.int64, device=logits.device)
    weights = torch.empty(size, dtype=torch.float32, device=logits.device)
    if num_tokens == 0:
        return expert_ids, weights
    moe_routing_kernel[(num_tokens,)](
        logits,
        weights if bias is None else bias,
        expert_ids,
        weights,
        logits.stride(0),
        routing.scaling,
        WEIGHT_FLOOR,
        NUM_EXPERTS=num_experts,
        NUM_GROUPS=num_groups,
        NUM_GROUPS_KEPT=routing.num_groups_kept if limited else 1,
        NUM_CHOSEN=num_chosen,
        SIGMOID=routing.scoring == "sigmoid",
        BEST_TWO=routing.group_score == "best_two",
        NORMALISE=routing.normalise,
        HAS_BIAS=bias is not None,
        BLOCK_G=triton.next_power_of_2(num_groups),
        BLOCK_E=triton.next_power_of_2(num_experts // num_groups),
        BLOCK_K=triton.next_power_of_2(num_chosen),
        num_warps=1,
    )
    return expert_ids, weights


def sort_by_expert_triton(expert_ids: torch.Tensor, num_experts: int, order: ExpertOrder) -> None:
    """Fills an `ExpertOrder`, for tensors that Triton serves; two kernels."""
    assert expert_ids.is_contiguous()
    num_rows = expert_ids.numel()
    counts = torch.empty(num_experts, dtype=torch.int32, device=expert_ids.device)
    count_rows_kernel[(num_experts,)](expert_ids, counts, num_rows, BLOCK=BLOCK)
    place_rows_kernel[(num_experts,)](
        expert_ids,
        counts,
        order.rows,
        order.experts,
        order.num_blocks,
        num_rows,
        NUM_EXPERTS=num_experts,
        BLOCK_ROWS=order.block_rows,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK=BLOCK,
    )
