"""Choosing experts and sorting by them in Triton against the references."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix_kernels.moe_routing import (
    Routing,
    moe_routing,
    moe_routing_reference,
    num_blocks_at_most,
    sort_by_expert,
)
from batchradix_kernels.testing import TOLERANCES, assert_matches

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
MIXTRAL = Routing(num_chosen=2, normalise=True)
QWEN2 = Routing(num_chosen=4)
V2_LITE = Routing(num_chosen=6, num_groups=1)
V2 = Routing(num_chosen=6, num_groups=8, num_groups_kept=3, scaling=16.0)
V3 = Routing(
    num_chosen=8,
    scoring="sigmoid",
    num_groups=8,
    num_groups_kept=4,
    group_score="best_two",
    normalise=True,
    scaling=2.5,
)
KIMI = Routing(num_chosen=8, scoring="sigmoid", normalise=True, scaling=2.827)
MODELS = {
    "mixtral": (MIXTRAL, 8),
    "qwen2-moe": (QWEN2, 60),
    "v2-lite": (V2_LITE, 64),
    "v2": (V2, 160),
    "v3": (V3, 256),
    "kimi-k2": (KIMI, 384),
}


def logits_of(num_tokens: int, num_experts: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a wider tensor, which holds NaN beside them."""
    wide = torch.full((num_tokens, num_experts + 5), math.nan, dtype=dtype)
    wide[:, :num_experts] = 3 * torch.randn(num_tokens, num_experts)
    return wide[:, :num_experts]


def check(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> None:
    """Where the reference's scores are apart, its experts; its weights anyhow."""
    expert_ids, weights = moe_routing(logits, routing, bias)
    wanted_ids, wanted = moe_routing_reference(logits, routing, bias)
    assert expert_ids.dtype == torch.int64
    assert torch.equal(expert_ids, wanted_ids)
    assert_matches(weights, wanted, TOLERANCES[torch.float32])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_experts_and_weights_are_those_of_the_reference(model, biased, dtype):
    torch.manual_seed(1)
    routing, num_experts = MODELS[model]
    bias = torch.randn(num_experts) if biased else None
    check(logits_of(9, num_experts, dtype), routing, bias)


def test_the_bias_chooses_and_does_not_weigh():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([-9.0, 0.0, 0.0, 9.0])
    ids, weights = moe_routing(logits, Routing(num_chosen=2, scoring="sigmoid"), bias)
    assert ids.tolist() == [[3, 1]]
    torch.testing.assert_close(weights, torch.tensor([[-1.0, 1.0]]).sigmoid())


def test_a_good_expert_of_a_bad_group_is_not_taken():
    logits = torch.tensor([[9.0, -9.0, -9.0, 1.0, 1.5, -9.0]])
    routing = Routing(
        num_chosen=2, scoring="sigmoid", num_groups=2, num_groups_kept=1, group_score="best_two"
    )
    assert moe_routing(logits, routing)[0].tolist() == [[4, 3]]
    best = Routing(num_chosen=2, scoring="sigmoid", num_groups=2, num_groups_kept=1)
    assert moe_routing(logits, best)[0].tolist() == [[0, 1]]


def test_of_equal_scores_the_lower_expert_and_group_are_taken():
    routing = Routing(num_chosen=3, num_groups=4, num_groups_kept=2)
    assert moe_routing(torch.zeros(2, 12), routing)[0].tolist() == [[0, 1, 2]] * 2


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, at NaN
@pytest.mark.parametrize("routing", [V2_LITE, V3])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_broken_token_gets_different_experts_that_there_are_and_breaks_no_other(routing, value):
    torch.manual_seed(2)
    logits = logits_of(3, 64, torch.float32)
    healthy = moe_routing(logits, routing)
    logits[1, 5:20] = value
    ids, weights = moe_routing(logits, routing)
    assert len(set(ids[1].tolist())) == routing.num_chosen
    assert ((ids >= 0) & (ids < 64)).all()
    for row in (0, 2):
        assert torch.equal(ids[row], healthy[0][row])
        assert torch.equal(weights[row], healthy[1][row])
    logits[1] = math.nan
    ids, weights = moe_routing(logits, routing)
    assert len(set(ids[1].tolist())) == routing.num_chosen
    assert weights[1].isnan().all()


def test_no_tokens_choose_nothing():
    ids, weights = moe_routing(torch.empty(0, 8), MIXTRAL)
    assert ids.shape == weights.shape == (0, 2)


def check_order(ids: torch.Tensor, num_experts: int, block_rows: int) -> None:
    order = sort_by_expert(ids, num_experts, block_rows)
    (used,) = order.num_blocks.tolist()
    flat, num_rows = ids.flatten().tolist(), ids.numel()
    blocks = order.rows.view(-1, block_rows)[:used].tolist()
    experts = order.experts[:used].tolist()
    assert used <= len(order.experts) == num_blocks_at_most(num_rows, num_experts, block_rows)
    seen = []
    for block, expert in zip(blocks, experts, strict=True):
        own = [row for row in block if row < num_rows]
        assert block == own + [num_rows] * (block_rows - len(own))
        assert own
        assert all(flat[row] == expert for row in own)
        seen += own
    wanted = [row for e in range(num_experts) for row in range(num_rows) if flat[row] == e]
    assert seen == wanted
    for expert in set(experts):  # blocks of an expert are full but for the last
        last = max(number for number, one in enumerate(experts) if one == expert)
        assert all(
            num_rows not in block
            for number, block in enumerate(blocks)
            if experts[number] == expert and number != last
        )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_many_rows_are_sorted_by_expert(dtype):
    torch.manual_seed(3)
    check_order(torch.randint(0, 7, (400, 6)).to(dtype), 8, 16)


@settings(deadline=None, max_examples=20, derandomize=True)
@given(
    num_experts=st.integers(1, 12),
    num_tokens=st.integers(0, 40),
    num_chosen=st.integers(1, 3),
    block_rows=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 99),
)
def test_any_rows_are_sorted_by_expert(num_experts, num_tokens, num_chosen, block_rows, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, num_experts, (num_tokens, num_chosen), generator=generator)
    check_order(ids, num_experts, block_rows)
