"""Integers of few bits in the words of AWQ, GPTQ and compressed-tensors, made into weights.

N are outputs, K inputs, G groups of inputs that share a scale; tensors are as the files hold them.
Numbers stand in their words from the lowest bit on; those of 3 bits go on from one word to the
next.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from batchradix_kernels.grouped_linear import Groups

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """A weight [N, K]: (``values`` - ``zeros``) · ``scales``.

    ``values``: of any dtype; ``scales``, ``zeros`` (integers; None: none): [N, G] or [1, G];
    ``groups``: int64[K], the group of each input, None for runs of K / G.
    """

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    groups: torch.Tensor | None = None

    def widen(self) -> torch.Tensor:
        """float32[N, K]."""
        num_outputs, num_groups = len(self.values), self.scales.shape[1]
        zeros, scales, groups = self.zeros, self.scales.float(), self.groups
        weight = self.values.to(torch.float32)
        parts = weight
        if groups is None:
            parts, scales = weight.view(num_outputs, num_groups, -1), scales[..., None]
            zeros = None if zeros is None else zeros[..., None]
        else:
            scales = scales[:, groups]
            zeros = None if zeros is None else zeros[:, groups]
        if zeros is not None:
            parts.sub_(zeros)
        parts.mul_(scales)
        return weight

    def as_groups(self) -> Groups | None:
        """The same numbers for a kernel; None where it does not take such groups or scales."""
        (num_outputs, num_inputs), num_groups = self.values.shape, self.scales.shape[1]
        scales = self.scales.half()
        fits = self.groups is None and num_inputs % num_groups == 0 and self.zeros is not None
        if not fits or not torch.equal(scales.to(self.scales.dtype), self.scales):
            return None
        assert self.zeros is not None
        values, zeros = self.values, self.zeros.expand(num_outputs, -1).to(torch.int16)
        bits = 4 if int(values.max()) < 16 and int(zeros.max()) < 128 else 8
        if bits == 8:  # signed
            values, zeros = values ^ 128, zeros - 128
        scales = scales.expand(num_outputs, -1).contiguous()
        return Groups(
            codes=values.contiguous().view(torch.int8),
            bits=bits,
            scales=scales,
            minima=scales,
            minimum_factors=zeros.to(torch.int8),
        )


def awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor) -> Scaled:
    """``qweight``: int32[K, N / 8], ``qzeros``: int32[G, N / 8], ``scales``: [G, N]."""
    values, zeros = (
        unpack(words, 4).view(*words.shape, 8)[..., _AWQ_PLACES].flatten(-2)
        for words in (qweight, qzeros)
    )
    return Scaled(values=values.T.contiguous(), scales=scales.T, zeros=zeros.T)


def gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None,
    zero_offset: int,
) -> Scaled:
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
    return Scaled(values=values, scales=scales.T, zeros=zeros.T, groups=g_idx)


def packed(
    weight_packed: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    groups: torch.Tensor | None,
    num_inputs: int,
) -> Scaled:
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
    return Scaled(values=values.contiguous(), scales=scales, zeros=zeros, groups=groups)
