"""Llama and Mistral (Touvron et al. 2023; Jiang et al. 2023).

Shapes: T tokens, D hidden, H query heads, K key heads, E head dimension, F feed-forward,
R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from batchradix.checkpoint.model_config import ModelConfig
from batchradix.engine.attention.cpu_backend import CpuAttention
from batchradix.engine.layers.embedding import Embedding
from batchradix.engine.layers.fused import fused_layer
from batchradix.engine.layers.head import OutputHead, StoredRows, TableRows, WeightRows
from batchradix.engine.layers.linear import Rows, is_repacked, make_linear
from batchradix.engine.layers.norm import RMSNorm
from batchradix.engine.layers.rotary import Rotary
from batchradix.engine.models.batch import Batch
from batchradix.engine.models.feed_forward import MLP, feed_forward
from batchradix.engine.models.load import Weights
from batchradix_kernels.decoder import CpuDecoder, DecoderLayer
from batchradix_kernels.rope import rope

Angles = tuple[torch.Tensor, torch.Tensor]
HeadNorms = tuple[torch.Tensor, torch.Tensor, float]


class Attention(Protocol):
    """The attention of a layer: normalised rows, in 8 bits where ``is_quantised``, to [T, D]."""

    @property
    def is_quantised(self) -> bool: ...

    def __call__(self, x_TD: Rows, angles: Angles, batch: Batch) -> torch.Tensor: ...


class LlamaAttention:
    norms: HeadNorms | None = None  # weights of query and key heads, epsilon

    def __init__(self, config: ModelConfig, layer: int, weights: Weights) -> None:
        name = f"model.layers.{layer}.self_attn"
        self.layer = layer
        self.head_dim = config.head_dim
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.qkv_proj = weights.linear(
            [f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj"],
            [q_size, kv_size, kv_size],
            config.hidden_size,
            bias=config.attention_bias,
        )
        self.o_proj = weights.linear(
            [f"{name}.o_proj"], [config.hidden_size], q_size, bias=config.output_bias
        )

    @property
    def is_quantised(self) -> bool:
        return self.qkv_proj.is_quantised

    def __call__(self, x_TD: Rows, angles: Angles, batch: Batch) -> torch.Tensor:
        qkv = self.qkv_proj(x_TD)
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        rope(heads, *angles, self.num_heads, self.num_kv_heads, self.norms)
        sizes = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        q_THE, k_TKE, v_TKE = torch.split(heads, sizes, dim=1)
        out = batch.attention.run(self.layer, q_THE, k_TKE, v_TKE, batch.pool, batch.plan)
        return self.o_proj(out)


class LlamaLayer:
    def __init__(
        self, config: ModelConfig, layer: int, attention: Attention, weights: Weights
    ) -> None:
        name = f"model.layers.{layer}"
        size, epsilon = (config.hidden_size,), config.rms_norm_eps
        self.attention = attention
        self.mlp = feed_forward(config, layer, weights)
        self.input_norm = RMSNorm(weights.take(f"{name}.input_layernorm.weight", size), epsilon)
        self.mlp_norm = RMSNorm(
            weights.take(f"{name}.post_attention_layernorm.weight", size), epsilon
        )

    def __call__(
        self, x_TD: torch.Tensor, left: torch.Tensor | None, angles: Angles, batch: Batch
    ) -> torch.Tensor:
        """Adds to ``x_TD`` in place; what is left to be added to it is given and returned."""
        attention, mlp = self.attention, self.mlp
        rows = self.input_norm.before(attention.is_quantised, x_TD, left)
        left = attention(rows, angles, batch)
        return mlp(self.mlp_norm.before(mlp.is_quantised, x_TD, left))

    def fused(self) -> DecoderLayer | None:
        """For `CpuDecoder`, where it serves."""
        attention, mlp = self.attention, self.mlp
        if not isinstance(attention, LlamaAttention) or not isinstance(mlp, MLP):
            return None
        norms = attention.norms
        return fused_layer(
            input_norm=self.input_norm,
            mlp_norm=self.mlp_norm,
            head_norms=None if norms is None else norms[:2],
            qkv=attention.qkv_proj,
            o=attention.o_proj,
            gate_up=mlp.gate_up_proj,
            down=mlp.down_proj,
        )


class Llama:
    """Implements `registry.CausalLM`. Raises `ModelError` when the weights do not fit."""

    attention_class: Callable[[ModelConfig, int, Weights], Attention] = LlamaAttention

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        table_size = (config.vocab_size, config.hidden_size)
        self.rotary = Rotary(config.rope, config.rope_dim, weights.device)
        self.embedding = Embedding(weights.take("model.embed_tokens.weight", table_size))
        self.layers = [
            LlamaLayer(config, i, self.attention_class(config, i, weights), weights)
            for i in range(config.num_layers)
        ]
        self.norm = RMSNorm(
            weights.take("model.norm.weight", (config.hidden_size,)), config.rms_norm_eps
        )
        self.head = _make_head(config, weights, self.embedding.weight)
        self._decoder = _make_decoder(config, self.layers, weights.dtype)
        unused = ["lm_head.weight"] if config.tie_embeddings else []
        for extra in range(config.num_prediction_layers):
            unused.append(f"model.layers.{config.num_layers + extra}.")
        weights.finish(unused=unused)

    @property
    def is_recordable(self) -> bool:
        return all(layer.mlp.is_recordable for layer in self.layers)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states [T, D] before the last norm, in the model's dtype."""
        x_TD = self.embedding(batch.token_ids)
        angles = self.rotary.angles(batch.positions)
        if self._decoder is not None and isinstance(batch.attention, CpuAttention):
            return self._decoder.run(x_TD, *angles, batch.plan, batch.pool)
        left: torch.Tensor | None = None
        for layer in self.layers:
            left = layer(x_TD, left, angles, batch)
        return x_TD if left is None else x_TD.add_(left)

    def logits(self, x_RD: torch.Tensor) -> torch.Tensor:
        """Rows of `forward`'s result to [R, V], in the model's dtype or float32."""
        return self.head.all(self.norm(x_RD))

    def logits_of(self, x_RD: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
        """float32[R, len(token_ids)]: the logits of these tokens alone."""
        return self.head.few(self.norm(x_RD), token_ids)


def _make_head(config: ModelConfig, weights: Weights, embeddings: torch.Tensor) -> OutputHead:
    name = "model.embed_tokens" if config.tie_embeddings else "lm_head"
    stored = StoredRows(partial(weights.read_rows, f"{name}.weight"))
    rows: WeightRows = TableRows(embeddings) if config.tie_embeddings else stored
    kept = weights.kept_head(name, config.vocab_size, config.hidden_size)
    if kept is not None:
        return OutputHead(kept, rows)
    table = embeddings
    if not config.tie_embeddings:
        table = weights.take(f"{name}.weight", (config.vocab_size, config.hidden_size))
        rows = stored if is_repacked(table) else TableRows(table)
    head = make_linear(table, batch_invariant=weights.batch_invariant, prefer_float32=True)
    return OutputHead(head, rows)


def _make_decoder(
    config: ModelConfig, layers: Sequence[LlamaLayer], dtype: torch.dtype
) -> CpuDecoder | None:
    """All layers in one call, where the C kernels serve each of them."""
    fused = [layer.fused() for layer in layers]
    served = [layer for layer in fused if layer is not None]
    if len(served) < len(layers) or not served:
        return None
    return CpuDecoder(
        served,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        epsilon=config.rms_norm_eps,
        dtype=dtype,
    )
