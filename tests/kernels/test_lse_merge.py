"""Merging partial attention."""

from __future__ import annotations

import math

import pytest
import torch

from batchradix_kernels.lse_merge import lse_merge, lse_merge_reference
from batchradix_kernels.testing import TOLERANCES, assert_matches
from batchradix_kernels.tree_attention import attend_piece

TOLERANCE = TOLERANCES[torch.float32]


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("size", [(1,), (3, 7)])
def test_the_merge_equals_its_reference(parts, size):
    torch.manual_seed(parts)
    outputs, lses = torch.randn(parts, *size, 17), 20 * torch.randn(parts, *size)
    out, lse = lse_merge(outputs, lses)
    wanted, wanted_lse = lse_merge_reference(outputs, lses)
    assert_matches(out, wanted, TOLERANCE)
    assert_matches(lse, wanted_lse, TOLERANCE)


def test_a_part_without_keys_counts_for_nothing():
    outputs, lses = torch.randn(3, 4, 8), torch.randn(3, 4)
    outputs[1], lses[1] = 0, -math.inf
    out, lse = lse_merge(outputs, lses)
    wanted, wanted_lse = lse_merge(outputs[[0, 2]], lses[[0, 2]])
    assert_matches(out, wanted, TOLERANCE)
    assert_matches(lse, wanted_lse, TOLERANCE)


def test_a_row_without_any_key_gives_zero_and_minus_infinity():
    lses = torch.tensor([[-math.inf, 0.5], [-math.inf, 1.5]])
    out, lse = lse_merge(torch.zeros(2, 2, 3), lses)
    wanted, wanted_lse = lse_merge_reference(torch.zeros(2, 2, 3), lses)
    assert torch.equal(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)
    assert lse[0] == -math.inf


def test_attention_over_two_halves_merges_to_attention_over_the_whole():
    q, kv = torch.randn(2, 5, 3, 16), torch.randn(2, 2, 29, 16)
    halves = [
        attend_piece(q, *kv[:, :, part], scale=0.25, causal=False)
        for part in (slice(0, 10), slice(10, 29))
    ]
    out, lse = lse_merge(
        torch.stack([half[0] for half in halves]), torch.stack([half[1] for half in halves])
    )
    wanted, wanted_lse = attend_piece(q, *kv, scale=0.25, causal=False)
    assert_matches(out, wanted, TOLERANCE)
    assert_matches(lse, wanted_lse, TOLERANCE)
