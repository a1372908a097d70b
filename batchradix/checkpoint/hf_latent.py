"""Multi-head latent attention in a ``config.json`` (DeepSeek-V2, V3 and models of their kind)."""

from __future__ import annotations

from batchradix.checkpoint.hf_fields import Fields
from batchradix.checkpoint.hf_rope import rope_scaling, yarn_scale
from batchradix.checkpoint.model_config import MlaConfig


def latent_config(fields: Fields, name: str) -> MlaConfig:
    """``name``: DeepseekV2 or DeepseekV3. Raises `ModelError` for sizes that do not fit."""
    nope_dim = fields.integer("qk_nope_head_dim", 128)
    rope_dim = fields.integer("qk_rope_head_dim", 64)
    if rope_dim % 2:
        raise fields.error(f"heads of odd size {rope_dim} cannot be rotated")
    rank = fields.config.get("q_lora_rank", 1536)
    return MlaConfig(
        q_lora_rank=None if rank is None else fields.integer("q_lora_rank", 1536),
        kv_lora_rank=fields.integer("kv_lora_rank", 512),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=fields.integer("v_head_dim", 128),
        rope_interleaved=name == "DeepseekV2" or fields.boolean("rope_interleave", default=True),
        scale=(nope_dim + rope_dim) ** -0.5 * _sharpening(fields),
    )


def _sharpening(fields: Fields) -> float:
    """What scores are multiplied by beside the root of the head size (YaRN)."""
    scaling = rope_scaling(fields)
    mscale = scaling.get("mscale_all_dim")
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in (None, "", "default") or mscale in (None, 0):
        return 1.0
    factor = fields.positive("factor of rope_scaling", scaling.get("factor"))
    scale = yarn_scale(factor, fields.positive("mscale_all_dim of rope_scaling", mscale))
    return scale * scale
