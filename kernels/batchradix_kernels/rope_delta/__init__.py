"""Rotating stored keys on to other positions, in place.

Rotations add up (RoFormer, Su et al. 2021): a key that was rotated for position ``p`` and is
rotated by the angles of ``d`` is the key of position ``p + d``. So keys of text that moves within
a prompt need not be computed again, but for what the text before it changed in them.
"""

from __future__ import annotations

import torch

from batchradix_kernels.rope_delta.reference import rope_delta_reference
from batchradix_kernels.triton_runtime import serves

__all__ = ["rope_delta", "rope_delta_reference"]


def rope_delta(
    keys: torch.Tensor, slots: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> None:
    """Rotates the keys in ``slots``, on every layer and head, by an angle a slot and pair.

    ``keys``: [L, K, S, E], a view whose last axis is dense, changed in place; its pairs stand half
    a head apart. ``slots``: int32[n], all different. ``cosines``, ``sines``: float32[n, E / 2], of
    the angles of each slot's delta, negative ones included; one row expanded to n will do. They
    must not carry a factor, as some kinds of rope scaling put into them.
    Computed in float32 and rounded once: each call costs a stored key one more rounding.
    """
    if keys.is_cuda and serves(keys.device):
        from batchradix_kernels.rope_delta.triton import rope_delta_triton

        rope_delta_triton(keys, slots, cosines, sines)
    else:
        rope_delta_reference(keys, slots, cosines, sines)
