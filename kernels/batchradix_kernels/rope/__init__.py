"""Rotary position embedding (RoFormer, Su et al. 2021) of queries and keys, in place."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p

import torch

from batchradix_kernels.native import FLOATS, KINDS, function
from batchradix_kernels.rope.reference import rope_reference
from batchradix_kernels.triton_runtime import serves

__all__ = ["rope", "rope_reference"]

_native = function(
    "bx_rope",
    (
        *(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
        *(c_int64, c_int64, c_int64, c_int64, c_int64, c_float, c_int, c_int, c_int),
    ),
)


def rope(
    heads: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    num_q: int,
    num_k: int,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> None:
    """Rotates the pairs of the first ``num_q + num_k`` heads that stand half a head apart.

    ``heads``: contiguous [T, num_heads, E], changed in place; the heads after those stay.
    ``cosines``, ``sines``: contiguous float32[T, E / 2], of the angles of each token.
    ``norms``: weights [E] of query and of key heads in the dtype of ``heads`` or float32, and
    epsilon: the heads are divided by their root mean square and multiplied by the weights before.
    Computed in float32 and rounded once.
    """
    if heads.is_cuda and serves(heads.device):
        from batchradix_kernels.rope.triton import rope_triton

        rope_triton(heads, cosines, sines, num_q, num_k, norms)
        return
    if _native is None or not heads.is_cpu or heads.dtype not in FLOATS:
        rope_reference(heads, cosines, sines, num_q, num_k, norms)
        return
    assert heads.is_contiguous()
    assert cosines.is_contiguous()
    assert sines.is_contiguous()
    q_weight, k_weight, epsilon = norms or (None, None, 0.0)
    num_rows, num_heads, head_dim = heads.shape
    _native(
        heads.data_ptr(),
        cosines.data_ptr(),
        sines.data_ptr(),
        None if q_weight is None else q_weight.data_ptr(),
        None if k_weight is None else k_weight.data_ptr(),
        num_rows,
        num_heads,
        num_q,
        num_k,
        head_dim,
        epsilon,
        KINDS[heads.dtype],
        KINDS[heads.dtype if q_weight is None else q_weight.dtype],
        torch.get_num_threads(),
    )
