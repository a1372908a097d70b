"""Tiny random models saved with transformers, runners on them, and steps put together by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from batchradix.checkpoint.checkpoint import open_checkpoint
from batchradix.engine.model_runner import ModelRunner
from batchradix.engine.step import Step, empty_i64
from batchradix.settings import EngineSettings

VOCAB = 97
NUM_SLOTS = 200
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
}
YARN_OF_DEEPSEEK = YARN | {"mscale": 0.9, "mscale_all_dim": 0.7, "beta_fast": 16, "beta_slow": 2}
EXPERTS = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 3,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
LATENT = EXPERTS | {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12,
    "v_head_dim": 24,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-5,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.3, 1.5, 2.0, 2.2, 3.0],
    "long_factor": [9.0] * 6,
}
CAPS = {"attn_logit_softcapping": 0.6, "final_logit_softcapping": 1.5}
GEMMA = {"head_dim": 16, "tie_word_embeddings": True, "query_pre_attn_scalar": 24}
SLIDING = {"head_dim": 16, "sliding_window": 5}  # prompts are several windows long
V3 = {"q_lora_rank": 28, "n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 0}
FAMILIES = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1, "head_dim": 20}),
    "llama-no-groups": ("Llama", {"num_key_value_heads": 4}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-rope-llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-rope-linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-rope-yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {"use_sliding_window": False}),
    "qwen3": ("Qwen3", {"head_dim": 16, "use_sliding_window": False}),
    "qwen3-tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "decoder_sparse_step": 2,
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "deepseek-v2-lite": ("DeepseekV2", LATENT | {"rope_parameters": YARN_OF_DEEPSEEK}),
    "deepseek-v2": (
        "DeepseekV2",
        LATENT
        | {
            "q_lora_rank": 28,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.6,
            "attention_bias": True,
        },
    ),
    "deepseek-v3": ("DeepseekV3", LATENT | V3 | {"rope_parameters": YARN_OF_DEEPSEEK}),
    "deepseek-v3-no-groups": (
        "DeepseekV3",
        LATENT | V3 | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "attention_bias": True},
    ),
    "deepseek-v3-halved-rope": (
        "DeepseekV3",
        LATENT | V3 | {"rope_interleave": False, "norm_topk_prob": False},
    ),
    "llama-rope-dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-rope-longrope": ("Llama", {"rope_parameters": LONGROPE | {"factor": 4.0}}),
    "mistral-sliding": ("Mistral", SLIDING),
    "mixtral-sliding": ("Mixtral", SLIDING | {"num_local_experts": 6}),
    "qwen2-sliding": (
        "Qwen2",
        {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "qwen3-sliding": (
        "Qwen3",
        SLIDING
        | {
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3-moe-sliding": (
        "Qwen3Moe",
        SLIDING
        | {
            "use_sliding_window": True,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
        },
    ),
    "gemma": ("Gemma", GEMMA),
    "gemma2": ("Gemma2", GEMMA | CAPS | {"sliding_window": 5}),
    "gemma3": (
        "Gemma3",
        GEMMA
        | {
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "gemma3-capped": ("Gemma3", GEMMA | {"sliding_window": 5, "final_logit_softcapping": 1.5}),
    "phi3": ("Phi3", {"tie_word_embeddings": False}),
    "phi3-sliding": ("Phi3", {"sliding_window": 5, "rms_norm_eps": 1e-3}),
    "phi3-partial-longrope": (
        "Phi3",
        {
            "hidden_size": 64,
            "rope_parameters": LONGROPE | {"partial_rotary_factor": 0.75},
            "original_max_position_embeddings": 256,
            "tie_word_embeddings": True,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 16,
            "sliding_window": 5,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "swiglu_limit": 0.8,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "smollm3-sliding": (
        "SmolLM3",
        {"no_rope_layers": [0, 1, 1], "sliding_window": 5, "use_sliding_window": True},
    ),
    "smollm3-sliding-by-name": (
        "SmolLM3",
        {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 5,
            "use_sliding_window": False,
        },
    ),
    "olmo2": ("Olmo2", {"attention_bias": True}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"full_attention": YARN, "sliding_attention": None},
        },
    ),
    "granite": (
        "Granite",
        {
            "attention_multiplier": 1.2,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 3.0,
            "mlp_bias": True,
        },
    ),
}


def build_model(kind: str, **changes: object) -> transformers.PreTrainedModel:
    """Random weights large enough that attention, biases and norms all matter."""
    family, settings = FAMILIES[kind]
    kind_of_config = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, kind_of_config)(**{**BASE, **settings, **changes})
    torch.manual_seed(sum(map(ord, kind)))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight") and family.startswith("Gemma"):
                parameter.copy_(0.3 * torch.randn_like(parameter))  # 1 is added
            elif name.endswith("sinks"):
                parameter.copy_(torch.randn_like(parameter))
            elif name.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.copy_(0.5 * torch.randn_like(parameter))
            else:
                parameter.copy_(0.15 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn_like(buffer))
    return model


def save_model(model: transformers.PreTrainedModel, folder: Path, **options: object) -> Path:
    """A folder as Hugging Face lays it out, with a tokenizer that no test uses."""
    model.save_pretrained(folder, **options)
    vocab = {chr(ord("!") + i): i for i in range(90)}
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def engine_settings(**changes: object) -> EngineSettings:
    values = {
        "dtype": "float32",
        "device": "cpu",
        "attention": "auto",
        "batch_size": 8,
        "prefill_tokens": 64,
        "kv_tokens": NUM_SLOTS,
        "prefix_cache": True,
        "num_threads": 1,
    }
    return EngineSettings(**(values | changes))


def open_runner(
    folder: Path,
    dtype: str = "float32",
    num_slots: int = NUM_SLOTS,
    device: str = "cpu",
    quantize: str = "off",
) -> ModelRunner:
    """A runner whose whole pool is NaN, so that reading an unused slot shows."""
    settings = engine_settings(dtype=dtype, device=device, kv_tokens=num_slots, quantize=quantize)
    runner = ModelRunner(open_checkpoint(str(folder)), settings)
    runner.poison_free([(0, num_slots)])
    return runner


def make_step(
    token_ids=(), positions=(), slots=(), *, context=(), causal=(), moves=(), logits=(), holds=(),
    free=(),
) -> Step:  # fmt: skip
    """``holds`` are (query, id) pairs; the rest as in `Step`."""

    def array(values, width: int | None = None):
        if len(values) == 0:
            return empty_i64(0) if width is None else empty_i64(0, width)
        return np.array(values, dtype=np.int64)

    return Step(
        token_ids=array(token_ids),
        positions=array(positions),
        slots=array(slots),
        context=array(context, 4),
        causal=array(causal, 4),
        moves=array(moves, 3),
        logit_sources=array(logits),
        hold_queries=array([q for q, _ in holds]),
        hold_ids=array([h for _, h in holds]),
        free_holds=array(free),
    )


def run(runner: ModelRunner, *args, **kwargs) -> torch.Tensor:
    runner.launch(make_step(*args, **kwargs))
    return runner.collect()


class Lab:
    """What a test needs of this file, since tests cannot import their conftest."""

    families = tuple(FAMILIES)
    num_slots = NUM_SLOTS
    vocab = VOCAB
    build_model = staticmethod(build_model)
    save_model = staticmethod(save_model)
    open_runner = staticmethod(open_runner)
    settings = staticmethod(engine_settings)
    make_step = staticmethod(make_step)
    run = staticmethod(run)


@pytest.fixture(scope="session")
def lab() -> Lab:
    torch.set_num_threads(1)
    return Lab()


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """kind → (folder, the transformers model), built once."""
    made = {}

    def get(kind: str):
        if kind not in made:
            model = build_model(kind)
            made[kind] = (save_model(model, tmp_path_factory.mktemp(kind)), model)
        return made[kind]

    return get


@pytest.fixture
def expected(saved):
    """Logits [len(tokens), V] of the transformers model for one whole sequence."""

    def get(kind: str, tokens) -> torch.Tensor:
        with torch.inference_mode():
            return saved(kind)[1](torch.tensor([list(tokens)])).logits[0]

    return get
