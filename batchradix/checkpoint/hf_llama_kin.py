"""SmolLM3, OLMo 2 and 3, and Granite in a ``config.json``: Llamas with few changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchradix.checkpoint.hf_fields import Fields
from batchradix.checkpoint.hf_layers import ropes_by_kind, rotated, slides, sliding
from batchradix.checkpoint.hf_rope import rope_config


def smollm3(fields: Fields, context_length: int) -> Mapping[str, Any]:
    """Every fourth layer does not rotate; these slide where ``use_sliding_window``, and those that
    ``layer_types`` names slide in any case, as in `transformers`."""
    num_layers = fields.num_layers
    every = fields.integer("no_rope_layer_interval", 4)
    given = fields.config.get("no_rope_layers")
    rotates = [(i + 1) % every != 0 for i in range(num_layers)]
    if given is not None:
        is_list = isinstance(given, list) and len(given) == num_layers
        if not is_list or any(rotate not in (0, 1) for rotate in given):
            raise fields.error(f"no_rope_layers is not a list of {num_layers} zeros and ones")
        rotates = [bool(rotate) for rotate in given]
    is_sliding = fields.boolean("use_sliding_window")
    which = slides(fields, [is_sliding and not rotate for rotate in rotates])
    windows = sliding(fields, context_length, which)
    rope = rope_config(fields, context_length, 2e6)
    return {**windows, "rope": rope, **rotated(rope, rotates)}


def olmo3(fields: Fields, context_length: int) -> Mapping[str, Any]:
    which = slides(fields, [(i + 1) % 4 != 0 for i in range(fields.num_layers)])
    theta = 500000.0
    return {
        **sliding(fields, context_length, which),
        **ropes_by_kind(fields, context_length, which, theta=theta, local_theta=theta),
    }


def granite(fields: Fields, context_length: int) -> Mapping[str, Any]:
    return {
        "attention_scale": float(fields.number("attention_multiplier", 1.0)),
        "embedding_scale": float(fields.number("embedding_multiplier", 1.0)),
        "residual_scale": float(fields.number("residual_multiplier", 1.0)),
        "logit_scale": 1.0 / fields.number("logits_scaling", 1.0),
    }
