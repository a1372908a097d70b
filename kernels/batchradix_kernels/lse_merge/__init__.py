"""Merging partial attention over disjoint sets of keys, exactly.

Attention over keys ``A ∪ B`` is the average of attention over ``A`` and over ``B`` weighted by
the exponentials of their log-sum-exps (online softmax, Milakov and Gimelshein 2018; used for
shared prefixes by Hydragen, 2024, and by cascade inference).
"""

from __future__ import annotations

import math

import torch

from batchradix_kernels.lse_merge.reference import lse_merge_reference, merge_parts_reference
from batchradix_kernels.triton_runtime import serves

__all__ = [
    "lse_merge",
    "lse_merge_reference",
    "merge_outputs",
    "merge_parts",
    "merge_parts_reference",
]


def lse_merge(outputs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges ``P`` partial results.

    ``outputs``: float32[P, ..., E], each part normalised over its own keys; ``lses``:
    float32[P, ...], natural logarithms, ``-inf`` where a part has no key (its output must then
    be finite, say zero). Returns float32[..., E] and float32[...]: zero and ``-inf`` where no
    part has keys.
    """
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - lse.masked_fill(lse == -math.inf, 0.0))
    return _weighted_sum(outputs, weights), lse


def merge_outputs(outputs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
    """The output of `lse_merge` alone, for rows of which at least one part has keys."""
    if outputs.shape[0] == 1:
        return outputs[0]
    return _weighted_sum(outputs, torch.softmax(lses, dim=0))


def merge_parts(
    outputs: torch.Tensor,
    lses: torch.Tensor,
    offsets: torch.Tensor,
    parts: torch.Tensor,
    out: torch.Tensor,
    out_lse: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Merges of each of ``T`` queries its own parts, however many, in the order they stand in.

    ``outputs``: float32[P, H, E], ``lses``: float32[P, H], as for `lse_merge`; the parts of query
    ``t`` are ``parts[offsets[t]:offsets[t + 1]]``, ``offsets``: int32[T + 1], ``parts``: int32,
    what lies behind the last offset being unused. Writes to ``out``, [T, H, E] of any float dtype,
    and ``out_lse``, float32[T, H]: zero and ``-inf`` for a query without parts or without keys.
    ``sinks``, float32[H], are scores that take weight from ``out`` and give no value. All are
    contiguous.
    """
    if serves(out.device):
        from batchradix_kernels.lse_merge.triton import merge_parts_triton

        merge_parts_triton(outputs, lses, offsets, parts, out, out_lse, sinks)
    else:
        merge_parts_reference(outputs, lses, offsets, parts, out, out_lse, sinks)


def _weighted_sum(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    weights = weights.unsqueeze(-1)
    merged = outputs[0] * weights[0]
    for part in range(1, outputs.shape[0]):
        merged.addcmul_(outputs[part], weights[part])
    return merged
