"""Qwen2 and Qwen3: Llama with biases on q, k, v, and with norms on the heads of q and k."""

from __future__ import annotations

import torch

from batchradix.checkpoint.model_config import ModelConfig
from batchradix.engine.layers.norm import RMSNorm
from batchradix.engine.layers.rotary import Rotary
from batchradix.engine.models.llama import Llama, LlamaAttention
from batchradix.engine.models.load import Weights


class Qwen2(Llama):
    """The biases come with ``config.attention_bias``; nothing else differs."""


class Qwen3Attention(LlamaAttention):
    def __init__(self, config: ModelConfig, layer: int, rotary: Rotary, weights: Weights) -> None:
        super().__init__(config, layer, rotary, weights)
        name, size = f"model.layers.{layer}.self_attn", (config.head_dim,)
        self.q_norm = RMSNorm(weights.take(f"{name}.q_norm.weight", size), config.rms_norm_eps)
        self.k_norm = RMSNorm(weights.take(f"{name}.k_norm.weight", size), config.rms_norm_eps)

    def normalise(self, qk: torch.Tensor) -> torch.Tensor:
        q_THE, k_TKE = qk[:, : self.num_heads], qk[:, self.num_heads :]
        return torch.cat((self.q_norm(q_THE), self.k_norm(k_TKE)), dim=1)


class Qwen3(Llama):
    attention_class = Qwen3Attention
