"""Which experts a token takes, and the order in which a grouped product takes tokens.

Scores are a softmax or sigmoids of the router's logits. A correction bias is added for the choice
and not for the weights (DeepSeek-V3's balancing without an auxiliary loss). With groups, experts
are taken from the best groups alone.

Shapes: T tokens, N experts, k experts a token, B blocks of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from batchradix_kernels.moe_routing.reference import (
    Routing,
    moe_routing_reference,
    sort_by_expert_reference,
)
from batchradix_kernels.triton_runtime import serves

__all__ = [
    "ExpertOrder",
    "Routing",
    "moe_routing",
    "moe_routing_reference",
    "num_blocks_at_most",
    "sort_by_expert",
    "sort_by_expert_reference",
]


class ExpertOrder(NamedTuple):
    """Rows of tokens sorted by expert, in blocks that have one expert each.

    A row is a token's choice: number ``t · k + j``. ``rows``: int32[B · block_rows], the rows of
    each block, those of an expert ascending, ``T · k`` where a block is not full; ``experts``:
    int32[B], the expert of each block; ``num_blocks``: int32[1], the blocks in use: what lies
    behind them is undefined.
    """

    rows: torch.Tensor
    experts: torch.Tensor
    num_blocks: torch.Tensor
    block_rows: int


def moe_routing(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token, int64[T, k], the best first, and their weights, float32[T, k].

    ``logits``: [T, N] of any float dtype, a view whose last axis is dense; ``bias``: float32[N],
    contiguous, added to the scores for the choice alone. Of equal scores the lower expert is
    taken, of equal groups the lower one. A token with a NaN gets k different experts in any case.
    """
    if serves(logits.device):
        from batchradix_kernels.moe_routing.triton import moe_routing_triton

        return moe_routing_triton(logits, routing, bias)
    return moe_routing_reference(logits, routing, bias)


def sort_by_expert(expert_ids: torch.Tensor, num_experts: int, block_rows: int) -> ExpertOrder:
    """``expert_ids``: int32 or int64[T, k], contiguous; nothing waits for the device."""
    rows, experts, num_blocks = (
        torch.empty(size, dtype=torch.int32, device=expert_ids.device)
        for size in _sizes(expert_ids.numel(), num_experts, block_rows)
    )
    order = ExpertOrder(rows, experts, num_blocks, block_rows)
    if serves(expert_ids.device):
        from batchradix_kernels.moe_routing.triton import sort_by_expert_triton

        sort_by_expert_triton(expert_ids, num_experts, order)
    else:
        sort_by_expert_reference(expert_ids, num_experts, block_rows, *order[:3])
    return order


def num_blocks_at_most(num_rows: int, num_experts: int, block_rows: int) -> int:
    """How many blocks ``num_rows`` rows fill, whatever their experts."""
    return num_rows // block_rows + min(num_rows, num_experts)


def _sizes(num_rows: int, num_experts: int, block_rows: int) -> tuple[int, int, int]:
    most = num_blocks_at_most(num_rows, num_experts, block_rows)
    return most * block_rows, most, 1
