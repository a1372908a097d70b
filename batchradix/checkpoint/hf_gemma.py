"""Gemma 1, 2 and 3 in a ``config.json`` (Gemma Team 2024, 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchradix.checkpoint.hf_fields import Fields
from batchradix.checkpoint.hf_layers import ropes_by_kind, slides, sliding
from batchradix.checkpoint.model_config import Activation

_ACTIVATIONS: Mapping[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh"}


def gemma(fields: Fields, context_length: int) -> Mapping[str, Any]:
    # The first releases say gelu and mean its approximation, as transformers knows.
    activation = fields.text("hidden_act", "gelu_pytorch_tanh")
    if activation == "gelu":
        activation = "gelu_pytorch_tanh"
    return _gemma(fields, activation)


def gemma2(fields: Fields, context_length: int) -> Mapping[str, Any]:
    which = slides(fields, [i % 2 == 0 for i in range(fields.num_layers)])
    return {
        **_gemma(fields, fields.text("hidden_activation", "gelu_pytorch_tanh")),
        **_scores(fields),
        **sliding(fields, context_length, which),
        "attention_softcap": _cap(fields, "attn_logit_softcapping"),
    }


def gemma3(fields: Fields, context_length: int) -> Mapping[str, Any]:
    # transformers does not cap the scores of Gemma 3, whatever the config says.
    every = fields.integer("sliding_window_pattern", 6)
    which = slides(fields, [(i + 1) % every != 0 for i in range(fields.num_layers)])
    theta, local = 1e6, float(fields.number("rope_local_base_freq", 1e4))
    return {
        **_gemma(fields, fields.text("hidden_activation", "gelu_pytorch_tanh")),
        **_scores(fields),
        **sliding(fields, context_length, which),
        **ropes_by_kind(fields, context_length, which, theta=theta, local_theta=local),
        "qk_norm": True,
    }


def _gemma(fields: Fields, activation: str) -> Mapping[str, Any]:
    if fields.boolean("use_bidirectional_attention"):
        raise fields.error(
            "attention that sees later tokens (use_bidirectional_attention) is not supported; use "
            "a model that generates text"
        )
    if activation not in _ACTIVATIONS:
        raise fields.error(
            f"activation {activation!r} is not supported; only {', '.join(_ACTIVATIONS)} is"
        )
    return {
        "activation": _ACTIVATIONS[activation],
        "norm_offset": 1.0,
        "embedding_scale": fields.integer("hidden_size") ** 0.5,
    }


def _scores(fields: Fields) -> Mapping[str, Any]:
    return {
        "attention_scale": fields.number("query_pre_attn_scalar", 256) ** -0.5,
        "logit_softcap": _cap(fields, "final_logit_softcapping"),
    }


def _cap(fields: Fields, name: str) -> float | None:
    given = fields.config.get(name)
    return None if given is None else float(fields.number(name))
