"""A Hugging Face ``config.json`` as `ModelConfig`.

Fields, defaults and both spellings of rotary scaling (``rope_scaling`` beside ``rope_theta``, and
``rope_parameters``) are those of `transformers`' own configurations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchradix.checkpoint.hf_experts import experts_config
from batchradix.checkpoint.hf_families import FAMILIES, SUPPORTED, Family
from batchradix.checkpoint.hf_fields import MOST_LAYERS, Fields
from batchradix.checkpoint.hf_latent import latent_config
from batchradix.checkpoint.hf_quantisation import stored_weights
from batchradix.checkpoint.hf_rope import rope_config, rope_scaling, served_context
from batchradix.checkpoint.model_config import ModelConfig, RopeConfig
from batchradix.errors import ModelError


def hf_config(path: Path, config: Mapping[str, Any]) -> ModelConfig:
    """The architecture that ``config`` describes; ``path`` is its file, for messages.

    Raises `ModelError` that names what cannot be run and says what to use instead.
    """
    text_part = _text_part(path, config)
    family = _family(path, config if text_part is None else text_part)
    fields = Fields(path, {**family.defaults, **(config if text_part is None else text_part)})
    name = family.architecture.removesuffix("ForCausalLM")
    original_length = fields.integer("max_position_embeddings", family.context_length)
    in_attention = _attention_bias(fields, name)
    parts: dict[str, Any] = {
        **_heads(fields, family),
        "architecture": family.architecture,
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": fields.num_layers,
        "rms_norm_eps": _epsilon(fields, family),
        "tie_embeddings": fields.boolean(
            "tie_word_embeddings", default=bool(family.defaults.get("tie_word_embeddings"))
        ),
        "attention_bias": in_attention[0],
        "output_bias": in_attention[1],
        "mlp_bias": name in _MLP_BIAS and fields.boolean("mlp_bias"),
        "qk_norm": name in ("Qwen3", "Qwen3Moe"),
        "moe": experts_config(fields, name),
        "text_part": text_part is not None,
        **family.own(fields, original_length),
    }
    if not parts.get("mxfp4"):
        parts["stored"] = stored_weights(fields)
    if not name.startswith("Gemma"):
        _check_activation(fields)
    if "rope" not in parts:
        parts["rope"] = rope_config(fields, original_length, family.rope_theta)
    if parts["mla"] is not None:
        parts["num_prediction_layers"] = fields.count("num_nextn_predict_layers", 0, MOST_LAYERS)
    parts["rope"] = _partly(fields, name, parts["rope"], parts["head_dim"])
    parts["context_length"] = served_context(fields, parts["rope"], original_length)
    return ModelConfig(**parts)


_MLP_BIAS = ("Llama", "DeepseekV2", "SmolLM3", "Granite")


def _heads(fields: Fields, family: Family) -> Mapping[str, Any]:
    num_heads = fields.integer("num_attention_heads")
    default_dim = family.head_dim or fields.integer("hidden_size") // num_heads
    head_dim = fields.integer("head_dim", default_dim)
    num_kv_heads = fields.integer(
        "num_key_value_heads",
        num_heads if "num_key_value_heads" in fields.config else family.num_kv_heads or num_heads,
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
    return {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "mla": mla}


def _epsilon(fields: Fields, family: Family) -> float:
    epsilon = fields.number("rms_norm_eps", family.rms_norm_eps)
    if epsilon > 1:
        raise fields.error(f"rms_norm_eps is {epsilon!r}, but must be 1 or less")
    return epsilon


def _check_activation(fields: Fields) -> None:
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.error(f"activation {activation!r} is not supported; only silu is")


def _partly(fields: Fields, name: str, rope: RopeConfig, head_dim: int) -> RopeConfig:
    """The rotary embedding, over part of a head where the config says so (Phi-3)."""
    scaling = rope_scaling(fields)
    given = scaling.get("partial_rotary_factor", fields.config.get("partial_rotary_factor"))
    share = fields.positive("partial_rotary_factor", given, 1.0)
    rotated = head_dim if share == 1.0 else int(head_dim * share)
    if rope.divisors and 2 * len(rope.divisors) != rotated:
        raise fields.error(
            f"short_factor of rope_scaling has {len(rope.divisors)} numbers, but {rotated} "
            f"elements of a head are rotated, which takes {rotated // 2}"
        )
    if rope.kind == "dynamic" and rotated < 4:
        raise fields.error(f"heads of {rotated} elements are too small for dynamic scaling")
    if rotated == head_dim:
        return rope
    if name != "Phi3" or share > 1:
        raise fields.error(f"rotary embedding over {share} of a head is not supported")
    if rotated % 2 or rotated < 2 or head_dim % 2:
        raise fields.error(f"parts of heads of odd size {rotated} cannot be rotated")
    return replace(rope, rotated_dim=rotated)


def _attention_bias(fields: Fields, name: str) -> tuple[bool, bool]:
    """Whether what makes queries, keys and values has biases, and whether the output has."""
    if name == "Qwen2":
        return True, False
    if name == "Qwen2Moe":
        return fields.boolean("qkv_bias", default=True), False
    if name in ("Mistral", "Mixtral", "Phi3"):
        return False, False
    bias = fields.boolean("attention_bias")
    return bias, bias


def _named(path: Path, config: Mapping[str, Any]) -> str | None:
    """The architecture that the config names first."""
    named = config.get("architectures")
    if named is None:
        return None
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise ModelError(f"{path}: architectures is {named!r}, not a list of names")
    return named[0] if named else None


def _text_part(path: Path, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a model that sees says of its text part, where that can be run alone: Gemma 3."""
    if _named(path, config) != "Gemma3ForConditionalGeneration":
        return None
    text = Fields(path, config).object("text_config")
    of_both = ("quantization_config", "compression_config")
    return {**text, "architectures": ["Gemma3ForCausalLM"]} | {
        key: config[key] for key in of_both if key in config
    }


def _family(path: Path, config: Mapping[str, Any]) -> Family:
    """The family of layers, after what is no plain text model has been refused."""
    model_type = str(config.get("model_type"))
    name = _named(path, config)
    if any(key in config for key in ("vision_config", "audio_config", "text_config")):
        raise ModelError(
            f"{path}: {name or model_type} is a vision or audio model; use a text model"
        )
    for family in FAMILIES.values():
        if name == family.architecture:
            return family
    if name is None and model_type in FAMILIES:
        return FAMILIES[model_type]
    if name is not None and not name.endswith(("ForCausalLM", "LMHeadModel")):
        raise ModelError(
            f"{path}: {name} is not a text generation model (it embeds, classifies or sees); "
            f"supported are {SUPPORTED}"
        )
    raise ModelError(
        f"{path}: architecture {name or model_type!r} is not supported; supported are {SUPPORTED}"
    )
