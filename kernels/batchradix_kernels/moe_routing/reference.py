"""Choosing experts and sorting by them, in plain torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

WEIGHT_FLOOR = 1e-20  # added to the sum that weights are divided by


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How ``num_chosen`` of a model's experts are chosen.

    Experts come from the ``num_groups_kept`` best of ``num_groups`` groups of equal size; a group
    is as good as its best expert, or as the sum of its best two. Weights are divided by their sum
    where ``normalise``, and multiplied by ``scaling``.
    """

    num_chosen: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1
    num_groups_kept: int = 1
    group_score: Literal["best", "best_two"] = "best"
    normalise: bool = False
    scaling: float = 1.0


def moe_routing_reference(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same contract as `moe_routing`."""
    logits = logits.float()
    scores = logits.sigmoid() if routing.scoring == "sigmoid" else logits.softmax(dim=-1)
    choice = scores if bias is None else scores + bias
    choice = choice.nan_to_num(nan=-math.inf, neginf=-math.inf)
    if routing.num_groups_kept < routing.num_groups:
        groups = choice.view(len(choice), routing.num_groups, -1)
        best = groups.sort(dim=-1, descending=True).values
        group_scores = best[..., 0]
        if routing.group_score == "best_two":
            group_scores = best[..., :2].sum(dim=-1)
        kept = _best(group_scores, routing.num_groups_kept)
        hidden = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False)
        choice = groups.masked_fill(hidden[..., None], -math.inf).view_as(choice)
    expert_ids = _best(choice, routing.num_chosen)
    weights = scores.gather(1, expert_ids)
    if routing.normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + WEIGHT_FLOOR)
    return expert_ids, weights * routing.scaling


def sort_by_expert_reference(
    expert_ids: torch.Tensor,
    num_experts: int,
    block_rows: int,
    rows: torch.Tensor,
    experts: torch.Tensor,
    num_blocks: torch.Tensor,
) -> None:
    """Fills the tensors of an `ExpertOrder`."""
    flat = expert_ids.flatten()
    at = 0
    for expert in range(num_experts):
        own = (flat == expert).nonzero().flatten().int()
        for start in range(0, len(own), block_rows):
            block = own[start : start + block_rows]
            rows[at * block_rows : (at + 1) * block_rows] = len(flat)
            rows[at * block_rows : at * block_rows + len(block)] = block
            experts[at] = expert
            at += 1
    num_blocks[0] = at


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the largest in each row, of equal ones the first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
