"""What a layer does after attention: one gated feed-forward layer, or a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from batchradix.checkpoint.model_config import ModelConfig, MoeConfig
from batchradix.engine.layers.gated import gating_of
from batchradix.engine.layers.linear import Linear, Rows, make_linear
from batchradix.engine.layers.moe import (
    Experts,
    ExpertWeights,
    LoopExperts,
    MoE,
    PackedExperts,
    Router,
)
from batchradix.engine.models.load import Weights
from batchradix_kernels.swiglu import SILU, Gating
from batchradix_kernels.triton_runtime import serves


class MLP:
    """``names``: of the layers that give gates, what they gate, and the result."""

    is_recordable = True

    def __init__(
        self,
        weights: Weights,
        names: tuple[str, str, str],
        hidden_size: int,
        size: int,
        *,
        bias: bool = False,
        gating: Gating = SILU,
    ) -> None:
        gate, up, down = names
        self.gate_up_proj = weights.gated_linear(
            [gate, up], size, hidden_size, bias=bias, gating=gating
        )
        self.down_proj = weights.linear([down], [hidden_size], size, bias=bias)

    @property
    def is_quantised(self) -> bool:
        return self.gate_up_proj.is_quantised

    def __call__(self, x_TD: Rows) -> torch.Tensor:
        return self.down_proj(self.gate_up_proj(x_TD, to_int8=self.down_proj.is_quantised))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """How a family's files call the parts of a layer with experts."""

    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = ""

    def of(self, name: str) -> tuple[str, str, str]:
        return f"{name}.{self.gate}", f"{name}.{self.up}", f"{name}.{self.down}"


_NAMES = {
    "MixtralForCausalLM": _Names(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
    "Qwen2MoeForCausalLM": _Names(shared="shared_expert"),
    "Qwen3MoeForCausalLM": _Names(),
    "DeepseekV2ForCausalLM": _Names(shared="shared_experts"),
    "DeepseekV3ForCausalLM": _Names(shared="shared_experts"),
    "GptOssForCausalLM": _Names(router="router"),
}


def feed_forward(config: ModelConfig, layer: int, weights: Weights) -> MLP | MoE:
    """The part of ``layer``, as ``config.moe`` says."""
    name = f"model.layers.{layer}"
    if config.moe is None or layer not in config.moe.layers:
        return MLP(
            weights,
            _Names().of(f"{name}.mlp"),
            config.hidden_size,
            config.intermediate_size,
            bias=config.mlp_bias,
            gating=gating_of(config.activation),
        )
    return _mixture(config, config.moe, name, weights)


def _mixture(config: ModelConfig, moe: MoeConfig, layer: str, weights: Weights) -> MoE:
    names, hidden = _NAMES[config.architecture], config.hidden_size
    block = f"{layer}.{names.block}"
    bias = None
    if moe.correction_bias:
        name = f"{block}.{names.router}.e_score_correction_bias"
        bias = weights.take(name, (moe.num_experts,), torch.float32)
    gate_dtype = torch.float32 if moe.float32_router else None
    gate_name = f"{block}.{names.router}"
    gate = weights.take(f"{gate_name}.weight", (moe.num_experts, hidden), gate_dtype)
    gate_bias = None
    if moe.router_bias:
        gate_bias = weights.take(f"{gate_name}.bias", (moe.num_experts,), gate_dtype)
    router = _router_linear(gate, weights, gate_bias)
    shared, shared_gate = None, None
    if moe.shared_intermediate_size:
        shared = MLP(
            weights,
            names.of(f"{block}.{names.shared}"),
            hidden,
            moe.shared_intermediate_size,
            bias=config.mlp_bias,
        )
    if moe.shared_gate:
        name = f"{block}.{names.shared}_gate.weight"
        shared_gate = _router_linear(weights.take(name, (1, hidden)), weights)
    experts = _experts(
        moe, [names.of(f"{block}.experts.{i}") for i in range(moe.num_experts)], hidden, weights
    )
    return MoE(Router(moe, router, bias), experts, shared, shared_gate)


def _router_linear(
    weight: torch.Tensor, weights: Weights, bias: torch.Tensor | None = None
) -> Linear:
    """Never in 8 bits: a choice is not to be rounded."""
    return make_linear(weight, bias, batch_invariant=weights.batch_invariant, prefer_float32=True)


def _experts(
    moe: MoeConfig, names: Sequence[tuple[str, str, str]], hidden: int, weights: Weights
) -> Experts:
    """On the CPU packed for the C kernel, or layers as any other; elsewhere, and in Triton's
    interpreter, stacked weights. Those with biases or other gates than SwiGLU are layers anywhere.
    """
    size = moe.intermediate_size
    if moe.expert_bias or moe.clamped is not None:
        gating = gating_of("silu", moe.clamped)
        return LoopExperts(
            [
                MLP(weights, of_expert, hidden, size, bias=moe.expert_bias, gating=gating)
                for of_expert in names
            ]
        )
    if weights.device.type != "cpu" or serves(weights.device):
        return _stacked(names, hidden, size, weights).experts()
    is_plain = weights.dtype == torch.bfloat16 and not (weights.is_quantised or weights.keeps)
    if is_plain and PackedExperts.serves(hidden, size):
        return PackedExperts(_one_by_one(names, hidden, size, weights))
    return LoopExperts([MLP(weights, of_expert, hidden, size) for of_expert in names])


def _one_by_one(
    names: Sequence[tuple[str, str, str]], hidden: int, size: int, weights: Weights
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of each expert gates and what they gate, [2F, D], and the rest, [D, F]."""
    for gate, up, down in names:
        sides = [f"{gate}.weight", f"{up}.weight"]
        yield (
            weights.take_stacked(sides, [(size, hidden), (size, hidden)]),
            weights.take(f"{down}.weight", (hidden, size)),
        )


def _stacked(
    names: Sequence[tuple[str, str, str]], hidden: int, size: int, weights: Weights
) -> ExpertWeights:
    stacked = ExpertWeights(
        gate_up=weights.empty(len(names), 2 * size, hidden),
        down=weights.empty(len(names), hidden, size),
    )
    for i, (gate, up, down) in enumerate(names):
        weights.fill(f"{gate}.weight", stacked.gate_up[i, :size])
        weights.fill(f"{up}.weight", stacked.gate_up[i, size:])
        weights.fill(f"{down}.weight", stacked.down[i])
    return stacked
