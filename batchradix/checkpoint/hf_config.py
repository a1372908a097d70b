"""A Hugging Face ``config.json`` as `ModelConfig`.

Fields, defaults and both spellings of rotary scaling (``rope_scaling`` beside ``rope_theta``, and
``rope_parameters``) are those of `transformers`' Llama, Mistral, Qwen2 and Qwen3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from batchradix.checkpoint.model_config import ModelConfig, RopeConfig
from batchradix.errors import ModelError

Architecture = Literal[
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What `transformers` takes when ``config.json`` leaves a field out."""

    architecture: Architecture
    context_length: int
    num_kv_heads: int | None  # None: as many as query heads
    head_dim: int | None  # None: hidden_size / num_attention_heads
    sliding_window: int | None


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(
        architecture="LlamaForCausalLM",
        context_length=2048,
        num_kv_heads=None,
        head_dim=None,
        sliding_window=None,
    ),
    "mistral": _Family(
        architecture="MistralForCausalLM",
        context_length=131072,
        num_kv_heads=8,
        head_dim=None,
        sliding_window=4096,
    ),
    "qwen2": _Family(
        architecture="Qwen2ForCausalLM",
        context_length=32768,
        num_kv_heads=32,
        head_dim=None,
        sliding_window=4096,
    ),
    "qwen3": _Family(
        architecture="Qwen3ForCausalLM",
        context_length=32768,
        num_kv_heads=32,
        head_dim=128,
        sliding_window=4096,
    ),
}
_SUPPORTED = ", ".join(family.architecture for family in _FAMILIES.values())


def hf_config(path: Path, config: Mapping[str, Any]) -> ModelConfig:
    """The architecture that ``config`` describes; ``path`` is its file, for messages.

    Raises `ModelError` that names what cannot be run and says what to use instead.
    """
    family = _family(path, config)
    fields = _Fields(path, config)
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    default_dim = family.head_dim or hidden_size // num_heads
    head_dim = fields.integer("head_dim", default_dim)
    num_kv_heads = fields.integer(
        "num_key_value_heads",
        num_heads if "num_key_value_heads" in config else family.num_kv_heads or num_heads,
    )
    if num_heads % num_kv_heads:
        raise fields.error(
            f"{num_heads} attention heads do not divide among {num_kv_heads} key-value heads"
        )
    if head_dim % 2:
        raise fields.error(f"heads of odd size {head_dim} cannot be rotated")
    activation = config.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise fields.error(f"activation {activation!r} is not supported; only silu is")
    model_type = family.architecture.removesuffix("ForCausalLM").lower()
    bias = fields.boolean("attention_bias") if model_type in ("llama", "qwen3") else False
    context_length = fields.integer("max_position_embeddings", family.context_length)
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        context_length=context_length,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields),
        tie_embeddings=fields.boolean("tie_word_embeddings"),
        attention_bias=bias or model_type == "qwen2",
        output_bias=bias,
        mlp_bias=fields.boolean("mlp_bias") if model_type == "llama" else False,
        qk_norm=model_type == "qwen3",
        sliding_window=_sliding_window(fields, family, context_length),
    )


def _family(path: Path, config: Mapping[str, Any]) -> _Family:
    """The family of layers, after what is no plain text model has been refused."""
    model_type = str(config.get("model_type"))
    named = config.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise ModelError(f"{path}: architectures is {named!r}, not a list of names")
    name = named[0] if named else None
    quantization = config.get("quantization_config", config.get("compression_config"))
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        raise ModelError(
            f"{path}: weights quantised with {method or 'an unknown method'} are not supported; "
            f"use the model's unquantised weights or a GGUF file of it"
        )
    if any(key in config for key in ("vision_config", "audio_config", "text_config")):
        raise ModelError(
            f"{path}: {name or model_type} is a vision or audio model; use a text model"
        )
    for family in _FAMILIES.values():
        if name == family.architecture:
            return family
    if name is None and model_type in _FAMILIES:
        return _FAMILIES[model_type]
    if name is not None and not name.endswith(("ForCausalLM", "LMHeadModel")):
        raise ModelError(
            f"{path}: {name} is not a text generation model (it embeds, classifies or sees); "
            f"supported are {_SUPPORTED}"
        )
    raise ModelError(
        f"{path}: architecture {name or model_type!r} is not supported; supported are {_SUPPORTED}"
    )


