"""Integers of few bits in the words of AWQ, GPTQ and compressed-tensors, made into weights.

All give float32[N, K], N outputs and K inputs, of tensors as the files hold them; G is the number
of groups of inputs that share a scale. Numbers stand in their words from the lowest bit on; those
of 3 bits go on from one word to the next.
"""

from __future__ import annotations

import torch

# The nibbles of a word of AWQ's gemm layout hold outputs 0, 2, 4, 6, 1, 3, 5, 7.
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32[..., W] to uint8[..., W · 32 / bits]; ``bits`` from 1 to 8."""
    flat = words.contiguous().view(-1).view(torch.uint8)
    groups = flat.view(*words.shape[:-1], -1, bits)  # 8 numbers each
    whole = torch.zeros(groups.shape[:-1], dtype=torch.int64)
    for i in range(bits):
        whole |= groups[..., i].to(torch.int64) << 8 * i
    numbers = torch.empty((*groups.shape[:-1], 8), dtype=torch.uint8)
    for i in range(8):
        numbers[..., i] = (whole >> bits * i) & (2**bits - 1)
    return numbers.flatten(-2)


def scaled(
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    groups: torch.Tensor | None = None,
) -> torch.Tensor:
    """(``values`` [N, K] - ``zeros``) · ``scales``, both [N, G] or [1, G].

    ``groups``: int64[K], the group of each input; None for runs of K / G, the last one shorter
    where they are not even.
    """
    num_inputs, num_groups = values.shape[1], scales.shape[1]
    if groups is None and num_inputs % num_groups:
        groups = torch.arange(num_inputs) // -(-num_inputs // num_groups)
    weight = values.to(torch.float32)
    if groups is None:
        parts = weight.view(weight.shape[0], num_groups, -1)
        if zeros is not None:
            parts.sub_(zeros[..., None])
        parts.mul_(scales.float()[..., None])
        return weight
    if zeros is not None:
        weight.sub_(zeros[:, groups])
    return weight.mul_(scales.float()[:, groups])


def awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``qweight``: int32[K, N / 8], ``qzeros``: int32[G, N / 8], ``scales``: [G, N]."""
    values, zeros = (
        unpack(words, 4).view(*words.shape, 8)[..., _AWQ_PLACES].flatten(-2)
        for words in (qweight, qzeros)
    )
    return scaled(values.T.contiguous(), scales.T, zeros.T)


def gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None,
    zero_offset: int,
) -> torch.Tensor:
    """``qweight``: int32[K · bits / 32, N], ``qzeros``: int32[G, N · bits / 32], ``scales``:
    [G, N], ``g_idx``: int64[K]; ``zero_offset``: as in `StoredWeights`."""
    bits = qzeros.shape[1] * 32 // scales.shape[1]
    values = unpack(qweight.T, bits)
    if zero_offset and 32 % bits == 0:
        # Writers take 1 off whole words, so that a zero point of 0 borrows from the next one.
        qzeros = qzeros + sum(zero_offset << at for at in range(0, 32, bits))
        zeros = unpack(qzeros, bits)
    else:
        zeros = unpack(qzeros, bits) + zero_offset & 2**bits - 1
    return scaled(values, scales.T, zeros.T, g_idx)


def packed(
    weight_packed: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    groups: torch.Tensor | None,
    num_inputs: int,
) -> torch.Tensor:
    """``weight_packed``: int32[N, ⌈K · bits / 32⌉], ``scales``: [N, G] or [1, 1], ``zero_points``:
    int8[N, G] or, packed along N, int32. What is packed is stored with half its range added."""
    num_words = weight_packed.shape[1]
    bits = next(bits for bits in (8, 4, 2) if -(-num_inputs * bits // 32) <= num_words)
    half = 2 ** (bits - 1)
    values = unpack(weight_packed, bits)[:, :num_inputs]
    if zero_points is None:
        zeros = torch.full((1, scales.shape[1]), half)
    elif zero_points.dtype == torch.int32:
        zeros = unpack(zero_points.T, bits).T[: len(values)]
    else:
        zeros = zero_points.int() + half
    return scaled(values.contiguous(), scales, zeros, groups)
