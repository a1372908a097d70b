"""A mixture of experts in place of a feed-forward layer (Shazeer et al. 2017; DeepSeek-MoE, 2024).

The router says which experts a token takes and with which weights, `Experts` computes them; what
computes them can be replaced (`make_experts`).

Legend: T tokens, D hidden, N experts, k experts a token, F width of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from batchradix.checkpoint.model_config import MoeConfig
from batchradix_kernels.swiglu import swiglu


class Router:
    """``weight``: [N, D]; ``bias``: float32[N], added for the choice alone, or None."""

    def __init__(self, config: MoeConfig, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.config = config
        self.weight = weight.float() if config.float32_router else weight
        self.bias = bias

    def __call__(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token, int64[T, k], and their weights, float32[T, k]."""
        config = self.config
        logits = functional.linear(x_TD.to(self.weight.dtype), self.weight).float()
        scores = logits.sigmoid() if config.scoring == "sigmoid" else logits.softmax(dim=-1)
        choice = scores if self.bias is None else scores + self.bias
        if config.num_groups_kept < config.num_groups:
            choice = self._within_groups(choice)
        expert_ids = choice.topk(config.num_experts_per_token, dim=-1).indices
        weights = scores.gather(1, expert_ids)
        if config.normalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return expert_ids, weights * config.scaling

    def _within_groups(self, choice: torch.Tensor) -> torch.Tensor:
        """[T, N] with ``-inf`` at the experts outside each token's best groups."""
        config = self.config
        groups = choice.view(choice.shape[0], config.num_groups, -1)
        if config.group_score == "best_two":
            group_scores = groups.topk(2, dim=-1).values.sum(dim=-1)
        else:
            group_scores = groups.amax(dim=-1)
        kept = group_scores.topk(config.num_groups_kept, dim=-1).indices
        hidden = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False)
        return groups.masked_fill(hidden[..., None], -math.inf).view_as(choice)


class Experts(Protocol):
    """The experts of one layer."""

    def __call__(
        self, x_TD: torch.Tensor, expert_ids_Tk: torch.Tensor, weights_Tk: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sums of each token's experts, [T, D] in the dtype of ``x_TD``.

        ``expert_ids_Tk``: int64, those of one token all different; ``weights_Tk``: float32.
        """
        ...


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """``gate_up``: [N, 2F, D], gates before what they gate; ``down``: [N, D, F]; contiguous."""

    gate_up: torch.Tensor
    down: torch.Tensor


class LoopExperts:
    """`Experts` one after the other in torch operations, on any device; sums in float32."""

    def __init__(self, weights: ExpertWeights) -> None:
        self.weights = weights

    def __call__(
        self, x_TD: torch.Tensor, expert_ids_Tk: torch.Tensor, weights_Tk: torch.Tensor
    ) -> torch.Tensor:
        num_chosen = expert_ids_Tk.shape[1]
        chosen, order = expert_ids_Tk.flatten().sort(stable=True)
        counts: list[int] = torch.bincount(chosen, minlength=len(self.weights.down)).tolist()
        rows = x_TD.index_select(0, order // num_chosen)  # grouped by expert
        outs = [
            self._one(expert, part)
            for expert, part in enumerate(torch.split(rows, counts))
            if counts[expert]
        ]
        grouped = torch.cat(outs).float() * weights_Tk.flatten()[order, None]
        by_token = torch.empty_like(grouped).index_copy_(0, order, grouped)
        return by_token.view(*expert_ids_Tk.shape, -1).sum(dim=1).to(x_TD.dtype)

    def _one(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        gated = swiglu(functional.linear(x, self.weights.gate_up[expert]))
        return functional.linear(gated, self.weights.down[expert])


def make_experts(weights: ExpertWeights) -> Experts:
    """The fastest `Experts` for these weights; the caller should drop its reference."""
    return LoopExperts(weights)


class MoE:
    """``shared``: what every token takes beside its experts, [T, D] to [T, D]; ``shared_gate``:
    [1, D], whose sigmoid weights it."""

    def __init__(
        self,
        router: Router,
        experts: Experts,
        shared: Callable[[torch.Tensor], torch.Tensor] | None = None,
        shared_gate: torch.Tensor | None = None,
    ) -> None:
        self.router = router
        self.experts = experts
        self.shared = shared
        self.shared_gate = shared_gate

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        """[T, D] to [T, D], normalised before."""
        out = self.experts(x_TD, *self.router(x_TD))
        if self.shared is None:
            return out
        shared = self.shared(x_TD)
        if self.shared_gate is not None:
            shared = shared * functional.linear(x_TD, self.shared_gate).sigmoid()
        return out.add_(shared)
