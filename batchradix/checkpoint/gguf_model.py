"""A GGUF file's metadata as `ModelConfig` and as the content of a ``tokenizer.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchradix.checkpoint.gguf_families import OWN
from batchradix.checkpoint.gguf_fields import GgufFields, read_floats
from batchradix.checkpoint.gguf_header import GgufHeader
from batchradix.checkpoint.model_config import Architecture, ModelConfig, RopeConfig
from batchradix.errors import ModelError

_ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": "LlamaForCausalLM",  # Mistral files say llama too: the same layers
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
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
    fields = GgufFields(path, header.metadata, header.metadata["general.architecture"])
    num_heads = fields.integer("attention.head_count")
    hidden_size = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", hidden_size // max(1, num_heads))
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{path}: keys and values of different sizes are not supported")
    tensors = header.tensors
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{path} has no tensor token_embd.weight; give a whole model")
    parts: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_layers": fields.integer("block_count"),
        "num_heads": num_heads,
        "num_kv_heads": fields.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "context_length": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "tie_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "output_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "qk_norm": "blk.0.attn_q_norm.weight" in tensors,
    }
    if architecture in OWN:
        return ModelConfig(**{**parts, **OWN[architecture](path, header, fields, parts)})
    if fields.integer("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{path}: rotary embedding over part of a head is not supported")
    window = fields.integer("attention.sliding_window", 0)
    if 0 < window < parts["context_length"]:
        if architecture != "LlamaForCausalLM":
            raise ModelError(
                f"{path}: attention that slides over {window} tokens in some layers is not "
                f"supported as GGUF; use the model's safetensors"
            )
        parts["layer_windows"] = (window,) * parts["num_layers"]
    return ModelConfig(**parts, rope=_rope(path, header, fields, head_dim))


def _architecture(path: Path, header: GgufHeader) -> Architecture:
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


def _rope(path: Path, header: GgufHeader, fields: GgufFields, head_dim: int) -> RopeConfig:
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
    stored = read_floats(path, header, "rope_freqs.weight", head_dim // 2)
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
