"""A Hugging Face ``config.json`` as `ModelConfig`.

Fields, defaults and both spellings of rotary scaling (``rope_scaling`` beside ``rope_theta``, and
``rope_parameters``) are those of `transformers`' own configurations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchradix.checkpoint.hf_experts import experts_config
from batchradix.checkpoint.hf_fields import MOST_LAYERS, Fields
from batchradix.checkpoint.hf_latent import latent_config
from batchradix.checkpoint.hf_quantisation import stored_weights
from batchradix.checkpoint.hf_rope import rope_config
from batchradix.checkpoint.model_config import Architecture, ModelConfig
from batchradix.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What `transformers` takes when ``config.json`` leaves a field out."""

    architecture: Architecture
    context_length: int
    num_kv_heads: int | None  # None: as many as query heads
    head_dim: int | None  # None: hidden_size / num_attention_heads
    sliding_window: int | None = None
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(
        architecture="LlamaForCausalLM",
        context_length=2048,
        num_kv_heads=None,
        head_dim=None,
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
    "mixtral": _Family(
        architecture="MixtralForCausalLM",
        context_length=131072,
        num_kv_heads=8,
        head_dim=None,
        rope_theta=1e6,
        rms_norm_eps=1e-5,
    ),
    "qwen2_moe": _Family(
        architecture="Qwen2MoeForCausalLM",
        context_length=32768,
        num_kv_heads=16,
        head_dim=None,
        sliding_window=4096,
    ),
    "qwen3_moe": _Family(
        architecture="Qwen3MoeForCausalLM",
        context_length=32768,
        num_kv_heads=4,
        head_dim=None,
        sliding_window=4096,
    ),
    "deepseek_v2": _Family(
        architecture="DeepseekV2ForCausalLM",
        context_length=2048,
        num_kv_heads=None,
        head_dim=None,
    ),
    "deepseek_v3": _Family(
        architecture="DeepseekV3ForCausalLM",
        context_length=4096,
        num_kv_heads=None,
        head_dim=None,
    ),
}
_NO_WINDOW = ("LlamaForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
_SUPPORTED = ", ".join(family.architecture for family in _FAMILIES.values())


def hf_config(path: Path, config: Mapping[str, Any]) -> ModelConfig:
    """The architecture that ``config`` describes; ``path`` is its file, for messages.

    Raises `ModelError` that names what cannot be run and says what to use instead.
    """
    family = _family(path, config)
    fields = Fields(path, config)
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
    name = family.architecture.removesuffix("ForCausalLM")
    mla = None
    if name in ("DeepseekV2", "DeepseekV3"):
        mla = latent_config(fields, name)
        num_kv_heads, head_dim = num_heads, mla.nope_dim + mla.rope_dim
    elif head_dim % 2:
        raise fields.error(f"heads of odd size {head_dim} cannot be rotated")
    activation = config.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise fields.error(f"activation {activation!r} is not supported; only silu is")
    in_attention = _attention_bias(fields, name)
    context_length = fields.integer("max_position_embeddings", family.context_length)
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        context_length=context_length,
        rms_norm_eps=fields.number("rms_norm_eps", family.rms_norm_eps),
        rope=rope_config(fields, context_length, family.rope_theta),
        tie_embeddings=fields.boolean("tie_word_embeddings"),
        attention_bias=in_attention[0],
        output_bias=in_attention[1],
        mlp_bias=fields.boolean("mlp_bias") if name in ("Llama", "DeepseekV2") else False,
        qk_norm=name in ("Qwen3", "Qwen3Moe"),
        sliding_window=_sliding_window(fields, family, context_length),
        mla=mla,
        moe=experts_config(fields, name),
        num_prediction_layers=fields.count("num_nextn_predict_layers", 0, MOST_LAYERS)
        if mla
        else 0,
        stored=stored_weights(fields),
    )


def _attention_bias(fields: Fields, name: str) -> tuple[bool, bool]:
    """Whether what makes queries, keys and values has biases, and whether the output has."""
    if name == "Qwen2":
        return True, False
    if name == "Qwen2Moe":
        return fields.boolean("qkv_bias", default=True), False
    if name in ("Mistral", "Mixtral"):
        return False, False
    bias = fields.boolean("attention_bias")
    return bias, bias


def _family(path: Path, config: Mapping[str, Any]) -> _Family:
    """The family of layers, after what is no plain text model has been refused."""
    model_type = str(config.get("model_type"))
    named = config.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise ModelError(f"{path}: architectures is {named!r}, not a list of names")
    name = named[0] if named else None
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


def _sliding_window(fields: Fields, family: _Family, context_length: int) -> int | None:
    """Tokens that every layer looks back over; None where that is the whole context."""
    config = fields.config
    if family.architecture in _NO_WINDOW:
        return None
    always = family.architecture in ("MistralForCausalLM", "MixtralForCausalLM")
    if not always and not fields.boolean("use_sliding_window"):
        return None
    if config.get("sliding_window", family.sliding_window) is None:
        return None
    window = fields.integer("sliding_window", family.sliding_window)
    if window >= context_length:
        return None
    if always or family.architecture == "Qwen3MoeForCausalLM":
        return window
    kinds = _layer_kinds(fields, family)
    if kinds == {"sliding_attention"}:
        return window
    if kinds == {"full_attention"}:
        return None
    raise fields.error(
        f"attention that slides over {window} tokens in some layers only is not supported; "
        f"use a model with full attention, or set use_sliding_window to false if its context "
        f"of {window} tokens is enough"
    )


def _layer_kinds(fields: Fields, family: _Family) -> set[str]:
    kinds = fields.config.get("layer_types")
    num_layers = fields.num_layers
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise fields.error(f"layer_types does not name the kind of {num_layers} layers")
        return {str(kind) for kind in kinds}
    full = fields.count("max_window_layers", 28)
    if family.architecture == "Qwen2MoeForCausalLM":  # every other one of the first
        sliding = {i for i in range(0, num_layers, 2) if i < full}
        return {
            "sliding_attention" if i in sliding else "full_attention" for i in range(num_layers)
        }
    return {"sliding_attention" if i >= full else "full_attention" for i in range(num_layers)}
