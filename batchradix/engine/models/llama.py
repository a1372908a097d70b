"""Llama and Mistral (Touvron et al. 2023; Jiang et al. 2023), and what other families change.

Shapes: T tokens, D hidden, H query heads, K key heads, E head dimension, F feed-forward,
R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from batchradix.checkpoint.model_config import ModelConfig
from batchradix.engine.attention.cpu_backend import CpuAttention
from batchradix.engine.layers.embedding import Embedding
from batchradix.engine.layers.fused import fused_layer
from batchradix.engine.layers.head import OutputHead, StoredRows, TableRows, WeightRows
from batchradix.engine.layers.linear import Rows, is_repacked, make_linear
from batchradix.engine.layers.moe import MoE
from batchradix.engine.layers.norm import NormBefore, RMSNorm
from batchradix.engine.layers.rotary import Angles, LayerRotary
from batchradix.engine.models.batch import Batch
from batchradix.engine.models.feed_forward import MLP, feed_forward
from batchradix.engine.models.load import Weights
from batchradix_kernels.decoder import CpuDecoder, DecoderLayer
from batchradix_kernels.rope import rope

Behind = Callable[[torch.Tensor], torch.Tensor]
HeadNorms = tuple[torch.Tensor, torch.Tensor, float]


class Attention(Protocol):
    """The attention of a layer: normalised rows, in 8 bits where ``is_quantised``, to [T, D]."""

    @property
    def is_quantised(self) -> bool: ...

    def __call__(self, x_TD: Rows, angles: Angles | None, batch: Batch) -> torch.Tensor: ...


class LlamaAttention:
    norms: HeadNorms | None = None  # weights of query and key heads, epsilon
    sinks: torch.Tensor | None = None  # float32[H]
    is_plain = True  # nothing but what can be fused is done

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

    def project(self, x_TD: Rows) -> torch.Tensor:
        """Queries, keys and values of all heads side by side, contiguous [T, (H + 2K) · E]."""
        return self.qkv_proj(x_TD)

    def __call__(self, x_TD: Rows, angles: Angles | None, batch: Batch) -> torch.Tensor:
        qkv = self.project(x_TD)
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        if angles is not None:
            rope(heads, *angles, self.num_heads, self.num_kv_heads, self.norms)
        sizes = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        q_THE, k_TKE, v_TKE = torch.split(heads, sizes, dim=1)
        more = {} if self.sinks is None else {"sinks_H": self.sinks}
        out = batch.attention.run(self.layer, q_THE, k_TKE, v_TKE, batch.pool, batch.plan, **more)
        return self.o_proj(out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Attention and what follows, with what stands before and behind each of them."""

    attention: Attention
    mlp: MLP | MoE
    input_norm: NormBefore
    mlp_norm: NormBefore
    behind_attention: Behind | None = None
    behind_mlp: Behind | None = None

    def __call__(
        self, x_TD: torch.Tensor, left: torch.Tensor | None, angles: Angles | None, batch: Batch
    ) -> torch.Tensor:
        """Adds to ``x_TD`` in place; what is left to be added to it is given and returned."""
        attention, mlp = self.attention, self.mlp
        rows = self.input_norm.before(attention.is_quantised, x_TD, left)
        left = attention(rows, angles, batch)
        if self.behind_attention is not None:
            left = self.behind_attention(left)
        out = mlp(self.mlp_norm.before(mlp.is_quantised, x_TD, left))
        return out if self.behind_mlp is None else self.behind_mlp(out)

    def fused(self) -> DecoderLayer | None:
        """For `CpuDecoder`, where it serves."""
        attention, mlp = self.attention, self.mlp
        if not isinstance(attention, LlamaAttention) or not attention.is_plain:
            return None
        is_plain = self.behind_attention is None and self.behind_mlp is None
        if not isinstance(mlp, MLP) or not is_plain:
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
        self.rotary = LayerRotary(config.ropes, config.rope_dim, weights.device)
        table = weights.take("model.embed_tokens.weight", table_size)
        self.embedding = Embedding(table, config.embedding_scale)
        self.layers = [
            self.make_layer(config, i, self.attention_class(config, i, weights), weights)
            for i in range(config.num_layers)
        ]
        self.norm = norm_of(config, weights, "model.norm")
        self.head = _make_head(config, weights, table)
        self._decoder = _make_decoder(config, self.layers, weights.dtype)
        unused = ["lm_head.weight"] if config.tie_embeddings else []
        for extra in range(config.num_prediction_layers):
            unused.append(f"model.layers.{config.num_layers + extra}.")
        weights.finish(unused=unused)

    def make_layer(
        self, config: ModelConfig, layer: int, attention: Attention, weights: Weights
    ) -> Layer:
        """Norms before each part."""
        name = f"model.layers.{layer}"
        return Layer(
            attention=attention,
            mlp=feed_forward(config, layer, weights),
            input_norm=norm_of(config, weights, f"{name}.input_layernorm"),
            mlp_norm=norm_of(config, weights, f"{name}.post_attention_layernorm"),
        )

    @property
    def is_recordable(self) -> bool:
        return all(layer.mlp.is_recordable for layer in self.layers)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states [T, D] before the last norm, in the model's dtype."""
        x_TD = self.embedding(batch.token_ids)
        angles = self.rotary.angles(batch.positions)
        if self._decoder is not None and isinstance(batch.attention, CpuAttention):
            assert angles[0] is not None
            return self._decoder.run(x_TD, *angles[0], batch.plan, batch.pool)
        left: torch.Tensor | None = None
        for layer, of_layer in zip(self.layers, angles, strict=True):
            left = layer(x_TD, left, of_layer, batch)
        return x_TD if left is None else x_TD.add_(left)

    def logits(self, x_RD: torch.Tensor) -> torch.Tensor:
        """Rows of `forward`'s result to [R, V], in the model's dtype or float32."""
        return self.head.all(self.norm(x_RD))

    def logits_of(self, x_RD: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
        """float32[R, len(token_ids)]: the logits of these tokens alone."""
        return self.head.few(self.norm(x_RD), token_ids)


def norm_of(config: ModelConfig, weights: Weights, name: str) -> RMSNorm:
    """A norm over hidden states."""
    return RMSNorm(weights.norm(f"{name}.weight", config.hidden_size, config), config.rms_norm_eps)


def _make_head(config: ModelConfig, weights: Weights, embeddings: torch.Tensor) -> OutputHead:
    name = "model.embed_tokens" if config.tie_embeddings else "lm_head"
    stored = StoredRows(partial(weights.read_rows, f"{name}.weight"))
    rows: WeightRows = TableRows(embeddings) if config.tie_embeddings else stored
    finish = (config.logit_scale, config.logit_softcap)
    kept = weights.kept_head(name, config.vocab_size, config.hidden_size)
    if kept is not None:
        return OutputHead(kept, rows, *finish)
    table = embeddings
    if not config.tie_embeddings:
        table = weights.take(f"{name}.weight", (config.vocab_size, config.hidden_size))
        rows = stored if is_repacked(table) else TableRows(table)
    head = make_linear(table, batch_invariant=weights.batch_invariant, prefer_float32=True)
    return OutputHead(head, rows, *finish)


def _make_decoder(
    config: ModelConfig, layers: Sequence[Layer], dtype: torch.dtype
) -> CpuDecoder | None:
    """All layers in one call, where the C kernels serve each of them and all rotate alike."""
    if config.layer_ropes:
        return None
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
