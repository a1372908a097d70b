"""Floats of 8 bits in Triton's interpreter, as it is repaired here, are those of torch."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from batchradix_kernels.float8 import FLOAT8, LARGEST, stored
from batchradix_kernels.kv_store import kv_store

EVERY = torch.arange(256, dtype=torch.uint8).view(FLOAT8)


@triton.jit
def convert_kernel(source, target, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(target + at, tl.load(source + at).to(target.dtype.element_ty))


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit, but for what kind of NaN it is."""
    actual, expected = actual.float(), expected.float()
    is_nan = expected.isnan()
    bits = [x.masked_fill(is_nan, 0).view(torch.int32) for x in (actual, expected)]
    return torch.equal(actual.isnan(), is_nan) and torch.equal(*bits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_one_of_them_is_widened_exactly_and_comes_back(dtype):
    wide, back = torch.empty(256, dtype=dtype), torch.empty(256, dtype=FLOAT8)
    convert_kernel[(1,)](EVERY, wide, COUNT=256)
    assert same(wide, EVERY.to(dtype))
    assert wide.isnan().sum() == 2
    convert_kernel[(1,)](wide, back, COUNT=256)
    assert same(back, EVERY)


def numbers_around(every: torch.Tensor) -> torch.Tensor:
    """All numbers of 8 bits, what lies halfway between neighbours, and its neighbours."""
    exact = every.float()
    exact = exact[exact.isfinite()].sort().values
    halfway = (exact[1:] + exact[:-1]) / 2
    around = [halfway.nextafter(torch.tensor(to)) for to in (math.inf, -math.inf)]
    return torch.cat([exact, halfway, *around])


def test_what_is_stored_is_rounded_to_the_nearest_and_ends_at_the_largest():
    beyond = [LARGEST + 1, 464.0, 465.0, 480.0, 1e9, math.inf]
    x = torch.cat([numbers_around(EVERY), torch.tensor([*beyond, *(-b for b in beyond), math.nan])])
    k = x.view(1, 1, -1)
    pool = torch.empty(2, 1, 1, len(x), dtype=FLOAT8)
    kv_store(k, -k, torch.zeros(1, dtype=torch.int32), pool)
    table = EVERY.float()
    table = table[table.isfinite()].double()
    distance = (x.double().clamp(-LARGEST, LARGEST)[:, None] - table).abs()
    for side, sign in ((pool[0, 0, 0], 1), (pool[1, 0, 0], -1)):
        got = sign * side.double()
        assert got[-1].isnan()
        nearest = (got[:-1] - x[:-1].double().clamp(-LARGEST, LARGEST)).abs()
        assert torch.equal(nearest, distance[:-1].min(dim=1).values)
        assert same(side, stored(sign * x, FLOAT8))  # ties as torch decides them, to even


def test_ties_go_to_even():
    ties = torch.tensor([17.0, 19.0, 2**-10, 3 * 2**-10, 2.0**-7 * 1.0625])
    assert stored(ties, FLOAT8).float().tolist() == [16, 20, 0, 2**-8, 2.0**-7]
