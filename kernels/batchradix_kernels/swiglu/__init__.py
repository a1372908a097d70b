"""The gated activation of Llama's feed-forward layer (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p

import torch

from batchradix_kernels.native import FLOATS, KINDS, function
from batchradix_kernels.quantise_rows import QuantisedRows, quantise_rows
from batchradix_kernels.swiglu.reference import swiglu_reference
from batchradix_kernels.triton_runtime import serves

__all__ = ["swiglu", "swiglu_int8", "swiglu_reference"]

_native = function(
    "bx_swiglu", (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int, c_int, c_int)
)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up: contiguous [T, 2F], the gates first, to [T, F] of the same dtype.

    Computed in float32 and rounded once.
    """
    if gate_up.is_cuda and serves(gate_up.device):
        from batchradix_kernels.swiglu.triton import swiglu_triton

        return swiglu_triton(gate_up)
    if _native is None or not gate_up.is_cpu or gate_up.dtype not in FLOATS:
        return swiglu_reference(gate_up)
    num_rows, width = gate_up.shape
    out = torch.empty((num_rows, width // 2), dtype=gate_up.dtype)
    _call(gate_up, out, None)
    return out


def swiglu_int8(gate_up: torch.Tensor) -> QuantisedRows:
    """`swiglu` with a quantised result, not rounded to the dtype of ``gate_up`` before."""
    if _native is None or not gate_up.is_cpu or gate_up.dtype not in FLOATS:
        return quantise_rows(swiglu(gate_up))
    num_rows, width = gate_up.shape
    values = torch.empty((num_rows, width // 2), dtype=torch.int8)
    out = QuantisedRows(values, torch.empty(num_rows))
    _call(gate_up, *out)
    return out


def _call(gate_up: torch.Tensor, out: torch.Tensor, scales: torch.Tensor | None) -> None:
    assert _native is not None
    assert gate_up.is_contiguous()
    _native(
        gate_up.data_ptr(),
        out.data_ptr(),
        None if scales is None else scales.data_ptr(),
        *out.shape,
        KINDS[gate_up.dtype],
        KINDS[out.dtype],
        torch.get_num_threads(),
    )
