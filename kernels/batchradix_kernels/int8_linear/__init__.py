"""Linear layers in integers: int8 weights with a scale a channel, int8 rows with a scale each.

Sums of products are exact integers, so a row's result depends neither on the rows beside it
nor on the instruction set or the number of threads.
"""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p

import torch

from batchradix_kernels.int8_linear.reference import int8_linear_reference
from batchradix_kernels.native import KINDS, function, library
from batchradix_kernels.quantise_rows import QuantisedRows, quantise_rows

__all__ = ["Int8Weight", "int8_linear", "int8_linear_reference"]

_pack = function("bx_int8_pack", (c_void_p, c_void_p, c_int64, c_int64))
_native = function(
    "bx_int8_linear",
    (
        *(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
        *(c_int64, c_int64, c_int64, c_int, c_int),
    ),
)


class Int8Weight:
    """A weight [N, K], floating, as int8 with a scale for every output channel.

    On the CPU it is packed for the C kernel; the weight itself is not kept.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.out_size, self.in_size = weight.shape
        self.values, self.scales = quantise_rows(weight.contiguous())
        loaded = library()
        self.is_packed = loaded is not None and weight.is_cpu
        if _pack is None or loaded is None or not self.is_packed:
            return
        measure = loaded.bx_int8_packed_bytes
        measure.argtypes, measure.restype = (c_int64, c_int64), c_int64
        packed = torch.zeros(measure(self.out_size, self.in_size), dtype=torch.int8)
        _pack(self.values.data_ptr(), packed.data_ptr(), self.out_size, self.in_size)
        self.values = packed


def int8_linear(
    x: QuantisedRows, weight: Int8Weight, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """The layer [T, K] to [T, N] in ``dtype``, which is that of ``bias`` [N] too.

    A row whose scale is NaN gives NaN.
    """
    values, scales = x
    if _native is None or not weight.is_packed:
        return int8_linear_reference(values, scales, weight.values, weight.scales, bias).to(dtype)
    if dtype not in (torch.float32, torch.bfloat16):
        wide = None if bias is None else bias.float()
        return int8_linear(x, weight, wide, torch.float32).to(dtype)
    num_rows = values.shape[0]
    out = torch.empty((num_rows, weight.out_size), dtype=dtype)
    _native(
        values.data_ptr(),
        scales.data_ptr(),
        weight.values.data_ptr(),
        weight.scales.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        num_rows,
        weight.in_size,
        weight.out_size,
        KINDS[dtype],
        torch.get_num_threads(),
    )
    return out
