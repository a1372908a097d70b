"""A mixture of experts in place of a feed-forward layer (Shazeer et al. 2017; DeepSeek-MoE, 2024).

The router says which experts a token takes and with which weights, `Experts` computes them; what
computes them can be replaced (`ExpertWeights.experts`).

Legend: T tokens, D hidden, N experts, k experts a token, F width of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch.nn import functional

from batchradix.checkpoint.model_config import MoeConfig
from batchradix.engine.layers.linear import Linear, Rows
from batchradix_kernels.experts import Bf16Experts
from batchradix_kernels.moe_gemm import moe_experts
from batchradix_kernels.moe_routing import Routing, moe_routing
from batchradix_kernels.swiglu import swiglu
from batchradix_kernels.triton_runtime import serves


class Router:
    """``linear``: [T, D] to logits [T, N], in float32 where ``config.float32_router``; ``bias``:
    float32[N], added to the scores for the choice alone, or None."""

    def __init__(self, config: MoeConfig, linear: Linear, bias: torch.Tensor | None) -> None:
        self.config = config
        self.linear = linear
        self.bias = bias
        self._routing = Routing(
            num_chosen=config.num_experts_per_token,
            scoring=config.scoring,
            num_groups=config.num_groups,
            num_groups_kept=config.num_groups_kept,
            group_score=config.group_score,
            normalise=config.normalise,
            scaling=config.scaling,
        )

    def __call__(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token, int64[T, k], and their weights, float32[T, k]."""
        config = self.config
        logits = self.linear(x_TD.float() if config.float32_router else x_TD).float()
        if serves(logits.device):
            return moe_routing(logits, self._routing, self.bias)
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
    """The experts of one layer. ``is_recordable``: a call never waits for the device."""

    @property
    def is_recordable(self) -> bool: ...

    def __call__(
        self, x_TD: torch.Tensor, expert_ids_Tk: torch.Tensor, weights_Tk: torch.Tensor, /
    ) -> torch.Tensor:
        """The weighted sums of each token's experts, [T, D] in the dtype of ``x_TD``.

        ``expert_ids_Tk``: int64, those of one token all different; ``weights_Tk``: float32.
        """
        ...


class LoopExperts:
    """`Experts` one after the other, each [n, D] to [n, D]; sums in float32."""

    is_recordable = False  # the host splits the rows

    def __init__(self, experts: Sequence[Callable[[torch.Tensor], torch.Tensor]]) -> None:
        self.experts = experts

    def __call__(
        self, x_TD: torch.Tensor, expert_ids_Tk: torch.Tensor, weights_Tk: torch.Tensor
    ) -> torch.Tensor:
        chosen, order = expert_ids_Tk.flatten().sort(stable=True)
        counts: list[int] = torch.bincount(chosen, minlength=len(self.experts)).tolist()
        rows = x_TD.index_select(0, order // expert_ids_Tk.shape[1])  # grouped by expert
        parts = zip(self.experts, torch.split(rows, counts), strict=True)
        grouped = torch.cat([expert(part) for expert, part in parts if len(part)]).float()
        grouped *= weights_Tk.flatten()[order, None]
        by_token = torch.empty_like(grouped).index_copy_(0, order, grouped)
        return by_token.view(*expert_ids_Tk.shape, -1).sum(dim=1).to(x_TD.dtype)


class PackedExperts(Bf16Experts):
    """`Experts` in one call of a C kernel, on a CPU that multiplies bfloat16."""

    is_recordable = False


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """``gate_up``: [N, 2F, D], gates before what they gate; ``down``: [N, D, F]; contiguous."""

    gate_up: torch.Tensor
    down: torch.Tensor

    def experts(self) -> Experts:
        """The fastest `Experts` for these weights."""
        if serves(self.down.device):
            return GroupedExperts(self)
        return LoopExperts([partial(self._one, i) for i in range(len(self.down))])

    def _one(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(
            swiglu(functional.linear(x, self.gate_up[expert])), self.down[expert]
        )


class GroupedExperts:
    """`Experts` as grouped products in Triton."""

    is_recordable = True

    def __init__(self, weights: ExpertWeights) -> None:
        self.weights = weights

    def __call__(
        self, x_TD: torch.Tensor, expert_ids_Tk: torch.Tensor, weights_Tk: torch.Tensor
    ) -> torch.Tensor:
        return moe_experts(x_TD, self.weights.gate_up, self.weights.down, expert_ids_Tk, weights_Tk)


class MoE:
    """``shared``: what every token takes beside its experts, [T, D] to [T, D]; ``shared_gate``:
    [T, D] to [T, 1], whose sigmoid weights it."""

    is_quantised = False

    def __init__(
        self,
        router: Router,
        experts: Experts,
        shared: Callable[[torch.Tensor], torch.Tensor] | None = None,
        shared_gate: Linear | None = None,
    ) -> None:
        self.router = router
        self.experts = experts
        self.shared = shared
        self.shared_gate = shared_gate

    @property
    def is_recordable(self) -> bool:
        return self.experts.is_recordable

    def __call__(self, x_TD: Rows) -> torch.Tensor:
        """[T, D] to [T, D], normalised before; never in 8 bits, which the router would not take."""
        assert isinstance(x_TD, torch.Tensor)
        out = self.experts(x_TD, *self.router(x_TD))
        if self.shared is None:
            return out
        shared = self.shared(x_TD)
        if self.shared_gate is not None:
            shared = shared * self.shared_gate(x_TD).sigmoid()
        return out.add_(shared)
