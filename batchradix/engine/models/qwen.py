"""Qwen2 and Qwen3: Llama with biases on q, k, v, and with norms on the heads of q and k; with
experts where ``config.moe`` says so."""

from __future__ import annotations

from batchradix.checkpoint.model_config import ModelConfig
from batchradix.engine.models.llama import Llama, LlamaAttention
from batchradix.engine.models.load import Weights


class Qwen2(Llama):
    """The biases come with ``config.attention_bias``; nothing else differs."""


class Qwen3Attention(LlamaAttention):
    def __init__(self, config: ModelConfig, layer: int, weights: Weights) -> None:
        super().__init__(config, layer, weights)
        name, size = f"model.layers.{layer}.self_attn", config.head_dim
        self.norms = (
            weights.norm(f"{name}.q_norm.weight", size, config),
            weights.norm(f"{name}.k_norm.weight", size, config),
            config.rms_norm_eps,
        )


class Qwen3(Llama):
    attention_class = Qwen3Attention