class _Fields:
    """``config.json`` with its values checked; null counts as absent, as in `transformers`."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self.path = path
        self.config = config

    def error(self, sentence: str) -> ModelError:
        return ModelError(f"{self.path}: {sentence}")

    def number(self, name: str, default: float | None = None) -> float:
        return self.positive(name, self.config.get(name), default)

    def positive(self, name: str, value: Any, default: float | None = None) -> float:
        if value is None:
            value = default
        if value is None:
            raise self.error(f"{name} is missing; the folder is incomplete, fetch the model again")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(f"{name} is {value!r}, not a number")
        if not math.isfinite(value) or value <= 0:
            raise self.error(f"{name} is {value!r}, but must be above 0")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if value != int(value):
            raise self.error(f"{name} is {value!r}, not a whole number")
        return int(value)

    def boolean(self, name: str) -> bool:
        value = self.config.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(f"{name} is {value!r}, not true or false")
        return bool(value)


def _rope(fields: _Fields) -> RopeConfig:
    config = fields.config
    old = config.get("rope_scaling") or {}
    new = config.get("rope_parameters") or {}
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        raise fields.error("rope_scaling is not an object")
    scaling = {**old, **new}
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise fields.error("rotary embedding that differs between layers is not supported")
    if fields.positive("partial_rotary_factor", _partial(config, scaling), 1.0) != 1.0:
        raise fields.error("rotary embedding over part of a head is not supported")
    theta = scaling.get("rope_theta", config.get("rope_theta"))
    kind = scaling.get("rope_type", scaling.get("type")) or "default"
    rope_theta = float(fields.positive("rope_theta", theta, 10000.0))
    if kind == "default":
        return RopeConfig(theta=rope_theta)

    def value(name: str) -> float:
        return float(fields.positive(f"{name} of rope_scaling", scaling.get(name)))

    if kind == "linear":
        return RopeConfig(theta=rope_theta, kind="linear", factor=value("factor"))
    if kind == "llama3":
        low, high = value("low_freq_factor"), value("high_freq_factor")
        if low >= high:
            raise fields.error(f"low_freq_factor {low} must be below high_freq_factor {high}")
        return RopeConfig(
            theta=rope_theta,
            kind="llama3",
            factor=value("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_context_length=int(value("original_max_position_embeddings")),
        )
    raise fields.error(
        f"rotary scaling {kind!r} is not supported; supported are default, linear and llama3"
    )


def _partial(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> Any:
    return scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))


def _sliding_window(fields: _Fields, family: _Family, context_length: int) -> int | None:
    """Tokens that every layer looks back over; None where that is the whole context."""
    config = fields.config
    if family.sliding_window is None:
        return None
    if family.architecture != "MistralForCausalLM" and not fields.boolean("use_sliding_window"):
        return None
    if "sliding_window" in config and config["sliding_window"] is None:
        return None
    window = fields.integer("sliding_window", family.sliding_window)
    if window >= context_length:
        return None
    if family.architecture == "MistralForCausalLM":
        return window
    kinds = _layer_kinds(fields)
    if kinds == {"sliding_attention"}:
        return window
    if kinds == {"full_attention"}:
        return None
    raise fields.error(
        f"attention that slides over {window} tokens in some layers only is not supported; "
        f"use a model with full attention, or set use_sliding_window to false if its context "
        f"of {window} tokens is enough"
    )


def _layer_kinds(fields: _Fields) -> set[str]:
    kinds = fields.config.get("layer_types")
    num_layers = fields.integer("num_hidden_layers")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise fields.error(f"layer_types does not name the kind of {num_layers} layers")
        return {str(kind) for kind in kinds}
    full = cast(int, fields.config.get("max_window_layers", 28))
    return {"sliding_attention" if i >= full else "full_attention" for i in range(num_layers)}
