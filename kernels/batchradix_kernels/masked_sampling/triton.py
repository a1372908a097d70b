"""Choosing a token under a mask in Triton: a program a row, which stays in the second cache.

Greedily a row is read once. A draw finds where top-k and top-p cut without sorting: the weight at
which the count, or the mass, of all that weigh as much first reaches its goal is found digit by
digit in the bits of a float32, three bits each time the row is read.

Numerics: weights are float32; sums are float32 over single columns of the row's blocks and
over the blocks of one reduction, float64 between these and within the block that holds the
token. The draw can differ from the reference's where the random number falls within rounding of
the border between two tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from batchradix_kernels.masked_sampling.reference import GREEDY_BELOW, assert_readable

__all__ = [
    "BLOCK",
    "NUM_WARPS",
    "apply_bitmask_kernel",
    "apply_bitmask_triton",
    "masked_argmax_triton",
    "masked_sample_kernel",
    "masked_sample_triton",
]

BLOCK = 1024
NUM_WARPS = 8
_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)
_ONE_BITS = tl.constexpr(0x3F800000)  # of float32 1.0, the largest weight


@triton.jit
def _load(x, words, i, width, is_masked, HAS_MASK: tl.constexpr):
    """Logits in float32 and whether they may be chosen; -inf behind the end of the row."""
    inside = i < width
    value = tl.load(x + i, mask=inside, other=float("-inf")).to(tl.float32)
    allowed = inside
    if HAS_MASK:
        word = tl.load(words + i // 32, mask=inside & is_masked, other=-1)
        allowed = inside & (((word >> (i % 32)) & 1) != 0)
    return value, allowed


@triton.jit
def _weights(x, words, i, width, is_masked, peak, temperature, HAS_MASK: tl.constexpr):
    value, allowed = _load(x, words, i, width, is_masked, HAS_MASK)
    return tl.exp(tl.where(allowed, value - peak, float("-inf")) / temperature)


@triton.jit
def _largest(x, words, width, is_masked, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr):
    """The largest allowed logit and its first place; NaN where any logit is NaN or +inf."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value, allowed = _load(x, words, i, width, is_masked, HAS_MASK)
        broken = tl.where(value < float("inf"), broken, 1)
        better = allowed & (value > best)
        best = tl.where(better, value, best)
        place = tl.where(better, i, place)
    is_broken = tl.max(broken, axis=0) != 0
    peak = tl.max(best, axis=0)
    token = tl.min(tl.where(best == peak, place, width), axis=0)
    token = tl.where(is_broken | (peak == float("-inf")), 0, token)
    return tl.where(is_broken, float("nan"), peak), token


