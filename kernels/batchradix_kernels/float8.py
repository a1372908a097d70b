"""Keys and values in 8 bits: torch's float8_e4m3fn, without a scale.

A sign, 4 bits of exponent and 3 of mantissa: 448 at most, 2^-9 at least, no infinity, a NaN of
either sign. Rounding changes a number by at most a sixteenth of it, from 2^-6 on upwards.
"""

from __future__ import annotations

import torch

__all__ = ["FLOAT8", "LARGEST", "as_bytes", "stored"]

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0


def stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` as a pool of ``dtype`` holds it: rounded to the nearest, ties to even. What is beyond
    `LARGEST`, infinity too, becomes that where ``dtype`` is `FLOAT8`; NaN stays NaN."""
    return x.clamp(-LARGEST, LARGEST).to(FLOAT8) if dtype == FLOAT8 else x.to(dtype)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a view of its bytes where they are floats of 8 bits, which torch does not move by
    index everywhere."""
    return x.view(torch.uint8) if x.dtype == FLOAT8 else x
