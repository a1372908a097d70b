"""Merging each query's own parts in Triton against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix_kernels.lse_merge import merge_parts, merge_parts_reference
from batchradix_kernels.testing import TOLERANCES, assert_matches

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def check(counts: list[int], num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Queries with so many parts each, in any places; unused parts and the list's end are bad."""
    torch.manual_seed(sum(counts))
    num_parts = sum(counts) + 2
    outputs = torch.randn(num_parts, num_heads, head_dim)
    lses = 20 * torch.randn(num_parts, num_heads)
    if len(counts) > 1:
        lses[:, 0] = -math.inf  # a head without keys anywhere
    chosen = torch.randperm(num_parts)
    outputs[chosen[-2:]], lses[chosen[-2:]] = math.nan, math.nan
    parts = torch.cat([chosen[:-2], torch.tensor([-5, 1 << 30])]).int()
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0)]).int()
    out = torch.full((len(counts), num_heads, head_dim), math.nan, dtype=dtype)
    lse = torch.full(out.shape[:2], math.nan)
    wanted, wanted_lse = out.clone(), lse.clone()
    merge_parts(outputs, lses, offsets, parts, out, lse)
    merge_parts_reference(outputs, lses, offsets, parts, wanted, wanted_lse)
    assert_matches(out, wanted, TOLERANCES[dtype])
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=2e-5)
    again = torch.empty_like(out)
    merge_parts(outputs, lses, offsets, parts, again)
    assert torch.equal(again, out)
    sinks = 20 * torch.randn(num_heads)
    lse.fill_(math.nan)
    merge_parts(outputs, lses, offsets, parts, out, lse, sinks)
    merge_parts_reference(outputs, lses, offsets, parts, wanted, None, sinks)
    assert_matches(out, wanted, TOLERANCES[dtype])
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 64), (9, 80), (32, 128), (3, 20)])
def test_queries_with_any_number_of_parts_equal_the_reference(dtype, num_heads, head_dim):
    check([3, 0, 1, 5], num_heads, head_dim, dtype)


@settings(deadline=None, max_examples=10, derandomize=True)
@given(
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=6),
    num_heads=st.integers(1, 20),
    head_dim=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
)
def test_any_list_of_parts_equals_the_reference(counts, num_heads, head_dim, dtype):
    check(counts, num_heads, head_dim, dtype)
