"""Gemma and Phi-3 as GGUF, whose metadata leave to the reader what llama.cpp knows of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from batchradix.checkpoint.gguf_fields import GgufFields, read_floats
from batchradix.checkpoint.gguf_header import GgufHeader
from batchradix.checkpoint.model_config import Architecture, RopeConfig
from batchradix.errors import ModelError

Parts = dict[str, Any]
Own = Callable[[Path, GgufHeader, GgufFields, Parts], Mapping[str, Any]]

# Of these sizes alone scores are divided by the root of the hidden size a head, which files do not
# say: layers of Gemma 2 and 3 27B.
_SCALED_BY_HIDDEN = {"Gemma2ForCausalLM": 46, "Gemma3ForCausalLM": 62}


def _gemma(path: Path, header: GgufHeader, fields: GgufFields, parts: Parts) -> Mapping[str, Any]:
    """The converter has added 1 to the weights of norms already."""
    return {
        "rope": RopeConfig(theta=float(fields.number("rope.freq_base", 10000.0))),
        "activation": "gelu_tanh",
        "norm_offset": 0.0,
        "embedding_scale": parts["hidden_size"] ** 0.5,
    }


def _gemma2(path: Path, header: GgufHeader, fields: GgufFields, parts: Parts) -> Mapping[str, Any]:
    slides = [i % 2 == 0 for i in range(parts["num_layers"])]
    return {
        **_gemma(path, header, fields, parts),
        **_scores(fields, parts, cap=30.0),
        **_windows(fields, parts, slides, window=4096),
        "attention_softcap": _cap(fields, "attn_logit_softcapping", 50.0),
    }


def _gemma3(path: Path, header: GgufHeader, fields: GgufFields, parts: Parts) -> Mapping[str, Any]:
    slides = [(i + 1) % 6 != 0 for i in range(parts["num_layers"])]
    rope = RopeConfig(theta=float(fields.number("rope.freq_base", 1e6)))
    kind = fields.metadata.get(f"{fields.prefix}.rope.scaling.type", "none")
    if kind == "linear":
        factor = float(fields.number("rope.scaling.factor"))
        rope = RopeConfig(theta=rope.theta, kind="linear", factor=factor)
    elif kind != "none":
        raise _unknown_scaling(path, kind)
    local = RopeConfig(theta=float(fields.number("rope.freq_base_swa", 1e4)))
    return {
        **_gemma(path, header, fields, parts),
        **_scores(fields, parts),
        **_windows(fields, parts, slides),
        "rope": rope,
        "layer_ropes": tuple(local if slide else rope for slide in slides),
        "qk_norm": True,
    }


def _phi3(path: Path, header: GgufHeader, fields: GgufFields, parts: Parts) -> Mapping[str, Any]:
    head_dim, context_length = parts["head_dim"], parts["context_length"]
    rotated = fields.integer("rope.dimension_count", head_dim)
    if rotated > head_dim or rotated % 2 or head_dim % 2:
        raise ModelError(f"{path} is damaged: {rotated} elements of {head_dim} cannot be rotated")
    theta = float(fields.number("rope.freq_base", 10000.0))
    dim = None if rotated == head_dim else rotated
    rope = RopeConfig(theta=theta, rotated_dim=dim)
    if "rope_factors_short.weight" in header.tensors:
        original = fields.integer("rope.scaling.original_context_length")
        rope = RopeConfig(
            theta=theta,
            kind="longrope",
            original_context_length=original,
            divisors=read_floats(path, header, "rope_factors_short.weight", rotated // 2),
            amplitude=float(fields.number("rope.scaling.attn_factor", 1.0)),
            rotated_dim=dim,
        )
        context_length = min(context_length, original)
    elif fields.metadata.get(f"{fields.prefix}.rope.scaling.type", "none") != "none":
        raise _unknown_scaling(path, fields.metadata[f"{fields.prefix}.rope.scaling.type"])
    return {
        **_windows(fields, parts, [True] * parts["num_layers"]),
        "context_length": context_length,
        "rope": rope,
        "fused_files": True,
    }


def _scores(fields: GgufFields, parts: Parts, cap: float = 0.0) -> Mapping[str, Any]:
    divisor = parts["head_dim"]
    if parts["num_layers"] == _SCALED_BY_HIDDEN[parts["architecture"]]:
        divisor = parts["hidden_size"] / parts["num_heads"]
    return {
        "attention_scale": float(fields.number("attention.scale", 0.0)) or divisor**-0.5,
        "logit_softcap": _cap(fields, "final_logit_softcapping", cap),
    }


def _cap(fields: GgufFields, name: str, default: float) -> float | None:
    """None where it is 0."""
    return float(fields.number(name, default)) or None


def _windows(
    fields: GgufFields, parts: Parts, slides: list[bool], window: int = 0
) -> Mapping[str, Any]:
    window = fields.integer("attention.sliding_window", window)
    if not 0 < window < parts["context_length"]:
        return {}
    return {"layer_windows": tuple(window if slide else None for slide in slides)}


def _unknown_scaling(path: Path, kind: Any) -> ModelError:
    return ModelError(
        f"{path}: rotary scaling {kind!r} is not supported as GGUF for this architecture; use the "
        f"model's safetensors"
    )


OWN: Mapping[Architecture, Own] = {
    "GemmaForCausalLM": _gemma,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Phi3ForCausalLM": _phi3,
}
