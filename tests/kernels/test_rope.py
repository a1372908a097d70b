"""Rotation of queries and keys: C on every instruction set beside torch in float64."""

from __future__ import annotations

import pytest
import torch

from batchradix_kernels.rope import rope, rope_reference
from batchradix_kernels.testing import TOLERANCES, assert_matches, poison

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 1, 1, 2), (3, 3, 2, 20), (64, 9, 3, 64), (131, 4, 1, 96)]


def make(rows: int, num_q: int, num_k: int, head_dim: int, dtype: torch.dtype):
    """Heads whose values (nobody's business) and whose end are NaN, and the angles."""
    torch.manual_seed(rows)
    shape = (rows, num_q + 2 * num_k, head_dim)
    size = torch.Size(shape).numel()
    heads = poison(torch.empty(size + 64, dtype=dtype))[:size].view(shape)
    heads[:, : num_q + num_k] = torch.randn(rows, num_q + num_k, head_dim)
    angles = 100 * torch.randn(rows, head_dim // 2)
    return heads, angles.cos(), angles.sin()


def norms_of(head_dim: int, dtype: torch.dtype):
    return torch.randn(head_dim).to(dtype), torch.randn(head_dim).to(dtype), 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normalised", [False, True])
def test_it_equals_its_reference(every_level, dtype, shape, normalised):
    heads, cosines, sines = make(*shape, dtype)
    num_q, num_k, head_dim = shape[1:]
    norms = norms_of(head_dim, dtype) if normalised else None
    wanted = heads.double()
    rope_reference(wanted, cosines, sines, num_q, num_k, norms)
    rope(heads, cosines, sines, num_q, num_k, norms)
    rotated = num_q + num_k
    assert_matches(heads[:, :rotated], wanted[:, :rotated], TOLERANCES[dtype])
    assert heads[:, rotated:].isnan().all()


def test_norms_may_be_float32_beside_bfloat16(every_level):
    heads, cosines, sines = make(64, 9, 3, 64, torch.bfloat16)
    q_weight, k_weight, epsilon = norms_of(64, torch.float32)
    wanted = heads.double()
    rope_reference(wanted, cosines, sines, 9, 3, (q_weight, k_weight, epsilon))
    rope(heads, cosines, sines, 9, 3, (q_weight, k_weight, epsilon))
    off = (heads[:, :12].double() - wanted[:, :12]).abs()
    assert (off <= wanted[:, :12].abs() * 2**-8 * 1.01 + 1e-6).all()  # rounded once


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalised", [False, True])
def test_a_row_depends_on_itself_alone(every_level, dtype, normalised):
    heads, cosines, sines = make(131, 9, 3, 64, dtype)
    norms = norms_of(64, dtype) if normalised else None
    heads[5, 2, 7] = torch.nan
    given = heads.clone()
    rope(heads, cosines, sines, 9, 3, norms)
    assert int(heads[:, :12].isnan().any(-1).sum()) == 1
    for first, last in ((0, 1), (5, 9), (130, 131)):
        rows = slice(first, last)
        part = given[rows].clone()
        rope(part, cosines[rows], sines[rows], 9, 3, norms)
        assert torch.equal(part.nan_to_num(), heads[rows].nan_to_num())