@triton.jit
def _cut(
    x,
    words,
    width,
    is_masked,
    peak,
    temperature,
    goal,
    COUNTED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest weight such that those at or above it number, or weigh, at least ``goal``."""
    digit = tl.arange(0, 8)
    found = tl.full([1], 0, tl.int32)
    for step in range(10):
        shift = 27 - 3 * step
        bounds = found + (digit << shift)
        reached = tl.zeros([BLOCK, 8], tl.float32)
        for start in range(0, width, BLOCK):
            i = start + tl.arange(0, BLOCK)
            weight = _weights(x, words, i, width, is_masked, peak, temperature, HAS_MASK)
            above = weight.to(tl.int32, bitcast=True)[:, None] >= bounds[None, :]
            if COUNTED:
                reached += tl.where(above & (i < width)[:, None], 1.0, 0.0)
            else:
                reached += tl.where(above, weight[:, None], 0.0)
        enough = (tl.sum(reached, axis=0).to(tl.float64) >= goal) & (bounds <= _ONE_BITS)
        largest = tl.max(tl.where(enough, digit, 0), axis=0)
        found += largest << shift
    return tl.sum(found, axis=0).to(tl.float32, bitcast=True)


@triton.jit
def _mass(
    x,
    words,
    width,
    is_masked,
    peak,
    temperature,
    bound,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """float64 scalars: what the weights at or above ``bound`` sum up to, and those above it."""
    at_least = tl.full([], 0.0, tl.float64)
    above = tl.full([], 0.0, tl.float64)
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        weight = _weights(x, words, i, width, is_masked, peak, temperature, HAS_MASK)
        at_least += tl.sum(tl.where(weight >= bound, weight, 0.0), axis=0).to(tl.float64)
        above += tl.sum(tl.where(weight > bound, weight, 0.0), axis=0).to(tl.float64)
    return at_least, above


@triton.jit
def _pick(
    x,
    words,
    width,
    is_masked,
    peak,
    temperature,
    bound,
    num_equal,
    target,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first place where the running sum of kept weights exceeds ``target``; the last place
    that is kept where none does.

    Kept are the weights above ``bound`` and the first ``num_equal`` (float64) equal to it.
    """
    total = tl.full([], 0.0, tl.float64)
    before = tl.full([], 0.0, tl.float64)
    seen = tl.full([], 0.0, tl.float64)
    seen_before = tl.full([], 0.0, tl.float64)
    block = tl.full([], 0, tl.int32)
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        weight = _weights(x, words, i, width, is_masked, peak, temperature, HAS_MASK)
        equal = tl.sum(tl.where(weight == bound, 1.0, 0.0), axis=0).to(tl.float64)
        mass = tl.sum(tl.where(weight > bound, weight, 0.0), axis=0).to(tl.float64)
        mass += tl.maximum(tl.minimum(num_equal - seen, equal), 0.0) * bound
        is_next = (total <= target) & (mass > 0.0)
        block = tl.where(is_next, start, block)
        before = tl.where(is_next, total, before)
        seen_before = tl.where(is_next, seen, seen_before)
        total += mass
        seen += equal
    i = block + tl.arange(0, BLOCK)
    weight = _weights(x, words, i, width, is_masked, peak, temperature, HAS_MASK)
    rank = seen_before + tl.cumsum((weight == bound).to(tl.int32), axis=0)
    kept = (weight > bound) | ((weight == bound) & (weight > 0.0) & (rank <= num_equal))
    sums = before + tl.cumsum(tl.where(kept, weight, 0.0).to(tl.float64), axis=0)
    first = tl.min(tl.where(kept & (sums > target), i, width), axis=0)
    last = tl.max(tl.where(kept, i, 0), axis=0)
    return tl.where(first < width, first, last)


@triton.jit
def masked_sample_kernel(
    logits,
    bitmask,
    masked,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    uniforms,
    tokens,
    peaks,
    width,
    logits_stride,
    bitmask_stride,
    HAS_MASK: tl.constexpr,
    GREEDY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * logits_stride
    words = bitmask + row * bitmask_stride
    is_masked = True
    if HAS_MASK:
        is_masked = tl.load(masked + row) != 0
    peak, token = _largest(x, words, width, is_masked, HAS_MASK, BLOCK)
    tl.store(peaks + row, peak)
    if not GREEDY:
        temperature = tl.load(temperatures + row)
        if (temperature >= _GREEDY_BELOW) & (tl.abs(peak) < float("inf")):
            top_k = tl.load(top_ks + row)
            top_p = tl.load(top_ps + row)
            min_p = tl.load(min_ps + row).to(tl.float32)
            bound = tl.full([], 0.0, tl.float32)
            num_equal = tl.full([], 2**31, tl.float64)
            if (top_k > 0) & (top_k < width):
                goal = top_k.to(tl.float64)
                bound = _cut(
                    x, words, width, is_masked, peak, temperature, goal, True, HAS_MASK, BLOCK
                )
            if top_p < 1.0:
                held, _ = _mass(
                    x, words, width, is_masked, peak, temperature, bound, HAS_MASK, BLOCK
                )
                goal = top_p * held
                bound = _cut(
                    x, words, width, is_masked, peak, temperature, goal, False, HAS_MASK, BLOCK
                )
                _, above = _mass(
                    x, words, width, is_masked, peak, temperature, bound, HAS_MASK, BLOCK
                )
                num_equal = tl.maximum(tl.ceil((goal - above) / bound), 1.0)
            if min_p > bound:
                bound = min_p
                num_equal = tl.full([], 2**31, tl.float64)
            held, above = _mass(
                x, words, width, is_masked, peak, temperature, bound, HAS_MASK, BLOCK
            )
            total = tl.minimum(held, above + num_equal * bound)
            target = tl.load(uniforms + row) * total
            token = _pick(
                x,
                words,
                width,
                is_masked,
                peak,
                temperature,
                bound,
                num_equal,
                target,
                HAS_MASK,
                BLOCK,
            )
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def apply_bitmask_kernel(
    x, bitmask, rows, width, logits_stride, bitmask_stride, BLOCK: tl.constexpr
):
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bitmask + row * bitmask_stride + i // 32, mask=i < width, other=-1)
    forbidden = ((word >> (i % 32)) & 1) == 0
    tl.store(x + row * logits_stride + i, float("-inf"), mask=(i < width) & forbidden)


def apply_bitmask_triton(x: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    """Same contract as `apply_bitmask`, for tensors that Triton serves; ``rows``: int64[n]."""
    width = x.shape[1]
    assert_readable(x, bitmask)
    if len(rows):
        grid = (len(rows), triton.cdiv(width, BLOCK))
        apply_bitmask_kernel[grid](
            x, bitmask, rows, width, x.stride(0), bitmask.stride(0), BLOCK=BLOCK, num_warps=4
        )


def masked_argmax_triton(
    logits: torch.Tensor, bitmask: torch.Tensor | None = None, masked: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same contract as `masked_argmax`, for tensors that Triton serves; one kernel."""
    return _launch(logits, (logits,) * 5, bitmask, masked, greedy=True)


def masked_sample_triton(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    bitmask: torch.Tensor | None = None,
    masked: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same contract as `masked_sample`, for tensors that Triton serves; one kernel."""
    settings = (temperature, top_k, top_p, min_p, uniform)
    assert all(setting.is_contiguous() for setting in settings)
    return _launch(logits, settings, bitmask, masked, greedy=False)


def _launch(
    logits: torch.Tensor,
    settings: tuple[torch.Tensor, ...],
    bitmask: torch.Tensor | None,
    masked: torch.Tensor | None,
    *,
    greedy: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, width = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    peaks = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if num_rows == 0:
        return tokens, peaks
    assert_readable(logits, bitmask)
    if bitmask is not None and masked is None:
        masked = torch.ones(num_rows, dtype=torch.bool, device=logits.device)
    masked_sample_kernel[(num_rows,)](
        logits,
        logits if bitmask is None else bitmask,
        logits if masked is None else masked,
        *settings,
        tokens,
        peaks,
        width,
        logits.stride(0),
        0 if bitmask is None else bitmask.stride(0),
        HAS_MASK=bitmask is not None,
        GREEDY=greedy,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    return tokens, peaks
