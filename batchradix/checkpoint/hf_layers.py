"""What layers of a ``config.json`` look back over, and how each of them rotates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchradix.checkpoint.hf_fields import Fields
from batchradix.checkpoint.hf_rope import rope_of
from batchradix.checkpoint.model_config import RopeConfig

_SLIDING, _FULL = "sliding_attention", "full_attention"


def every_layer(fields: Fields, context_length: int) -> Mapping[str, Any]:
    """Families whose layers all slide over ``sliding_window`` tokens, where it is not null."""
    return sliding(fields, context_length, [True] * fields.num_layers)


def qwen_layers(fields: Fields, context_length: int) -> Mapping[str, Any]:
    """Layers slide where ``use_sliding_window``: all of Qwen3-MoE, of the others those behind the
    first ``max_window_layers``, and of Qwen2-MoE every other one of these first."""
    if not fields.boolean("use_sliding_window"):
        return {}
    num_layers, name = fields.num_layers, fields.config.get("architectures") or []
    kind = fields.config.get("model_type")
    if "Qwen3MoeForCausalLM" in name or kind == "qwen3_moe":
        return every_layer(fields, context_length)
    full = fields.count("max_window_layers", 28)
    if "Qwen2MoeForCausalLM" in name or kind == "qwen2_moe":
        default = [i % 2 == 0 and i < full for i in range(num_layers)]
    else:
        default = [i >= full for i in range(num_layers)]
    return sliding(fields, context_length, slides(fields, default))


def slides(fields: Fields, default: Sequence[bool]) -> list[bool]:
    """Which layers slide, by ``layer_types``, or where that is absent as ``default`` says."""
    kinds = fields.config.get("layer_types")
    if kinds is None:
        return list(default)
    if not isinstance(kinds, list) or len(kinds) != fields.num_layers:
        raise fields.error(f"layer_types does not name the kind of {fields.num_layers} layers")
    unknown = [kind for kind in kinds if kind not in (_SLIDING, _FULL)]
    if unknown:
        raise fields.error(
            f"layers of kind {unknown[0]!r} are not supported, only {_FULL} and {_SLIDING}"
        )
    return [kind == _SLIDING for kind in kinds]


def sliding(fields: Fields, context_length: int, which: Sequence[bool]) -> Mapping[str, Any]:
    """The windows of layers of which ``which`` slide; nothing where they see all there is."""
    if fields.config.get("sliding_window") is None or not any(which):
        return {}
    window = fields.integer("sliding_window")
    if window >= context_length:
        return {}
    return {"layer_windows": tuple(window if slides else None for slides in which)}


def ropes_by_kind(
    fields: Fields,
    context_length: int,
    which: Sequence[bool],
    *,
    theta: float,
    local_theta: float,
) -> Mapping[str, Any]:
    """Rotary embeddings of layers of which ``which`` slide (Gemma 3, OLMo 3): one for each kind
    in ``rope_parameters``, or, as older files have it, ``rope_scaling`` for the others alone."""
    given = fields.object("rope_parameters")
    if given and not set(given) <= {_SLIDING, _FULL}:
        raise fields.error(
            f"rope_parameters does not say for {_FULL} and {_SLIDING} how layers rotate"
        )
    full = dict(_of_kind(fields, given, _FULL))
    local = dict(_of_kind(fields, given, _SLIDING))
    full |= fields.object("rope_scaling")
    full.setdefault("rope_theta", fields.config.get("rope_theta", theta))
    local.setdefault("rope_theta", local_theta)
    of_full = rope_of(fields, full, context_length, theta)
    of_local = rope_of(fields, local, context_length, local_theta)
    return {
        "rope": of_full,
        "layer_ropes": tuple(of_local if slides else of_full for slides in which),
    }


def _of_kind(fields: Fields, given: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    found = given.get(kind)
    if found is not None and not isinstance(found, Mapping):
        raise fields.error(f"{kind} of rope_parameters is {found!r}, not an object")
    return found or {}


def rotated(rope: RopeConfig, which: Sequence[bool]) -> Mapping[str, Any]:
    """Only layers of ``which`` rotate (SmolLM3)."""
    if all(which):
        return {}
    return {"layer_ropes": tuple(rope if rotates else None for rotates in which)}
