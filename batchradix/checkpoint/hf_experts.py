"""Mixtures of experts in a ``config.json``, with the defaults of `transformers`."""

from __future__ import annotations

from typing import Any

from batchradix.checkpoint.hf_fields import Fields
from batchradix.checkpoint.model_config import ClampedSwiglu, MoeConfig


def experts_config(fields: Fields, name: str) -> MoeConfig | None:
    """Of the architecture ``name`` without its ``ForCausalLM``; None where no layer has experts.

    Raises `ModelError` for a router that is not served, and for numbers that do not fit.
    """
    readers = {
        "Mixtral": _mixtral,
        "Qwen2Moe": _qwen2,
        "Qwen3Moe": _qwen3,
        "DeepseekV2": _deepseek_v2,
        "DeepseekV3": _deepseek_v3,
        "GptOss": _gpt_oss,
    }
    moe = readers[name](fields) if name in readers else None
    if moe is None or not moe.layers:
        return None
    in_group = moe.num_experts // moe.num_groups
    if moe.num_experts % moe.num_groups or moe.num_groups_kept > moe.num_groups:
        raise fields.error(
            f"{moe.num_experts} experts in {moe.num_groups} groups, of which "
            f"{moe.num_groups_kept} are kept, do not fit together"
        )
    if moe.num_experts_per_token > in_group * moe.num_groups_kept:
        raise fields.error(
            f"{moe.num_experts_per_token} experts a token are more than there are to choose from"
        )
    if moe.group_score == "best_two" and moe.num_groups_kept < moe.num_groups and in_group < 2:
        raise fields.error("groups of one expert have no best two to be chosen by")
    return moe


def _mixtral(fields: Fields) -> MoeConfig:
    return MoeConfig(
        layers=tuple(range(fields.num_layers)),
        num_experts=fields.integer("num_local_experts", 8),
        num_experts_per_token=fields.integer("num_experts_per_tok", 2),
        intermediate_size=fields.integer("intermediate_size"),
        normalise=True,
    )


def _qwen2(fields: Fields) -> MoeConfig:
    return _qwen(
        fields,
        num_experts=fields.count("num_experts", 60),
        num_experts_per_token=fields.integer("num_experts_per_tok", 4),
        intermediate_size=fields.integer("moe_intermediate_size", 1408),
        shared_intermediate_size=fields.integer("shared_expert_intermediate_size", 5632),
        shared_gate=True,
    )


def _qwen3(fields: Fields) -> MoeConfig:
    newer = "num_local_experts"  # as transformers writes it
    return _qwen(
        fields,
        num_experts=fields.count(newer if newer in fields.config else "num_experts", 128),
        num_experts_per_token=fields.integer("num_experts_per_tok", 8),
        intermediate_size=fields.integer("moe_intermediate_size", 768),
    )


def _qwen(fields: Fields, *, num_experts: int, **sizes: Any) -> MoeConfig:
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.config.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list):
        raise fields.error(f"mlp_only_layers is {dense!r}, not a list of numbers")
    layers = range(fields.num_layers) if num_experts else ()
    return MoeConfig(
        layers=tuple(i for i in layers if (i + 1) % step == 0 and i not in dense),
        num_experts=num_experts,
        normalise=fields.boolean("norm_topk_prob"),
        **sizes,
    )


def _gpt_oss(fields: Fields) -> MoeConfig:
    """The softmax over the chosen experts alone is that over all, divided by its sum."""
    return MoeConfig(
        layers=tuple(range(fields.num_layers)),
        num_experts=fields.integer("num_local_experts"),
        num_experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("intermediate_size"),
        normalise=True,
        router_bias=True,
        expert_bias=True,
        clamped=ClampedSwiglu(
            alpha=float(fields.number("swiglu_alpha", 1.702)),
            limit=float(fields.number("swiglu_limit", 7.0)),
        ),
        stacked_files=True,
    )


def _deepseek_v2(fields: Fields) -> MoeConfig | None:
    method = fields.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise _unknown_router(fields, "topk_method", method)
    scoring = fields.text("scoring_func", "softmax")
    if scoring != "softmax":
        raise _unknown_router(fields, "scoring_func", scoring)
    groups = {}
    if method == "group_limited_greedy":
        groups = {
            "num_groups": fields.integer("n_group"),
            "num_groups_kept": fields.integer("topk_group"),
        }
    # `transformers` does not read norm_topk_prob here; no published model sets it.
    return _deepseek(
        fields,
        default_experts=64,
        default_shared=2,
        default_width=1407,
        default_dense=0,
        num_experts_per_token=fields.integer("num_experts_per_tok"),
        scaling=float(fields.number("routed_scaling_factor", 1.0)),
        **groups,
    )


def _deepseek_v3(fields: Fields) -> MoeConfig | None:
    for name, served in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        given = fields.text(name, served)
        if given != served:
            raise _unknown_router(fields, name, given)
    return _deepseek(
        fields,
        default_experts=256,
        default_shared=1,
        default_width=2048,
        default_dense=3,
        num_experts_per_token=fields.integer("num_experts_per_tok", 8),
        scaling=float(fields.number("routed_scaling_factor", 2.5)),
        scoring="sigmoid",
        correction_bias=True,
        num_groups=fields.integer("n_group", 8),
        num_groups_kept=fields.integer("topk_group", 4),
        group_score="best_two",
        normalise=fields.boolean("norm_topk_prob", default=True),
    )


def _deepseek(
    fields: Fields,
    *,
    default_experts: int,
    default_shared: int,
    default_width: int,
    default_dense: int,
    **router: Any,
) -> MoeConfig | None:
    if fields.config.get("n_routed_experts", default_experts) is None:
        return None
    width = fields.integer("moe_intermediate_size", default_width)
    num_dense = fields.count("first_k_dense_replace", default_dense)
    step = fields.integer("moe_layer_freq", 1)
    shared = fields.config.get("n_shared_experts", default_shared)
    num_shared = 0 if shared is None else fields.count("n_shared_experts", default_shared)
    layers = range(num_dense, fields.num_layers)
    return MoeConfig(
        layers=tuple(i for i in layers if i % step == 0),
        num_experts=fields.integer("n_routed_experts", default_experts),
        intermediate_size=width,
        shared_intermediate_size=num_shared * width,
        float32_router=True,
        **router,
    )


def _unknown_router(fields: Fields, name: str, value: Any) -> Exception:
    return fields.error(f"{name} {value!r} is not supported for choosing experts")
