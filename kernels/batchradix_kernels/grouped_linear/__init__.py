"""Linear layers whose weights stay in 4 or 8 bits in memory, with scales a group of inputs.

Each panel of 32 columns is widened to bfloat16 on the way into the products of `bf16_linear`, so
results are, to the last bit, those of that layer with the widened weight rounded to bfloat16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int, c_int64, c_void_p

import torch

from batchradix_kernels import bf16_linear as bf16
from batchradix_kernels.grouped_linear.reference import Groups, grouped_linear_reference
from batchradix_kernels.native import KINDS, function

__all__ = ["GroupedWeight", "Groups", "grouped_linear", "grouped_linear_reference", "serves"]

BLOCK, PANEL = bf16.BLOCK, bf16.PANEL
_MIN_GROUP = 8

_native = function(
    "bx_grouped_linear",
    (
        *(c_void_p, c_void_p, c_void_p, c_void_p),
        *(c_int64, c_int64, c_int64, c_int, c_int, c_void_p, c_int),
    ),
)


class _Groups(ctypes.Structure):
    """``struct bx_groups`` of groups.h."""

    _fields_ = (
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("minima", c_void_p),
        ("factors", c_void_p),
        ("minimum_factors", c_void_p),
        ("bits", ctypes.c_int32),
        ("offset", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("super", ctypes.c_int32),
    )


def serves(parts: Sequence[Groups], *, gated: bool = False) -> bool:
    """Whether there is a kernel on this CPU for layers side by side with these weights."""
    num_inputs = parts[0].shape[1]
    return (
        _native is not None
        and bf16.serves(num_inputs, sum(part.shape[0] for part in parts), gated=gated)
        and all(part.shape[0] % BLOCK == 0 for part in parts)
        and all(num_inputs % (_MIN_GROUP * part.num_groups) == 0 for part in parts)
    )


class GroupedWeight:
    """Weights one below the other, [N, K] together, packed for the C kernel, and their bias [N].

    ``gated``: there are two parts of one size, gates and what they gate. `serves` must hold.
    """

    def __init__(
        self, parts: Sequence[Groups], bias: torch.Tensor | None = None, *, gated: bool = False
    ) -> None:
        assert serves(parts, gated=gated)
        self.in_size = parts[0].shape[1]
        self.out_size = sum(part.shape[0] for part in parts)
        self.is_gated = gated
        self.num_columns = self.out_size // 2 if gated else self.out_size
        self._tensors: list[torch.Tensor] = []  # what the pointers of the blocks are to
        blocks = [self._blocks(part) for part in parts]
        in_turns = zip(*blocks, strict=True) if gated else blocks
        flat = [block for some in in_turns for block in some]
        flat += [_Groups()] * (len(flat) % 2)
        self.blocks = (_Groups * len(flat))(*flat)
        self.bias: torch.Tensor | None = None  # float32, of all panels
        if bias is not None:
            wide = bias.float()
            if gated:
                wide = wide.view(2, -1, BLOCK).transpose(0, 1).reshape(-1)
            self.bias = torch.zeros(len(flat) * BLOCK)
            self.bias[: self.out_size] = wide

    @property
    def num_bytes(self) -> int:
        """In memory."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def panels(self, num_threads: int) -> torch.Tensor:
        """Room for each thread's panel."""
        return torch.empty(num_threads * self.in_size * PANEL, dtype=torch.bfloat16)

    def _blocks(self, part: Groups) -> list[_Groups]:
        num_outputs, num_inputs = part.shape
        num_blocks = num_outputs // BLOCK
        codes = part.codes.view(num_blocks, BLOCK, num_inputs // 2, 2).permute(0, 2, 1, 3)
        codes = codes.contiguous()  # sixteens: columns 0 to 7, then 8 to 15, each with two inputs
        if part.bits == 4:
            words = torch.zeros((num_blocks, num_inputs // 8, 16), dtype=torch.int32)
            for i, sixteen in enumerate(codes.view(num_blocks, -1, 8, 16).unbind(2)):
                words |= sixteen.int() << 4 * i
            codes = words
        columns = {
            "scales": part.scales,
            "minima": part.minima,
            "factors": part.factors,
            "minimum_factors": part.minimum_factors,
        }
        kept = {"codes": codes}
        for name, tensor in columns.items():
            if tensor is not None:
                by_block = tensor.view(num_blocks, BLOCK, -1).transpose(1, 2)
                kept[name] = by_block.contiguous()
        self._tensors += kept.values()
        return [
            _Groups(
                **{name: tensor[block].data_ptr() for name, tensor in kept.items()},
                bits=part.bits,
                offset=part.offset,
                group=num_inputs // part.num_groups,
                super=num_inputs // part.scales.shape[1],
            )
            for block in range(num_blocks)
        ]


def grouped_linear(
    x: torch.Tensor, weight: GroupedWeight, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """The layer bfloat16[T, K] to ``dtype`` [T, N], or to bfloat16[T, N / 2] where it is gated.

    ``dtype``: bfloat16 or float32.
    """
    assert _native is not None
    assert x.dtype == torch.bfloat16
    assert dtype == torch.bfloat16 or not weight.is_gated
    x = x.contiguous()
    out = torch.empty((x.shape[0], weight.num_columns), dtype=dtype)
    num_threads = torch.get_num_threads()
    panels = weight.panels(num_threads)
    _native(
        x.data_ptr(),
        ctypes.addressof(weight.blocks),
        None if weight.bias is None else weight.bias.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        weight.in_size,
        weight.out_size,
        KINDS[dtype],
        weight.is_gated,
        panels.data_ptr(),
        num_threads,
    )
    return out
