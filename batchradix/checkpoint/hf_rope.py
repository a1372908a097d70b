"""The rotary embedding of a ``config.json``, as `transformers` reads it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from batchradix.checkpoint.hf_fields import Fields
from batchradix.checkpoint.model_config import RopeConfig


def rope_config(fields: Fields, context_length: int, default_theta: float) -> RopeConfig:
    """The rotary embedding that ``config.json`` describes in either spelling.

    ``context_length`` is what yarn takes for the original one where it names none. Raises
    `ModelError` for what is not supported.
    """
    config = fields.config
    scaling = rope_scaling(fields)
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise fields.error("rotary embedding that differs between layers is not supported")
    if fields.positive("partial_rotary_factor", _partial(config, scaling), 1.0) != 1.0:
        raise fields.error("rotary embedding over part of a head is not supported")
    theta = scaling.get("rope_theta", config.get("rope_theta"))
    kind = scaling.get("rope_type", scaling.get("type")) or "default"
    rope_theta = float(fields.positive("rope_theta", theta, default_theta))
    if kind == "default":
        return RopeConfig(theta=rope_theta)

    def value(name: str) -> float:
        return float(fields.positive(f"{name} of rope_scaling", scaling.get(name)))

    if kind == "linear":
        return RopeConfig(theta=rope_theta, kind="linear", factor=value("factor"))
    if kind == "llama3":
        low, high = value("low_freq_factor"), value("high_freq_factor")
        if low >= high:
            raise fields.error(f"low_freq_factor {low} must be below high_freq_factor {high}")
        return RopeConfig(
            theta=rope_theta,
            kind="llama3",
            factor=value("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_context_length=int(value("original_max_position_embeddings")),
        )
    if kind == "yarn":
        return _yarn(fields, scaling, rope_theta, context_length)
    raise fields.error(
        f"rotary scaling {kind!r} is not supported; supported are default, linear, llama3 and yarn"
    )


def rope_scaling(fields: Fields) -> Mapping[str, Any]:
    """What ``rope_scaling`` and ``rope_parameters``, its newer name, say together."""
    old = fields.config.get("rope_scaling") or {}
    new = fields.config.get("rope_parameters") or {}
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        raise fields.error("rope_scaling is not an object")
    return {**old, **new}


def _yarn(
    fields: Fields, scaling: Mapping[str, Any], theta: float, context_length: int
) -> RopeConfig:
    def value(name: str, default: float | None = None) -> float:
        return float(fields.positive(f"{name} of rope_scaling", scaling.get(name), default))

    def rotations(name: str, default: float) -> float:
        return float(fields.positive(f"{name} of rope_scaling", scaling.get(name) or default))

    original = int(value("original_max_position_embeddings", context_length))
    if original < 1 or theta <= 1:
        raise fields.error(
            "rope_scaling of kind yarn needs a rope_theta above 1 and an "
            "original_max_position_embeddings of at least 1"
        )
    factor = value("factor", context_length / original)
    rotated = 1.0  # what rotated queries and keys are multiplied by
    if scaling.get("attention_factor") is not None:
        rotated = value("attention_factor")
    elif scaling.get("mscale") and scaling.get("mscale_all_dim"):
        rotated = yarn_scale(factor, value("mscale")) / yarn_scale(factor, value("mscale_all_dim"))
    else:
        rotated = yarn_scale(factor, 1.0)
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_context_length=original,
        fast_rotations=rotations("beta_fast", 32),
        slow_rotations=rotations("beta_slow", 1),
        whole_dimensions=scaling.get("truncate") is not False,
        amplitude=rotated,
    )


def yarn_scale(factor: float, mscale: float) -> float:
    """YaRN's ``mscale``: how much sharper attention gets, its context ``factor`` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _partial(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> Any:
    return scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
