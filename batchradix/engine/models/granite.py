"""Granite (IBM 2024): Llama with factors on embeddings, scores, logits and what layers add."""

from __future__ import annotations

from dataclasses import replace

import torch

from batchradix.checkpoint.model_config import ModelConfig
from batchradix.engine.models.llama import Attention, Layer, Llama
from batchradix.engine.models.load import Weights


class Granite(Llama):
    def make_layer(
        self, config: ModelConfig, layer: int, attention: Attention, weights: Weights
    ) -> Layer:
        def scaled(x_TD: torch.Tensor) -> torch.Tensor:
            return x_TD.mul_(config.residual_scale)

        plain = super().make_layer(config, layer, attention, weights)
        if config.residual_scale == 1.0:
            return plain
        return replace(plain, behind_attention=scaled, behind_mlp=scaled)
