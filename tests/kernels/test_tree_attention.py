"""Attention of one piece and of padded pieces against the float64 reference."""

from __future__ import annotations

import math

import pytest
import torch

from batchradix_kernels.testing import TOLERANCES, assert_matches, poison_except
from batchradix_kernels.tree_attention import (
    attend_padded,
    attend_piece,
    matmul,
    tree_attention_reference,
)
from batchradix_kernels.tree_attention.flash_cpu import attend_piece_flash_cpu, is_available
from batchradix_kernels.tree_attention.matmul import attend_piece_matmul

IMPLEMENTATIONS = {"chosen": attend_piece, "matmul": attend_piece_matmul}
if is_available():
    IMPLEMENTATIONS["flash_cpu"] = attend_piece_flash_cpu
HEADS = [(1, 1, 64), (2, 3, 80), (3, 4, 64), (1, 8, 128), (2, 1, 20)]


def reference_lse(q, k, scale: float, causal: bool) -> torch.Tensor:
    scores = torch.einsum("kngd,ksd->kngs", q.double(), k.double()) * scale
    if causal:
        n, s = q.shape[1], k.shape[1]
        hidden = torch.arange(s)[None] > torch.arange(n)[:, None]
        scores.masked_fill_(hidden[None, :, None], -math.inf)
    return torch.logsumexp(scores, dim=-1)


@pytest.mark.parametrize("implementation", list(IMPLEMENTATIONS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_kv_heads", "group", "head_dim"), HEADS)
@pytest.mark.parametrize(
    ("num_queries", "num_slots", "causal"),
    [(1, 1, False), (1, 1, True), (1, 37, False), (5, 3, False), (33, 70, False), (7, 7, True)],
)
def test_a_piece_equals_the_reference_in_a_poisoned_pool(
    implementation, dtype, num_kv_heads, group, head_dim, num_queries, num_slots, causal
):
    torch.manual_seed(num_queries * num_slots)
    start, scale = 11, head_dim**-0.5
    q = torch.randn(num_kv_heads, num_queries, group, head_dim).to(dtype)
    pool = torch.randn(2, num_kv_heads, 100, head_dim).to(dtype)
    poison_except(pool, 2, range(start, start + num_slots))
    keys, values = pool[:, :, start : start + num_slots]
    out, lse = IMPLEMENTATIONS[implementation](q, keys, values, scale=scale, causal=causal)

    piece = [(start, num_slots, 0, num_queries)]
    heads_last = q.permute(1, 0, 2, 3).reshape(num_queries, -1, head_dim)
    context, causals = ([], piece) if causal else (piece, [])
    wanted = tree_attention_reference(heads_last, *pool, context, causals, scale=scale)
    wanted = wanted.view(num_queries, num_kv_heads, group, head_dim).transpose(0, 1)
    assert_matches(out, wanted, TOLERANCES[dtype])
    assert lse.dtype == torch.float32
    assert_matches(lse, reference_lse(q, keys, scale, causal), TOLERANCES[dtype], what="lse")


@pytest.mark.parametrize("implementation", list(IMPLEMENTATIONS))
@pytest.mark.parametrize("causal", [False, True])
def test_values_may_be_narrower_than_keys(implementation, causal):
    torch.manual_seed(4)
    q, k, v = torch.randn(2, 9, 3, 24), torch.randn(2, 9, 24), torch.randn(2, 9, 24)
    attend = IMPLEMENTATIONS[implementation]
    wanted, wanted_lse = attend(q, k, v, scale=0.2, causal=causal)
    out, lse = attend(q, k, v[..., :16], scale=0.2, causal=causal)
    assert_matches(out, wanted[..., :16], TOLERANCES[torch.float32])
    assert_matches(lse, wanted_lse, TOLERANCES[torch.float32], what="lse")


@pytest.mark.parametrize("causal", [False, True])
def test_a_piece_cut_along_its_queries_equals_the_whole(monkeypatch, causal):
    q, kv = torch.randn(2, 23, 3, 16), torch.randn(2, 2, 23, 16)
    whole = attend_piece_matmul(q, *kv, scale=0.25, causal=causal)
    monkeypatch.setattr(matmul, "MAX_SCORES", 2 * 3 * 23 * 4)
    cut = attend_piece_matmul(q, *kv, scale=0.25, causal=causal)
    for one, other, what in zip(cut, whole, ("output", "lse"), strict=True):
        assert_matches(one, other, TOLERANCES[torch.float32], what=what)


@pytest.mark.parametrize("v_dim", [24, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padded_pieces_equal_each_piece_alone(dtype, v_dim):
    torch.manual_seed(1)
    sizes, head_dim, scale = [(3, 5), (1, 8), (3, 1)], 24, 0.2
    rows, slots = 3, 8
    q = torch.randn(3, rows, head_dim).to(dtype)
    k, v = torch.randn(2, 3, slots, head_dim).to(dtype).unbind(0)
    v = v[..., :v_dim]
    bias = torch.zeros(3, rows, slots)
    for piece, (_, seen) in enumerate(sizes):
        bias[piece, :, seen:] = -math.inf
    out, lse = attend_padded(q, k, v, bias, scale=scale)
    assert out.dtype == torch.float32
    for piece, (num_rows, seen) in enumerate(sizes):
        wanted, wanted_lse = attend_piece_matmul(
            q[piece, None, :num_rows, None],
            k[piece, None, :seen],
            v[piece, None, :seen],
            scale=scale,
            causal=False,
        )
        assert_matches(out[piece, :num_rows], wanted[0, :, 0], TOLERANCES[dtype])
        assert_matches(lse[piece, :num_rows], wanted_lse[0, :, 0], TOLERANCES[dtype])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("broken", ["queries", "keys", "values"])
def test_a_query_without_a_finite_score_or_value_is_not_hidden(causal, broken):
    torch.manual_seed(3)
    q, k, v = torch.randn(2, 5, 3, 64), torch.randn(2, 5, 64), torch.randn(2, 5, 64)
    {"queries": q[:, 2], "keys": k, "values": v}[broken].fill_(math.nan)
    out, _ = attend_piece(q, k, v, scale=0.125, causal=causal)
    assert out[:, 2].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_padded_row_without_a_finite_score_is_not_hidden(dtype):
    torch.manual_seed(5)
    q, k, v = (torch.randn(2, 4, 16).to(dtype) for _ in range(3))
    q[1, 2] = math.nan
    out, _ = attend_padded(q, k, v, torch.zeros(2, 4, 4), scale=0.25)
    assert out[1, 2].isnan().all()
    assert out[0].isfinite().all()
