"""OLMo 2 and 3 (OLMo Team 2024, 2025): no norms before attention and feed-forward part but behind
them, and norms over all query heads and over all key heads together."""

from __future__ import annotations

import torch

from batchradix.checkpoint.model_config import ModelConfig
from batchradix.engine.layers.linear import Rows
from batchradix.engine.layers.norm import NoNorm, RMSNorm
from batchradix.engine.models.feed_forward import feed_forward
from batchradix.engine.models.llama import Attention, Layer, Llama, LlamaAttention, norm_of
from batchradix.engine.models.load import Weights


class OlmoAttention(LlamaAttention):
    is_plain = False

    def __init__(self, config: ModelConfig, layer: int, weights: Weights) -> None:
        super().__init__(config, layer, weights)
        name = f"model.layers.{layer}.self_attn"
        sizes = (self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim)
        self.wide_norms = [
            RMSNorm(weights.take(f"{name}.{side}_norm.weight", (size,)), config.rms_norm_eps)
            for side, size in zip("qk", sizes, strict=True)
        ]

    def project(self, x_TD: Rows) -> torch.Tensor:
        qkv = self.qkv_proj(x_TD)
        start = 0
        for norm in self.wide_norms:
            part = qkv[:, start : start + len(norm.weight)]
            part.copy_(norm(part.contiguous()))
            start += len(norm.weight)
        return qkv


class Olmo2(Llama):
    attention_class = OlmoAttention

    def make_layer(
        self, config: ModelConfig, layer: int, attention: Attention, weights: Weights
    ) -> Layer:
        name = f"model.layers.{layer}"
        return Layer(
            attention=attention,
            mlp=feed_forward(config, layer, weights),
            input_norm=NoNorm(),
            mlp_norm=NoNorm(),
            behind_attention=norm_of(config, weights, f"{name}.post_attention_layernorm"),
            behind_mlp=norm_of(config, weights, f"{name}.post_feedforward_layernorm"),
        )
