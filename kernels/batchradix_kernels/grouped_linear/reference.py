"""Weights of few bits whose inputs share scales in groups, and their layers, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """A weight [N, K] as codes. Runs of K / G inputs are a group and have a factor, runs of K / S a
    scale (as in the k-quants of llama.cpp, where S is 256 inputs and G 32 or 16 of them):

        weight = scale · factor · (code - offset) - minimum · minimum_factor

    ``codes``: int8[N, K], of 4 bits (0 to 15) or 8; ``scales`` and ``minima`` (None: zeros):
    float16[N, S]; ``factors`` and ``minimum_factors`` (None: ones): int8[N, G].
    """

    codes: torch.Tensor
    bits: int
    scales: torch.Tensor
    offset: int = 0
    factors: torch.Tensor | None = None
    minima: torch.Tensor | None = None
    minimum_factors: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def num_groups(self) -> int:
        """Of a row."""
        factors = self.factors if self.factors is not None else self.minimum_factors
        return self.scales.shape[1] if factors is None else factors.shape[1]

    def take_rows(self, rows: torch.Tensor) -> Groups:
        """Those rows (int64[n]), in this order."""

        def take(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor[rows]

        return Groups(
            codes=self.codes[rows],
            bits=self.bits,
            scales=self.scales[rows],
            offset=self.offset,
            factors=take(self.factors),
            minima=take(self.minima),
            minimum_factors=take(self.minimum_factors),
        )

    def widen(self) -> torch.Tensor:
        """float32[N, K], each number rounded at most once."""
        codes = self.codes.float().view(self.shape[0], self.num_groups, -1)
        weight = (codes - self.offset) * self._of_groups(self.scales, self.factors)
        if self.minima is not None:
            weight -= self._of_groups(self.minima, self.minimum_factors)
        return weight.flatten(1)

    def _of_groups(self, scales: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
        """float32[N, G, 1]."""
        each = scales.float().repeat_interleave(self.num_groups // scales.shape[1], dim=1)
        return (each if factors is None else each * factors)[..., None]


def grouped_linear_reference(
    x: torch.Tensor, weight: Groups, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """float32[T, N] from bfloat16[T, K]: the weight is rounded to bfloat16, the rest is float32."""
    rounded = weight.widen().bfloat16().float()
    return functional.linear(x.float(), rounded, None if bias is None else bias.float())
