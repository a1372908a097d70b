"""Root mean square normalisation (Zhang and Sennrich, 2019) behind a residual connection."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p

import torch

from batchradix_kernels.native import FLOATS, KINDS, function
from batchradix_kernels.quantise_rows import QuantisedRows, quantise_rows
from batchradix_kernels.rms_norm.reference import rms_norm_reference
from batchradix_kernels.triton_runtime import serves

__all__ = ["rms_norm", "rms_norm_int8", "rms_norm_reference"]

_native = function(
    "bx_rms_norm",
    (
        *(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
        *(c_int64, c_int64, c_float, c_int, c_int, c_int, c_int),
    ),
)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Adds ``residual`` to ``x`` in place and returns ``x`` normalised, times ``weight``.

    ``x``, ``residual``: contiguous [T, D] of one dtype, which is that of the result [T, D];
    ``weight``: [D] in that dtype or float32. The sum is rounded to the dtype, all else is float32
    and rounded once.
    """
    if x.is_cuda and serves(x.device):
        from batchradix_kernels.rms_norm.triton import rms_norm_triton

        return rms_norm_triton(x, weight, epsilon, residual)
    if _native is None or not x.is_cpu or x.dtype not in FLOATS:
        return rms_norm_reference(x, weight, epsilon, residual)
    out = torch.empty_like(x)
    _call(x, weight, epsilon, residual, out, None)
    return out


def rms_norm_int8(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, residual: torch.Tensor | None = None
) -> QuantisedRows:
    """`rms_norm` with a quantised result, not rounded to the dtype of ``x`` before."""
    if _native is None or not x.is_cpu or x.dtype not in FLOATS:
        return quantise_rows(rms_norm(x, weight, epsilon, residual))
    out = QuantisedRows(torch.empty(x.shape, dtype=torch.int8), torch.empty(x.shape[0]))
    _call(x, weight, epsilon, residual, *out)
    return out


def _call(
    x: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    scales: torch.Tensor | None,
) -> None:
    assert _native is not None
    assert x.is_contiguous()
    assert weight.dtype in (x.dtype, torch.float32)
    assert residual is None or residual.is_contiguous()
    _native(
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        None if scales is None else scales.data_ptr(),
        *x.shape,
        epsilon,
        KINDS[x.dtype],
        KINDS[weight.dtype],
        KINDS[out.dtype],
        torch.get_num_threads(),
    )
