"""A GGUF file's metadata as `ModelConfig` and as the content of a ``tokenizer.json``."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from batchradix.checkpoint.gguf_header import GgufHeader
from batchradix.checkpoint.model_config import ModelConfig, RopeConfig
from batchradix.errors import ModelError

_ARCHITECTURES: Mapping[
    str, Literal["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
] = {
    "llama": "LlamaForCausalLM",  # Mistral files say llama too: the same layers
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_NOT_GENERATIVE = {
    "bert": "an embedding model",
    "nomic-bert": "an embedding model",
    "jina-bert-v2": "an embedding model",
    "clip": "a vision projector",
}
# Llama 3.1 and later all have these; only the factor differs between sizes.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192


def gguf_config(path: Path, header: GgufHeader) -> ModelConfig:
    """The architecture that the file describes. Raises `ModelError` for what cannot be run."""
    architecture = _architecture(path, header)
    _refuse_quantisations(path, header)
    fields = _Fields(path, header.metadata, header.metadata["general.architecture"])
    num_heads = fields.integer("attention.head_count")
    hidden_size = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", hidden_size // max(1, num_heads))
    if fields.integer("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{path}: rotary embedding over part of a head is not supported")
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{path}: keys and values of different sizes are not supported")
    num_layers = fields.integer("block_count")
    tensors = header.tensors
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{path} has no tensor token_embd.weight; give a whole model")
    context_length = fields.integer("context_length")
    window = fields.integer("attention.sliding_window", 0)
    if architecture != "LlamaForCausalLM" and 0 < window < context_length:
        raise ModelError(
            f"{path}: attention that slides over {window} tokens in some layers is not "
            f"supported; use a model with full attention"
        )
    return ModelConfig(
        architecture=architecture,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        context_length=context_length,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(path, header, fields, head_dim),
        tie_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        layer_windows=(window,) * num_layers if 0 < window < context_length else (),
    )


def _architecture(
    path: Path, header: GgufHeader
) -> Literal["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]:
    metadata = header.metadata
    if metadata.get("general.type") == "adapter":
        raise ModelError(f"{path} is an adapter, not a model; merge it into its base model first")
    if metadata.get("split.count", 0) > 1:
        raise ModelError(
            f"{path} is one part of {metadata['split.count']}; "
            f"join the parts first (llama-gguf-split --merge)"
        )
    name = str(metadata.get("general.architecture"))
    if name in _NOT_GENERATIVE:
        raise ModelError(f"{path} is {_NOT_GENERATIVE[name]} ({name}); use a text model")
    if name not in _ARCHITECTURES:
        raise ModelError(
            f"{path} has architecture {name!r}, which is not supported as GGUF; supported are "
            f"{', '.join(_ARCHITECTURES)}, and others as safetensors"
        )
    if metadata.get(f"{name}.expert_count", 0) > 0:
        raise ModelError(
            f"{path} is a mixture of experts, which is not supported as GGUF; use the model's "
            f"safetensors"
        )
    if metadata.get(f"{name}.pooling_type", 0) > 0:
        raise ModelError(f"{path} is an embedding model; use a text model")
    return _ARCHITECTURES[name]


def _refuse_quantisations(path: Path, header: GgufHeader) -> None:
    """Refuses tensors that the ``gguf`` package knows but cannot turn into numbers."""
    import numpy as np
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    for ggml_type in sorted({tensor.ggml_type for tensor in header.tensors.values()}):
        kind = GGMLQuantizationType(ggml_type)
        try:
            dequantize(np.zeros(GGML_QUANT_SIZES[kind][1], dtype=np.uint8), kind)
        except NotImplementedError:
            raise ModelError(
                f"{path}: weights in {kind.name} cannot be read; "
                f"use a file in another quantisation, such as Q8_0 or Q4_K_M"
            ) from None


class _Fields:
    """Metadata of the file's architecture, checked."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], prefix: str) -> None:
        self.path = path
        self.metadata = metadata
        self.prefix = prefix

    def number(self, name: str, default: float | None = None) -> float:
        key = f"{self.prefix}.{name}"
        value = self.metadata.get(key, default)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]  # written once a layer
        if isinstance(value, list):
            raise ModelError(f"{self.path}: {key} differs between layers, which is not supported")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelError(f"{self.path} is damaged: {key} is {value!r}, not a number")
        if not math.isfinite(value) or value < 0:
            raise ModelError(f"{self.path} is damaged: {key} is {value!r}")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if value != int(value) or (value < 1 and default is None):
            raise ModelError(f"{self.path} is damaged: {self.prefix}.{name} is {value!r}")
        return int(value)


def _rope(path: Path, header: GgufHeader, fields: _Fields, head_dim: int) -> RopeConfig:
    theta = float(fields.number("rope.freq_base", 10000.0))
    kind = header.metadata.get(f"{fields.prefix}.rope.scaling.type", "none")
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    if kind not in ("none", "linear"):
        raise ModelError(
            f"{path}: rotary scaling {kind!r} is not supported; supported are linear and llama3"
        )
    if "rope_freqs.weight" in header.tensors:
        return _llama3_rope(path, header, theta, head_dim)
    if factor not in (0.0, 1.0):
        return RopeConfig(theta=theta, kind="linear", factor=float(factor))
    return RopeConfig(theta=theta)


def _llama3_rope(path: Path, header: GgufHeader, theta: float, head_dim: int) -> RopeConfig:
    """Recovers Llama 3's scaling from the factors that GGUF stores for each frequency.

    The file does not keep the parameters, only their result; the one candidate that all Llama 3
    models share is computed again and must agree.
    """
    tensor = header.tensors["rope_freqs.weight"]
    if tensor.ggml_type != 0 or tensor.shape != (head_dim // 2,):
        raise ModelError(f"{path}: rope_freqs.weight is not float32[{head_dim // 2}]")
    with path.open("rb") as file:
        file.seek(tensor.offset_bytes)
        stored = struct.unpack(f"<{head_dim // 2}f", file.read(tensor.num_bytes))
    rope = RopeConfig(
        theta=theta,
        kind="llama3",
        factor=float(max(stored)),
        low_freq_factor=_LLAMA3_LOW,
        high_freq_factor=_LLAMA3_HIGH,
        original_context_length=_LLAMA3_CONTEXT,
    )
    if not all(
        math.isclose(ours, theirs, rel_tol=1e-4)
        for ours, theirs in zip(_llama3_factors(rope, head_dim), stored, strict=True)
    ):
        raise ModelError(
            f"{path}: its rotary frequencies (rope_freqs.weight) follow no known scaling; "
            f"use the model's safetensors folder"
        )
    return rope


def _llama3_factors(rope: RopeConfig, head_dim: int) -> list[float]:
    """What each of the ``head_dim // 2`` frequencies is divided by (Llama 3.1)."""
    factors = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * rope.theta ** (2 * i / head_dim)
        turns = rope.original_context_length / wavelength
        if turns > rope.high_freq_factor:
            factors.append(1.0)
        elif turns < rope.low_freq_factor:
            factors.append(rope.factor)
        else:
            span = rope.high_freq_factor - rope.low_freq_factor
            smooth = (turns - rope.low_freq_factor) / span
            factors.append(1 / ((1 - smooth) / rope.factor + smooth))
    return factors
