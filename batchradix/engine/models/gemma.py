"""Gemma 1, 2 and 3 (Gemma Team 2024, 2025): norms that add 1 to their weights, embeddings times the
root of their size, gates by GELU; in 2 and 3 norms behind attention and feed-forward part too, in 3
norms on the heads of q and k."""

from __future__ import annotations

from batchradix.checkpoint.model_config import ModelConfig
from batchradix.engine.models.feed_forward import feed_forward
from batchradix.engine.models.llama import Attention, Layer, Llama, norm_of
from batchradix.engine.models.load import Weights
from batchradix.engine.models.qwen import Qwen3Attention


class Gemma(Llama):
    """All that differs is in the config."""


class Gemma2(Llama):
    def make_layer(
        self, config: ModelConfig, layer: int, attention: Attention, weights: Weights
    ) -> Layer:
        name = f"model.layers.{layer}"
        return Layer(
            attention=attention,
            mlp=feed_forward(config, layer, weights),
            input_norm=norm_of(config, weights, f"{name}.input_layernorm"),
            mlp_norm=norm_of(config, weights, f"{name}.pre_feedforward_layernorm"),
            behind_attention=norm_of(config, weights, f"{name}.post_attention_layernorm"),
            behind_mlp=norm_of(config, weights, f"{name}.post_feedforward_layernorm"),
        )


class Gemma3(Gemma2):
    attention_class = Qwen3Attention
