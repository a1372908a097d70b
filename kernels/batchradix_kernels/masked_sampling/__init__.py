"""Choosing a token of each row of logits: grammar mask, cuts and draw in one pass over the row.

The mask is xgrammar's: a bit a token in int32 words. Order and meaning of temperature, top-k,
top-p and min-p are those of transformers; the draw inverts the cumulative distribution in order
of token ids, so that a row and its random number alone decide the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int, c_int64, c_void_p

import numpy as np
import torch
from numpy.typing import NDArray

from batchradix_kernels.masked_sampling.bitmask import apply_bitmask_cpu, masked_argmax_cpu
from batchradix_kernels.masked_sampling.reference import (
    GREEDY_BELOW,
    apply_bitmask_reference,
    assert_readable,
    masked_argmax_reference,
    masked_sample_reference,
)
from batchradix_kernels.native import FLOATS, KINDS, function
from batchradix_kernels.triton_runtime import serves

__all__ = [
    "GREEDY_BELOW",
    "apply_bitmask",
    "apply_bitmask_reference",
    "masked_argmax",
    "masked_argmax_reference",
    "masked_sample",
    "masked_sample_reference",
]

_native = function(
    "bx_masked_argmax",
    (
        *(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
        *(c_int64, c_int64, c_int64, c_int64, c_int, c_int),
    ),
)


def apply_bitmask(
    x: torch.Tensor, bitmask: torch.Tensor, rows: Sequence[int] | NDArray[np.int64]
) -> None:
    """Sets what the mask forbids to -inf, in place, in the given rows of ``x``: float32[R, V].

    ``x``: a view whose last axis is dense; ``bitmask`` is as in `masked_argmax`. An infinite or NaN
    logit that is forbidden turns into NaN or -inf.
    """
    if x.is_cuda and serves(x.device):
        from batchradix_kernels.masked_sampling.triton import apply_bitmask_triton

        index = torch.from_numpy(np.asarray(rows, dtype=np.int64)).to(x.device)
        apply_bitmask_triton(x, bitmask.to(x.device), index)
    elif x.is_cpu:
        apply_bitmask_cpu(x.numpy(), bitmask.numpy(), rows)
    else:
        index = torch.from_numpy(np.asarray(rows, dtype=np.int64)).to(x.device)
        apply_bitmask_reference(x, bitmask.to(x.device), index)


def masked_argmax(
    logits: torch.Tensor, bitmask: torch.Tensor | None = None, masked: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest allowed logit of each row: (int64[R] its token, float32[R] itself).

    ``logits``: [R, V], a view whose last axis is dense, as of wider rows with a padded vocabulary.
    ``bitmask``: int32[R, at least V / 32 words], likewise dense: bit ``i % 32`` of word ``i // 32``
    is set where token ``i`` is allowed; read in rows where ``masked``: contiguous bool[R], is set,
    in all without it. Of equal logits the lowest token is taken. Where any logit of the row, be it
    allowed or not, is NaN or +inf, the second result is NaN; where none but -inf is allowed it is
    -inf; the token is 0 then. Nothing is changed.
    """
    if logits.is_cuda and serves(logits.device):
        from batchradix_kernels.masked_sampling.triton import masked_argmax_triton

        return masked_argmax_triton(logits, bitmask, masked)
    if not logits.is_cpu:
        return masked_argmax_reference(logits, bitmask, masked)
    if _native is None or logits.dtype not in FLOATS:
        return masked_argmax_cpu(logits, bitmask, masked)
    return _masked_argmax_native(logits, bitmask, masked)


def masked_sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    bitmask: torch.Tensor | None = None,
    masked: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws a token of each row, or takes the largest where ``temperature`` is below 1e-5.

    ``temperature``: float32[R]; ``top_k``: int32[R], 0 or less keeps all; ``top_p``: float64[R] in
    (0, 1]; ``min_p``: float64[R] in [0, 1], relative to the largest; ``uniform``: float64[R] in
    [0, 1). All are contiguous, the rest and the results as in `masked_argmax`.
    """
    settings = (temperature, top_k, top_p, min_p, uniform)
    if logits.is_cuda and serves(logits.device):
        from batchradix_kernels.masked_sampling.triton import masked_sample_triton

        return masked_sample_triton(logits, *settings, bitmask, masked)
    return masked_sample_reference(logits, *settings, bitmask, masked)


def _masked_argmax_native(
    logits: torch.Tensor, bitmask: torch.Tensor | None, masked: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    assert _native is not None
    num_rows, width = logits.shape
    assert_readable(logits, bitmask)
    assert masked is None or (masked.dtype == torch.bool and masked.is_contiguous())
    tokens = torch.empty(num_rows, dtype=torch.int64)
    peaks = torch.empty(num_rows)
    _native(
        logits.data_ptr(),
        None if bitmask is None else bitmask.data_ptr(),
        None if masked is None else masked.data_ptr(),
        tokens.data_ptr(),
        peaks.data_ptr(),
        num_rows,
        width,
        logits.stride(0),
        0 if bitmask is None else bitmask.stride(0),
        KINDS[logits.dtype],
        torch.get_num_threads(),
    )
    return tokens, peaks
