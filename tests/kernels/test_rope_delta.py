"""Keys that move to other positions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix_kernels.rope import rope
from batchradix_kernels.rope_delta import rope_delta
from batchradix_kernels.testing import TOLERANCES, Tolerance, assert_matches

EXACT = Tolerance(absolute=2e-6, relative=2e-6, cosine=1e-12)


def angles(positions: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of Llama's angles, exact to float32."""
    frequencies = 10_000.0 ** -(torch.arange(0, head_dim, 2).double() / head_dim)
    angle = positions.double()[:, None] * frequencies
    return angle.cos().float(), angle.sin().float()


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 100_000),
    st.integers(-100_000, 100_000),
    st.integers(-100_000, 100_000),
    st.integers(1, 40),
)
def test_rotations_add_up(position, first, second, half):
    torch.manual_seed(half)
    head_dim, num_slots = 2 * half, 3
    plain = torch.randn(num_slots, 2, head_dim)
    start = position + torch.arange(num_slots)
    slots = torch.tensor([4, 0, 2], dtype=torch.int32)
    pool = torch.full((1, 2, 6, head_dim), torch.nan)

    def direct(positions: torch.Tensor) -> torch.Tensor:
        heads = plain.clone()
        rope(heads, *angles(positions, head_dim), 0, 2)
        return heads.transpose(0, 1)[None]

    pool[:, :, slots.long()] = direct(start)
    apart = pool.clone()
    for delta in (first, second):
        rope_delta(apart, slots, *angles(torch.full((3,), delta), head_dim))
    rope_delta(pool, slots, *angles(torch.full((3,), first + second), head_dim))
    assert_matches(apart[:, :, slots.long()], pool[:, :, slots.long()], EXACT)
    assert_matches(pool[:, :, slots.long()], direct(start + first + second), EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_only_the_given_slots_move_each_by_its_own_delta(dtype):
    torch.manual_seed(0)
    pool = torch.randn(2, 2, 3, 9, 8).to(dtype)  # layers, keys and values
    before = pool.clone()
    slots, deltas = torch.tensor([7, 1], dtype=torch.int32), torch.tensor([5, 0])
    rope_delta(pool[:, 0], slots, *angles(deltas, 8))
    wanted = before[:, 0, :, 7].double()
    cosine, sine = (a[0].double() for a in angles(deltas, 8))
    low, high = wanted[..., :4], wanted[..., 4:]
    wanted = torch.cat((low * cosine - high * sine, high * cosine + low * sine), dim=-1)
    assert_matches(pool[:, 0, :, 7], wanted, TOLERANCES[dtype])
    pool[:, 0, :, 7] = before[:, 0, :, 7]
    assert torch.equal(pool, before)  # a delta of 0 changes nothing either
