"""Rows of a matrix as int8, each with a scale of its own, for integer products.

Rows are rotated before they are rounded (QuaRot, Ashkboos et al. 2024): activations have channels
a hundred times larger than the rest, which would leave the rest a few of the 255 steps. The
product of two rows stays what it was where both are rotated.
"""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p
from typing import NamedTuple

import torch

from batchradix_kernels.native import KINDS, function
from batchradix_kernels.quantise_rows.reference import (
    quantise_rows_reference,
    rotate_rows_reference,
)

__all__ = ["QuantisedRows", "quantise_rows", "quantise_rows_reference", "rotate_rows_reference"]

_native = function(
    "bx_quantise_rows", (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int, c_int)
)


class QuantisedRows(NamedTuple):
    """``values``: int8[T, D], contiguous; ``scales``: float32[T]. Their product is
    the row times an orthogonal matrix that depends on D alone."""

    values: torch.Tensor
    scales: torch.Tensor


def quantise_rows(x: torch.Tensor) -> QuantisedRows:
    """The rows of a contiguous [T, D], floating, rotated; the largest magnitude becomes 127.

    A row with NaN or infinity has NaN for its scale. A row depends on itself alone.
    """
    if _native is None or not x.is_cpu or x.dtype not in KINDS:
        return QuantisedRows(*quantise_rows_reference(x))
    assert x.is_contiguous()
    num_rows, width = x.shape
    values = torch.empty((num_rows, width), dtype=torch.int8)
    scales = torch.empty(num_rows)
    _native(
        x.data_ptr(),
        values.data_ptr(),
        scales.data_ptr(),
        num_rows,
        width,
        KINDS[x.dtype],
        torch.get_num_threads(),
    )
    return QuantisedRows(values, scales)
