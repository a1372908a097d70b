"""Experts in C on every instruction set that has them beside sums in float64."""

from __future__ import annotations

import pytest
import torch

from batchradix_kernels.experts import Bf16Experts, experts_reference
from batchradix_kernels.native import Level
from batchradix_kernels.testing import TOLERANCES, assert_matches

# tokens, experts of each, experts, hidden, width of an expert
SHAPES = [
    (1, 1, 1, 32, 16),
    (1, 2, 4, 34, 16),
    (5, 2, 3, 64, 48),
    (37, 6, 64, 96, 32),
    (70, 3, 5, 130, 80),
    (130, 1, 2, 64, 64),
]


@pytest.fixture
def served(every_level: Level) -> None:
    if every_level < Level.AVX512_BF16:
        assert not Bf16Experts.serves(64, 64)
        pytest.skip("no products of bfloat16")


def make(shape: tuple[int, ...], seed: int = 1) -> tuple[torch.Tensor, ...]:
    """x, expert ids, weights, gates and what they gate, down."""
    num_tokens, num_chosen, num_experts, width, expert_width = shape
    torch.manual_seed(seed)
    memory = torch.full((num_tokens * width + 512,), torch.nan, dtype=torch.bfloat16)
    x = memory[: num_tokens * width].view(num_tokens, width)
    x.copy_(torch.randn(num_tokens, width))
    ids = torch.rand(num_tokens, num_experts).topk(num_chosen, dim=1).indices
    weights = torch.rand(num_tokens, num_chosen)
    gate_up = (torch.randn(num_experts, 2 * expert_width, width) / width**0.5).bfloat16()
    down = torch.randn(num_experts, width, expert_width).bfloat16()
    return x, ids, weights, gate_up, down


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_get_the_weighted_sums_of_their_experts(shape: tuple[int, ...]) -> None:
    x, ids, weights, gate_up, down = make(shape)
    out = Bf16Experts(list(zip(gate_up, down, strict=True)))(x, ids, weights)
    wanted = experts_reference(
        x.double(), ids, weights.double(), gate_up.double(), down.double(), torch.bfloat16
    )
    assert_matches(out, wanted, TOLERANCES[torch.bfloat16])


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_tokens_result_is_its_own(threads: int) -> None:
    x, ids, weights, gate_up, down = make((70, 3, 6, 96, 48))
    layer = Bf16Experts(list(zip(gate_up, down, strict=True)))
    before = torch.get_num_threads()
    alone = [layer(x[t : t + 1], ids[t : t + 1], weights[t : t + 1])[0] for t in range(70)]
    try:
        torch.set_num_threads(threads)
        assert torch.equal(layer(x, ids, weights), torch.stack(alone))
        few = torch.tensor([3, 69, 20])
        assert torch.equal(layer(x[few], ids[few], weights[few]), torch.stack(alone)[few])
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("served")
def test_no_token_gives_none() -> None:
    x, ids, weights, gate_up, down = make((1, 2, 4, 32, 16))
    out = Bf16Experts(list(zip(gate_up, down, strict=True)))(x[:0], ids[:0], weights[:0])
    assert out.shape == (0, 32)


def test_widths_that_no_kernel_takes_are_not_served() -> None:
    assert not Bf16Experts.serves(33, 16)  # odd inputs
    assert not Bf16Experts.serves(32, 24)  # gates in blocks of 16
