"""Linear layers in bfloat16 for CPUs that multiply it: AMX and AVX512-BF16.

Products are summed in float32, in the order of the inputs, and rounded once, so a row's result
depends neither on the rows beside it nor on the number of threads. AMX and AVX512-BF16 differ
in the last bits, and both flush denormal numbers to zero. Shazeer (2020) has the gated form.
"""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p

import torch

from batchradix_kernels.bf16_linear.reference import bf16_linear_reference
from batchradix_kernels.native import KINDS, function, library

__all__ = ["Bf16Weight", "bf16_linear", "bf16_linear_reference", "serves"]

PANEL = 32  # columns, as in cpu.c
BLOCK = 16

_pack = function("bx_bf16_pack", (c_void_p, c_void_p, c_int64, c_int64))
_native = function(
    "bx_bf16_linear",
    (
        *(c_void_p, c_void_p, c_void_p, c_void_p),
        *(c_int64, c_int64, c_int64, c_int, c_int, c_int),
    ),
)


def serves(in_size: int, out_size: int, *, gated: bool = False) -> bool:
    """Whether there is a kernel for such a weight on this CPU."""
    loaded = library()
    if loaded is None or (gated and out_size % (2 * BLOCK)):
        return False
    loaded.bx_bf16_serves.argtypes = [c_int64]
    return bool(loaded.bx_bf16_serves(in_size))


class Bf16Weight:
    """A weight bfloat16[N, K] packed for the C kernel, and its bias [N]; neither is kept as it is.

    ``gated``: the upper half of both are gates of the lower half (N is a multiple of 32 then).
    The CPU must be one that it `serves`.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False
    ) -> None:
        assert _pack is not None
        self.out_size, self.in_size = weight.shape
        assert serves(self.in_size, self.out_size, gated=gated)
        self.is_gated = gated
        self.num_columns = self.out_size // 2 if gated else self.out_size
        weight = _alternate(weight) if gated else weight.contiguous()
        rounded = -(-self.out_size // PANEL) * PANEL
        self.packed = torch.zeros(rounded * self.in_size, dtype=torch.bfloat16)
        _pack(weight.data_ptr(), self.packed.data_ptr(), self.out_size, self.in_size)
        self.bias: torch.Tensor | None = None  # float32, of all panels
        if bias is not None:
            self.bias = torch.zeros(rounded)
            self.bias[: self.out_size] = _alternate(bias[:, None])[:, 0] if gated else bias


def _alternate(weight: torch.Tensor) -> torch.Tensor:
    """Blocks of 16 gates and of 16 gated outputs by turns."""
    halves = weight.reshape(2, -1, BLOCK, weight.shape[1])
    return halves.transpose(0, 1).reshape(weight.shape)


def bf16_linear(
    x: torch.Tensor, weight: Bf16Weight, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """The layer bfloat16[T, K] to ``dtype`` [T, N], or to bfloat16[T, N / 2] where it is gated.

    ``dtype``: bfloat16 or float32.
    """
    assert _native is not None
    assert x.dtype == torch.bfloat16
    assert dtype == torch.bfloat16 or not weight.is_gated
    x = x.contiguous()
    out = torch.empty((x.shape[0], weight.num_columns), dtype=dtype)
    _native(
        x.data_ptr(),
        weight.packed.data_ptr(),
        None if weight.bias is None else weight.bias.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        weight.in_size,
        weight.out_size,
        KINDS[dtype],
        weight.is_gated,
        torch.get_num_threads(),
    )
    return out
