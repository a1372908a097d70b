"""The families of a ``config.json``, and what `transformers` takes where it leaves a field out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from batchradix.checkpoint.hf_fields import Fields
from batchradix.checkpoint.hf_gemma import gemma, gemma2, gemma3
from batchradix.checkpoint.hf_gpt_oss import gpt_oss
from batchradix.checkpoint.hf_layers import every_layer, qwen_layers
from batchradix.checkpoint.hf_llama_kin import granite, olmo3, smollm3
from batchradix.checkpoint.hf_phi import phi3
from batchradix.checkpoint.model_config import Architecture


def _nothing(fields: Fields, context_length: int) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """``defaults``: of fields that are absent. ``own``: gives those parts of a `ModelConfig` that
    are not as in a Llama, from the fields and the context length."""

    architecture: Architecture
    context_length: int
    num_kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    defaults: Mapping[str, Any] = field(default_factory=dict)
    own: Callable[[Fields, int], Mapping[str, Any]] = _nothing


FAMILIES: Mapping[str, Family] = {
    "llama": Family(architecture="LlamaForCausalLM", context_length=2048),
    "mistral": Family(
        architecture="MistralForCausalLM",
        context_length=131072,
        num_kv_heads=8,
        defaults={"sliding_window": 4096},
        own=every_layer,
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        context_length=32768,
        num_kv_heads=32,
        defaults={"sliding_window": 4096},
        own=qwen_layers,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        context_length=32768,
        num_kv_heads=32,
        head_dim=128,
        defaults={"sliding_window": 4096},
        own=qwen_layers,
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        context_length=131072,
        num_kv_heads=8,
        rope_theta=1e6,
        rms_norm_eps=1e-5,
        own=every_layer,
    ),
    "qwen2_moe": Family(
        architecture="Qwen2MoeForCausalLM",
        context_length=32768,
        num_kv_heads=16,
        defaults={"sliding_window": 4096},
        own=qwen_layers,
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        context_length=32768,
        num_kv_heads=4,
        defaults={"sliding_window": 4096},
        own=qwen_layers,
    ),
    "deepseek_v2": Family(architecture="DeepseekV2ForCausalLM", context_length=2048),
    "deepseek_v3": Family(architecture="DeepseekV3ForCausalLM", context_length=4096),
    "gemma": Family(
        architecture="GemmaForCausalLM",
        context_length=8192,
        num_kv_heads=16,
        head_dim=256,
        defaults={"tie_word_embeddings": True},
        own=gemma,
    ),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        context_length=8192,
        num_kv_heads=4,
        head_dim=256,
        defaults={
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        own=gemma2,
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        context_length=131072,
        num_kv_heads=4,
        head_dim=256,
        defaults={
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
        },
        own=gemma3,
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        context_length=4096,
        rms_norm_eps=1e-5,
        defaults={"original_max_position_embeddings": 4096},
        own=phi3,
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        context_length=131072,
        num_kv_heads=8,
        head_dim=64,
        rope_theta=150000.0,
        rms_norm_eps=1e-5,
        defaults={
            "attention_bias": True,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
        own=gpt_oss,
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        context_length=32768,
        num_kv_heads=4,
        defaults={"tie_word_embeddings": True},
        own=smollm3,
    ),
    "olmo2": Family(architecture="Olmo2ForCausalLM", context_length=2048, rms_norm_eps=1e-5),
    "olmo3": Family(
        architecture="Olmo3ForCausalLM",
        context_length=2048,
        rope_theta=500000.0,
        rms_norm_eps=1e-5,
        defaults={"sliding_window": 4096},
        own=olmo3,
    ),
    "granite": Family(architecture="GraniteForCausalLM", context_length=2048, own=granite),
}
SUPPORTED = ", ".join(family.architecture for family in FAMILIES.values())
