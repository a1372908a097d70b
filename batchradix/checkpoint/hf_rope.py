"""The rotary embedding of a ``config.json``, as `transformers` reads it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from batchradix.checkpoint.hf_fields import Fields
from batchradix.checkpoint.model_config import RopeConfig


def rope_config(fields: Fields, context_length: int, default_theta: float) -> RopeConfig:
    """The rotary embedding of all layers that ``config.json`` describes in either spelling.

    ``context_length`` is what yarn takes for the original one where it names none. Raises
    `ModelError` for what is not supported.
    """
    scaling = rope_scaling(fields)
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise fields.error("rotary embedding that differs between layers is not supported")
    return rope_of(fields, scaling, context_length, default_theta)


def rope_of(
    fields: Fields, scaling: Mapping[str, Any], context_length: int, default_theta: float
) -> RopeConfig:
    """The one that ``scaling`` describes, an object as in ``rope_scaling``."""
    given = _Scaling(fields, scaling)
    theta = float(given.number("rope_theta", fields.number("rope_theta", default_theta)))
    kind = given.kind
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=given.number("factor"))
    if kind == "llama3":
        return _llama3(given, theta)
    if kind == "yarn":
        return _yarn(given, theta, context_length)
    if kind == "longrope":
        return _longrope(given, theta, context_length)
    if kind == "dynamic":
        factor = given.number("factor")
        return RopeConfig(
            theta=theta, kind="dynamic", factor=factor, original_context_length=context_length
        )
    raise fields.error(
        f"rotary scaling {kind!r} is not supported; supported are default, linear, llama3, yarn, "
        f"longrope and dynamic"
    )


def served_context(fields: Fields, rope: RopeConfig, context_length: int) -> int:
    """Tokens that a row may have. Dynamic scaling goes on behind the original context, for as much
    longer as its factor says; what is rotated by longrope ends there, see docs/models.md."""
    if rope.kind == "dynamic":
        return max(context_length, int(context_length * rope.factor))
    if rope.kind == "longrope":
        return min(context_length, rope.original_context_length)
    if rope.kind == "yarn" and "original_max_position_embeddings" in rope_scaling(fields):
        return max(context_length, int(rope.original_context_length * rope.factor))
    return context_length


def rope_scaling(fields: Fields) -> Mapping[str, Any]:
    """What ``rope_scaling`` and ``rope_parameters``, its newer name, say together."""
    return {**fields.object("rope_scaling"), **fields.object("rope_parameters")}


class _Scaling:
    """The values of a ``rope_scaling``, checked."""

    def __init__(self, fields: Fields, scaling: Mapping[str, Any]) -> None:
        self.fields = fields
        self.scaling = scaling

    @property
    def kind(self) -> str:
        """Of Phi-3 older files say su or yarn and mean longrope."""
        kind = self.scaling.get("rope_type", self.scaling.get("type"))
        if kind is not None and not isinstance(kind, str):
            raise self.fields.error(f"rope_type of rope_scaling is {kind!r}, not a name")
        if "long_factor" in self.scaling and kind in ("su", "yarn"):
            return "longrope"
        return kind or "default"

    def number(self, name: str, default: float | None = None) -> float:
        value = self.scaling.get(name)
        return float(self.fields.positive(f"{name} of rope_scaling", value, default))

    def boolean(self, name: str, *, default: bool) -> bool:
        value = self.scaling.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.fields.error(f"{name} of rope_scaling is {value!r}, not true or false")
        return default if value is None else value

    def numbers(self, name: str) -> tuple[float, ...]:
        values = self.scaling.get(name)
        if not isinstance(values, list) or not values:
            raise self.fields.error(f"{name} of rope_scaling is {values!r}, not a list of numbers")
        return tuple(float(self.fields.positive(f"{name} of rope_scaling", v)) for v in values)


def _llama3(given: _Scaling, theta: float) -> RopeConfig:
    low, high = given.number("low_freq_factor"), given.number("high_freq_factor")
    if low >= high:
        raise given.fields.error(f"low_freq_factor {low} must be below high_freq_factor {high}")
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=given.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context_length=int(given.number("original_max_position_embeddings")),
    )


def _longrope(given: _Scaling, theta: float, context_length: int) -> RopeConfig:
    """The factors for rows within the original context; those for longer rows are only checked."""
    outside = given.fields.config.get("original_max_position_embeddings")
    name = "original_max_position_embeddings"
    if outside is None:
        original = int(given.number(name, context_length))
    else:
        original = given.fields.integer(name)
    short, long = given.numbers("short_factor"), given.numbers("long_factor")
    if len(short) != len(long):
        raise given.fields.error(
            f"short_factor and long_factor of rope_scaling have {len(short)} and {len(long)} "
            f"numbers, not as many"
        )
    if original < 2:
        raise given.fields.error(f"{name} is {original}, but must be 2 or more")
    factor = given.number("factor", context_length / original)
    scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeConfig(
        theta=theta,
        kind="longrope",
        original_context_length=original,
        divisors=short,
        amplitude=given.number("attention_factor", scale),
    )


def _yarn(given: _Scaling, theta: float, context_length: int) -> RopeConfig:
    def rotations(name: str, default: float) -> float:
        # 0 means the default, as in `transformers`
        return default if given.scaling.get(name) == 0 else given.number(name, default)

    original = int(given.number("original_max_position_embeddings", context_length))
    if original < 1 or theta <= 1:
        raise given.fields.error(
            "rope_scaling of kind yarn needs a rope_theta above 1 and an "
            "original_max_position_embeddings of at least 1"
        )
    factor = given.number("factor", context_length / original)
    rotated = 1.0  # what rotated queries and keys are multiplied by
    scales = [given.scaling.get(name) not in (None, 0) for name in ("mscale", "mscale_all_dim")]
    if given.scaling.get("attention_factor") is not None:
        rotated = given.number("attention_factor")
    elif all(scales):
        of = [yarn_scale(factor, given.number(name)) for name in ("mscale", "mscale_all_dim")]
        rotated = of[0] / of[1]
    else:
        rotated = yarn_scale(factor, 1.0)
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_context_length=original,
        fast_rotations=rotations("beta_fast", 32),
        slow_rotations=rotations("beta_slow", 1),
        whole_dimensions=given.boolean("truncate", default=True),
        amplitude=rotated,
    )


def yarn_scale(factor: float, mscale: float) -> float:
    """YaRN's ``mscale``: how much sharper attention gets, its context ``factor`` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
