"""gpt-oss (OpenAI 2025): Llama with biases, sinks in attention, and experts with clamped gates."""

from __future__ import annotations

import torch

from batchradix.checkpoint.model_config import ModelConfig
from batchradix.engine.models.llama import Llama, LlamaAttention
from batchradix.engine.models.load import Weights


class SinkAttention(LlamaAttention):
    is_plain = False

    def __init__(self, config: ModelConfig, layer: int, weights: Weights) -> None:
        super().__init__(config, layer, weights)
        name = f"model.layers.{layer}.self_attn.sinks"
        self.sinks = weights.take(name, (config.num_heads,), torch.float32)


class GptOss(Llama):
    attention_class = SinkAttention
