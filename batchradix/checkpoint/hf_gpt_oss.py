"""gpt-oss in a ``config.json`` (OpenAI 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchradix.checkpoint.hf_fields import Fields
from batchradix.checkpoint.hf_layers import slides, sliding
from batchradix.checkpoint.hf_rope import rope_of, rope_scaling

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def gpt_oss(fields: Fields, context_length: int) -> Mapping[str, Any]:
    which = slides(fields, [i % 2 == 0 for i in range(fields.num_layers)])
    rope = rope_of(fields, rope_scaling(fields) or _ROPE, context_length, 150000.0)
    return {
        **sliding(fields, context_length, which),
        "rope": rope,
        "attention_sinks": True,
        "mxfp4": fields.object("quantization_config").get("quant_method") == "mxfp4",
    }
