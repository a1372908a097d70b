"""The torch backend against the float64 reference on random trees in a poisoned pool."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from batchradix.engine.attention.base import AttentionShape
from batchradix.engine.attention.torch_backend import TorchAttention
from batchradix_kernels.testing import TOLERANCES, assert_matches
from batchradix_kernels.tree_attention import tree_attention_reference

HEADS = [(2, 2, 64), (6, 2, 80), (4, 1, 64), (8, 1, 128), (9, 3, 20)]
POOL_SLOTS = 700


class Tree:
    """A random tree: finished ancestors in the pool, new nodes and decoding rows below."""

    def __init__(self, seed: int, depth: int, width: int, max_length: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.max_length = max_length
        self.free = self.rng.permutation(POOL_SLOTS // 10) * 10  # where nodes may start
        self.context: list[list[int]] = []
        self.causal: list[list[int]] = []
        self.slots: list[int] = []
        self.old_slots: list[int] = []
        self._grow(depth, width)

    def _place(self, length: int) -> int:
        """A run of ``length`` slots that nobody has."""
        taken = set(self.old_slots) | set(self.slots)
        for start in self.free:
            if start + length <= POOL_SLOTS and not taken & set(range(start, start + length)):
                return int(start)
        raise AssertionError("the pool of the test is too small")

    def _grow(self, depth: int, width: int) -> None:
        """One node with all below it; its queries and theirs are one range."""
        length = int(self.rng.integers(1, self.max_length + 1))
        start, first = self._place(length), len(self.slots)
        kind = self.rng.choice(["old", "new"]) if depth else self.rng.choice(["row", "new"])
        if kind == "new":
            self.slots += range(start, start + length)
            self.causal.append([start, length, first, first + length])
        elif kind == "row":  # a decoding row's tail: one query, its own slot last
            self.old_slots += range(start, start + length - 1)
            self.slots.append(start + length - 1)
            self.context.append([start, length, first, first + 1])
        else:
            self.old_slots += range(start, start + length)
        below = len(self.slots) if kind == "new" else first
        if depth:
            for _ in range(int(self.rng.integers(1, width + 1))):
                self._grow(depth - 1, width)
            if kind != "row":
                self.context.append([start, length, below, len(self.slots)])


@pytest.fixture(params=["as it is", "without flash attention"])
def whichever_kernel(request, monkeypatch):
    """The backend must not depend on an operator that other devices lack."""
    if request.param != "as it is":
        monkeypatch.setattr("batchradix_kernels.tree_attention.is_available", lambda: False)


@pytest.mark.usefixtures("whichever_kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize(
    ("depth", "width", "max_length"), [(0, 1, 9), (1, 9, 6), (3, 2, 5), (13, 1, 3), (1, 7, 40)]
)
def test_a_random_tree_equals_the_reference(
    lab, dtype, num_heads, num_kv_heads, head_dim, depth, width, max_length
):
    tree = Tree(head_dim + depth, depth, width, max_length)
    shape = AttentionShape(
        num_layers=2,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    backend = TorchAttention(shape)
    pool = backend.allocate(POOL_SLOTS)
    backend.poison(pool, 0, POOL_SLOTS)
    torch.manual_seed(0)
    pool[:, :, :, tree.old_slots] = torch.randn(
        2, 2, num_kv_heads, len(tree.old_slots), head_dim
    ).to(dtype)
    num_tokens = len(tree.slots)
    step = lab.make_step(
        range(num_tokens),
        range(num_tokens),
        tree.slots,
        context=tree.context,
        causal=tree.causal,
    )
    plan = backend.plan(step)
    for layer in range(2):
        q = torch.randn(num_tokens, num_heads, head_dim)
        k, v = torch.randn(2, num_tokens, num_kv_heads, head_dim)
        out = backend.run(layer, q, k, v, pool, plan)
        assert out.dtype == dtype
        assert torch.equal(pool[layer, 0, :, tree.slots], k.transpose(0, 1).to(dtype))
        wanted = tree_attention_reference(
            q.to(dtype), *pool[layer], tree.context, tree.causal, scale=shape.scale
        )
        assert_matches(out.view_as(wanted), wanted, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_leave_the_pool_and_come_back_bit_for_bit(dtype):
    shape = AttentionShape(
        num_layers=2,
        num_heads=6,
        num_kv_heads=3,
        head_dim=8,
        scale=1.0,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    backend = TorchAttention(shape)
    pool, other = backend.allocate(40), backend.allocate(20)
    pool.copy_(torch.randn(pool.shape))
    slots = np.array([30, 31, 4, 39, 0])
    k, v = backend.export(pool, slots)
    assert k.shape == v.shape == (2, 3, 5, 8)
    assert torch.equal(k, pool[:, 0][:, :, slots])
    assert torch.equal(v, pool[:, 1][:, :, slots])
    backend.poison(other, 0, 20)
    backend.load(other, 7, k, v)
    again = backend.export(other, np.arange(7, 12))
    assert all(map(torch.equal, again, (k, v)))
    outside = [slot for slot in range(20) if not 7 <= slot < 12]
    assert torch.isnan(other[:, :, :, outside]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("broken", ["q", "k", "first k"])
def test_a_query_that_went_bad_is_never_given_zeros(lab, dtype, broken):
    shape = AttentionShape(
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        scale=0.125,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    backend = TorchAttention(shape)
    pool = backend.allocate(16)
    step = lab.make_step(range(5), range(5), range(5), causal=[[0, 5, 0, 5]])
    q = torch.randn(5, 2, 64)
    k, v = torch.randn(2, 5, 1, 64)
    {"q": q, "k": k, "first k": k[:1]}[broken].fill_(torch.nan)
    out = backend.run(0, q, k, v, pool, backend.plan(step))
    assert out.isnan().all()
