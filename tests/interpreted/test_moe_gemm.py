"""Experts in Triton against the reference in float64, unused memory poisoned."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix_kernels.moe_gemm import moe_experts, moe_experts_reference
from batchradix_kernels.testing import TOLERANCES, assert_matches, poison_except

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
Inputs = tuple[torch.Tensor, ...]


def inputs(num_tokens: int, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> Inputs:
    """``sizes``: experts, of a token, hidden, width. Rows of ``x`` lie in a wider tensor, and the
    experts that no token takes are NaN."""
    num_experts, num_chosen, hidden, width = sizes
    torch.manual_seed(num_tokens)
    wide = torch.full((num_tokens, hidden + 3), math.nan, dtype=dtype)
    wide[:, :hidden] = torch.randn(num_tokens, hidden)
    gate_up = torch.randn(num_experts, 2 * width, hidden) * hidden**-0.5
    down = torch.randn(num_experts, hidden, width) * width**-0.5
    scores = torch.randn(num_tokens, num_experts)
    if num_experts > num_chosen:
        scores[:, 1] = -math.inf  # one without tokens
    ids = scores.topk(num_chosen, dim=1).indices
    weights = torch.rand(num_tokens, num_chosen)
    used = set(ids.flatten().tolist())
    gate_up, down = (poison_except(w, 0, used).to(dtype) for w in (gate_up, down))
    return wide[:, :hidden], gate_up, down, ids, weights


def check(given: Inputs) -> None:
    x, gate_up, down, ids, weights = given
    out = moe_experts(*given)
    assert out.dtype == x.dtype
    exact = (tensor.double() for tensor in (x, gate_up, down))
    wanted = moe_experts_reference(*exact, ids, weights.double())
    assert_matches(out, wanted, TOLERANCES[x.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "sizes"),
    [
        (1, (1, 1, 1, 1)),
        (3, (5, 2, 20, 12)),
        (9, (8, 3, 150, 70)),
        (70, (3, 2, 130, 65)),  # blocks of 64 rows
        (130, (2, 1, 33, 140)),  # and of 128
    ],
)
def test_experts_equal_the_reference(num_tokens, sizes, dtype):
    check(inputs(num_tokens, sizes, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_of_every_size_neither_overflow_nor_vanish(dtype):
    given = inputs(5, (3, 2, 16, 16), dtype)
    given[0][2] *= 100
    check(given)


def test_no_tokens_give_nothing():
    assert moe_experts(*inputs(0, (3, 2, 16, 16), torch.float32)).shape == (0, 16)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, at NaN
@pytest.mark.parametrize("broken", ["x", "weights"])
def test_a_broken_token_breaks_itself_alone(broken):
    given = inputs(7, (3, 2, 20, 12), torch.float32)
    healthy = moe_experts(*given)
    (given[0] if broken == "x" else given[4])[4] = math.nan
    out = moe_experts(*given)
    others = [0, 1, 2, 3, 5, 6]
    assert out[4].isnan().all()
    assert torch.equal(out[others], healthy[others])


@settings(deadline=None, max_examples=6, derandomize=True)
@given(
    num_tokens=st.integers(1, 40),
    num_experts=st.integers(3, 6),
    num_chosen=st.integers(1, 3),
    hidden=st.integers(1, 140),
    width=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
)
def test_any_shape_equals_the_reference(num_tokens, num_experts, num_chosen, hidden, width, dtype):
    check(inputs(num_tokens, (num_experts, num_chosen, hidden, width), dtype))
