"""The gated activation of a feed-forward layer (SwiGLU and GEGLU, Shazeer 2020), in one of the
forms of `Gating`."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p

import torch

from batchradix_kernels.native import FLOATS, KINDS, function
from batchradix_kernels.quantise_rows import QuantisedRows, quantise_rows
from batchradix_kernels.swiglu.reference import SILU, Gating, swiglu_reference
from batchradix_kernels.triton_runtime import serves

__all__ = ["SILU", "Gating", "swiglu", "swiglu_int8", "swiglu_reference"]

_native = function(
    "bx_swiglu",
    (
        *(c_void_p, c_void_p, c_void_p, c_int64, c_int64),
        *(c_int, c_int, c_int, c_float, c_float, c_int),
    ),
)
_CODES = {"silu": 0, "gelu_tanh": 1, "clamped": 2}


def swiglu(gate_up: torch.Tensor, gating: Gating = SILU) -> torch.Tensor:
    """silu(gate) · up, or as ``gating`` says: contiguous [T, 2F], the gates first, to [T, F] of the
    same dtype.

    Computed in float32 and rounded once.
    """
    if gate_up.is_cuda and serves(gate_up.device) and gating == SILU:
        from batchradix_kernels.swiglu.triton import swiglu_triton

        return swiglu_triton(gate_up)
    if _native is None or not gate_up.is_cpu or gate_up.dtype not in FLOATS:
        return swiglu_reference(gate_up, gating)
    num_rows, width = gate_up.shape
    out = torch.empty((num_rows, width // 2), dtype=gate_up.dtype)
    _call(gate_up, gating, out, None)
    return out


def swiglu_int8(gate_up: torch.Tensor, gating: Gating = SILU) -> QuantisedRows:
    """`swiglu` with a quantised result, not rounded to the dtype of ``gate_up`` before."""
    if _native is None or not gate_up.is_cpu or gate_up.dtype not in FLOATS:
        return quantise_rows(swiglu(gate_up, gating))
    num_rows, width = gate_up.shape
    values = torch.empty((num_rows, width // 2), dtype=torch.int8)
    out = QuantisedRows(values, torch.empty(num_rows))
    _call(gate_up, gating, *out)
    return out


def _call(
    gate_up: torch.Tensor, gating: Gating, out: torch.Tensor, scales: torch.Tensor | None
) -> None:
    assert _native is not None
    assert gate_up.is_contiguous()
    _native(
        gate_up.data_ptr(),
        out.data_ptr(),
        None if scales is None else scales.data_ptr(),
        *out.shape,
        KINDS[gate_up.dtype],
        KINDS[out.dtype],
        _CODES[gating.kind],
        gating.alpha,
        gating.limit,
        torch.get_num_threads(),
    )
