"""DeepSeek-V2 and V3 (DeepSeek-AI 2024): Llama with latent attention and experts.

Moonlight and Kimi-K2 are models of these architectures.
"""

from __future__ import annotations

import torch

from batchradix.checkpoint.model_config import ModelConfig
from batchradix.engine.attention.mla_base import UpProjection
from batchradix.engine.layers.linear import Rows
from batchradix.engine.layers.mla import NORM_EPSILON, LatentProjection, QueryLora
from batchradix.engine.layers.norm import RMSNorm
from batchradix.engine.layers.rotary import Angles
from batchradix.engine.models.batch import Batch
from batchradix.engine.models.llama import Llama
from batchradix.engine.models.load import Weights


class LatentAttention:
    def __init__(self, config: ModelConfig, layer: int, weights: Weights) -> None:
        mla = config.mla
        assert mla is not None
        name, hidden = f"model.layers.{layer}.self_attn", config.hidden_size
        self.layer = layer
        q_size = config.num_heads * (mla.nope_dim + mla.rope_dim)
        lora, q_name, a_size = None, f"{name}.q_proj", q_size
        if mla.q_lora_rank is not None:
            q_name, a_size = f"{name}.q_a_proj", mla.q_lora_rank
            lora = QueryLora(
                RMSNorm(weights.take(f"{name}.q_a_layernorm.weight", (a_size,)), NORM_EPSILON),
                weights.linear([f"{name}.q_b_proj"], [q_size], a_size, bias=False),
            )
        a_proj = weights.linear(
            [q_name, f"{name}.kv_a_proj_with_mqa"],
            [a_size, mla.kv_lora_rank + mla.rope_dim],
            hidden,
            bias=[config.attention_bias and lora is not None, config.attention_bias],
        )
        norm = weights.take(f"{name}.kv_a_layernorm.weight", (mla.kv_lora_rank,))
        self.projection = LatentProjection(
            mla, config.num_heads, a_proj, lora, RMSNorm(norm, NORM_EPSILON)
        )
        up_size = (config.num_heads * (mla.nope_dim + mla.v_dim), mla.kv_lora_rank)
        self.up = UpProjection.split(
            weights.take(f"{name}.kv_b_proj.weight", up_size),
            (config.num_heads, mla.nope_dim, mla.v_dim),
        )
        self.o_proj = weights.linear(
            [f"{name}.o_proj"], [hidden], config.num_heads * mla.v_dim, bias=config.output_bias
        )

    @property
    def is_quantised(self) -> bool:
        return self.projection.is_quantised

    def __call__(self, x_TD: Rows, angles: Angles | None, batch: Batch) -> torch.Tensor:
        assert angles is not None
        projected = self.projection(x_TD, *angles)
        out = batch.attention.run(self.layer, *projected, self.up, batch.pool, batch.plan)
        return self.o_proj(out)


class Deepseek(Llama):
    attention_class = LatentAttention
