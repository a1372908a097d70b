"""Choosing a token under a mask, in plain torch: whole rows sorted, sums in float64."""

from __future__ import annotations

import math

import torch

GREEDY_BELOW = 1e-5  # temperatures under this take the largest logit, as in vLLM


def assert_readable(logits: torch.Tensor, bitmask: torch.Tensor | None) -> None:
    """Raises AssertionError where kernels could not read them by rows."""
    assert logits.stride(1) == 1
    if bitmask is not None:
        assert bitmask.dtype == torch.int32
        assert bitmask.stride(1) == 1
        assert bitmask.shape[1] * 32 >= logits.shape[1]


def expand_bitmask(bitmask: torch.Tensor, width: int) -> torch.Tensor:
    """int32[R, words] to bool[R, width]: bit ``i % 32`` of word ``i // 32`` is element ``i``."""
    shifts = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    return ((bitmask[:, :, None] >> shifts) & 1).bool().flatten(1)[:, :width]


def apply_bitmask_reference(x: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    """Same contract as `apply_bitmask`; ``rows``: int64[n]."""
    allowed = expand_bitmask(bitmask[rows], x.shape[1])
    x[rows] = torch.where(allowed, x[rows], -math.inf)


def masked_argmax_reference(
    logits: torch.Tensor, bitmask: torch.Tensor | None = None, masked: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same contract as `masked_argmax`, on any device and in any floating dtype."""
    x = logits.float()
    broken = ~(x < math.inf).all(dim=1)
    peak, token = _masked(x, bitmask, masked).max(dim=1)
    return (
        torch.where(broken | (peak == -math.inf), 0, token),
        torch.where(broken, math.nan, peak),
    )


def masked_sample_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    bitmask: torch.Tensor | None = None,
    masked: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same contract as `masked_sample`, on any device and in any floating dtype."""
    tokens, peaks = masked_argmax_reference(logits, bitmask, masked)
    x = _masked(logits.float(), bitmask, masked)
    for r in range(len(x)):
        if temperature[r] >= GREEDY_BELOW and bool(peaks[r].isfinite()):
            weights = torch.exp((x[r] - peaks[r]) / temperature[r])
            kept = kept_weights(weights, int(top_k[r]), float(top_p[r]), float(min_p[r]))
            sums = kept.cumsum(dim=0)
            above = sums > uniform[r] * sums[-1]
            # Where rounding put the target at the end, the last column at which sums still rose.
            tokens[r] = above.int().argmax() if above.any() else kept.nonzero()[-1, 0]
    return tokens, peaks


def kept_weights(weights: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """float64[V]: the weights of float32[V] that the cuts leave, 0 for all others.

    Weights are relative to the largest, which is 1. Of top-k every weight equal to the k-th
    stays, of top-p the lower ids among equal weights.
    """
    weights, order = weights.double().sort(descending=True, stable=True)
    if 0 < top_k < len(weights):
        weights = torch.where(weights >= weights[top_k - 1], weights, 0.0)
    if top_p < 1:
        before = weights.cumsum(dim=0) - weights
        weights = torch.where(before < top_p * weights.sum(), weights, 0.0)
    weights = torch.where(weights < min_p, 0.0, weights)
    return torch.zeros_like(weights).scatter_(0, order, weights)


def _masked(
    x: torch.Tensor, bitmask: torch.Tensor | None, masked: torch.Tensor | None
) -> torch.Tensor:
    if bitmask is None:
        return x
    allowed = expand_bitmask(bitmask, x.shape[1])
    if masked is not None:
        allowed = allowed | ~masked[:, None]
    return x.masked_fill(~allowed, -math.inf)
