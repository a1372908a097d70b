"""Linear layers: packed for the C kernels or for oneDNN where the CPU has it, or in 8 bits.

A packed weight is 1.3 to 2 times faster for the few rows of a decode step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch
from torch.nn import functional

from batchradix_kernels import bf16_linear as bf16
from batchradix_kernels.grouped_linear import GroupedWeight, Groups, grouped_linear
from batchradix_kernels.int8_linear import Int8Weight, int8_linear
from batchradix_kernels.quantise_rows import QuantisedRows, quantise_rows

Rows = torch.Tensor | QuantisedRows


class Linear(Protocol):
    """``x`` [T, in] to [T, out] in the model's dtype (or float32, see `make_linear`); ``x`` is in
    that dtype too, or, where ``is_quantised``, better in 8 bits already."""

    is_quantised: bool

    def __call__(self, x: Rows) -> torch.Tensor: ...


class Int8Linear:
    """The layer in integers: weights with a scale a channel, rows with a scale each.

    ``weight``: float32[out, in], not kept; ``bias`` [out] in ``dtype``, which results have.
    """

    is_quantised = True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        self.weight = Int8Weight(weight)
        self.bias = bias
        self.dtype = dtype

    def __call__(self, x: Rows) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            x = quantise_rows(x)
        return int8_linear(x, self.weight, self.bias, self.dtype)


class Bf16Linear:
    """The layer in bfloat16 by the C kernel; a row's result depends on the row alone.

    ``weight``: bfloat16[out, in], ``bias`` [out], neither kept. ``dtype`` of the result:
    bfloat16, or float32 where it should not be rounded. ``gated``: the upper half are gates
    (SwiGLU) of the lower half, and the result is half as wide.
    """

    is_quantised = False

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        gated: bool = False,
    ) -> None:
        self.weight = bf16.Bf16Weight(weight, bias, gated=gated)
        self.dtype = dtype

    @staticmethod
    def serves(weight: torch.Tensor, *, gated: bool = False) -> bool:
        """Whether the kernel is there for this weight, where it is."""
        is_bf16 = weight.is_cpu and weight.dtype == torch.bfloat16
        out_size, in_size = weight.shape
        return is_bf16 and bf16.serves(in_size, out_size, gated=gated)

    def __call__(self, x: Rows) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return bf16.bf16_linear(x, self.weight, self.dtype)


class GroupedLinear:
    """The layer with its weights as a file holds them, in 4 or 8 bits with scales a group of
    inputs; results are those of `Bf16Linear` with the same numbers, to the last bit.

    ``parts``: weights side by side, not kept. ``dtype`` and ``gated`` as there.
    """

    is_quantised = False

    def __init__(
        self,
        parts: Sequence[Groups],
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        gated: bool = False,
    ) -> None:
        self.weight = GroupedWeight(parts, bias, gated=gated)
        self.dtype = dtype

    def __call__(self, x: Rows) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return grouped_linear(x, self.weight, self.dtype)


class PlainLinear:
    """The layer as torch does it, on any device; keeps ``weight`` [out, in] as it is."""

    is_quantised = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Rows) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return functional.linear(x, self.weight, self.bias)


class PackedLinear:
    """The layer with its weight in oneDNN's blocked layout; ``weight`` itself is not kept.

    In float32, and in bfloat16 without AMX, every row of the result is the same, bit for bit,
    whatever the number of rows; with AMX sums are cut in some other way where there are more.
    """

    ROWS_HINT = 16
    is_quantised = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), self.ROWS_HINT)
        self.bias = bias

    def __call__(self, x: Rows) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        if x.shape[0] == 1:  # a single row takes another kernel, with another order of sums
            return self._multiply(x.expand(2, -1).contiguous())[:1]
        return self._multiply(x.contiguous())

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.packed, self.bias, "none", [], ""
        )
        return out


class FixedRows:
    """``layer`` on exactly `ROWS` rows at a time, filled up with zeros where there are fewer.

    A library may sum in another order for another number of rows, so every product has the
    same: a row's result then depends on the row alone.
    """

    ROWS = 64
    is_quantised = False

    def __init__(self, layer: Linear) -> None:
        self.layer = layer

    def __call__(self, x: Rows) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        num_rows = x.shape[0]
        missing = -num_rows % self.ROWS
        if missing:
            x = torch.cat((x, x.new_zeros(missing, x.shape[1])))
        blocks = [self.layer(x[at : at + self.ROWS]) for at in range(0, x.shape[0], self.ROWS)]
        out = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        return out[:num_rows]


def make_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    batch_invariant: bool = False,
    prefer_float32: bool = False,
) -> Linear:
    """The fastest layer for ``weight`` [out, in]; the caller should drop its reference.

    ``batch_invariant``: a row's result does not depend, to the last bit, on the rows beside it.
    ``prefer_float32``: results are float32 where that costs nothing.
    """
    if Bf16Linear.serves(weight):
        dtype = torch.float32 if prefer_float32 else torch.bfloat16
        return Bf16Linear(weight, bias, dtype=dtype)
    layer: Linear = PlainLinear(weight, bias)
    if can_pack(weight.device.type, weight.dtype):
        layer = PackedLinear(weight, bias)
    return FixedRows(layer) if batch_invariant else layer


def is_repacked(weight: torch.Tensor) -> bool:
    """Whether `make_linear` keeps ``weight`` in another layout alone."""
    return Bf16Linear.serves(weight) or can_pack(weight.device.type, weight.dtype)


@cache
def can_pack(device_type: str, dtype: torch.dtype) -> bool:
    """Whether packed layers work here and give what plain ones give; tried once a dtype."""
    if device_type != "cpu" or not torch._C._has_mkldnn:
        return False
    weight = torch.linspace(-1, 1, 48 * 32).sin().view(48, 32).to(dtype)
    x = torch.linspace(-2, 2, 3 * 32).cos().view(3, 32).to(dtype)
    bias = torch.linspace(0, 1, 48).to(dtype)
    try:
        packed = PackedLinear(weight, bias)(x).float()
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    plain = functional.linear(x.double(), weight.double(), bias.double()).float()
    tolerance = 1e-4 if dtype == torch.float32 else 6e-2
    return bool(torch.allclose(packed, plain, rtol=tolerance, atol=tolerance))
