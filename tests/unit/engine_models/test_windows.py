"""Windows of absolute positions: every query sees its own slots, cut where no other row matters."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix.engine.attention.base import AttentionShape
from batchradix.engine.attention.cpu_backend import CpuAttention
from batchradix.engine.attention.window_plan import WINDOW, plan_windows
from batchradix.engine.step import Step, empty_i64
from batchradix_kernels.native import Level, level, library, limit_level
from batchradix_kernels.testing import TOLERANCES, assert_matches
from batchradix_kernels.tree_attention import tree_attention_reference


class TreeSteps:
    """A step over a random tree, and the slots that each query attends to, in order."""

    def __init__(self, draw) -> None:
        self.draw = draw
        self.slot = 0
        self.context: list[tuple[int, int, int, int]] = []
        self.causal: list[tuple[int, int, int, int]] = []
        self.seen: list[list[int]] = []
        for _ in range(draw(st.integers(1, 3))):
            self.add_node([], depth=0)

    def extents(self, num_slots: int) -> list[tuple[int, int]]:
        parts = []
        while num_slots:
            taken = self.draw(st.sampled_from([num_slots, num_slots, 1, 5, 32]))
            taken = min(taken, num_slots)
            self.slot += self.draw(st.sampled_from([0, 1, 7]))
            parts.append((self.slot, taken))
            self.slot += taken
            num_slots -= taken
        return parts

    def add_node(self, above: list[int], depth: int) -> None:
        """A node with cached and new tokens, then what is below it."""
        sizes = st.sampled_from([0, 1, 3, 31, 33, 63, 64, 65, 130])
        cached, new = self.extents(self.draw(sizes)), self.extents(self.draw(sizes))
        first = len(self.seen)
        seen = above + [s for start, count in cached for s in range(start, start + count)]
        places = []
        for start, count in new:
            query = len(self.seen)
            for i in range(count):
                seen = [*seen, start + i]
                self.seen.append(seen)
            places.append((start, count, query))
        if depth < 3:
            for _ in range(self.draw(st.integers(0, 3))):
                self.add_node(seen, depth + 1)
        if len(self.seen) == first:  # nothing below: a row that decodes
            seen = [*seen, self.slot]
            places.append((self.slot, 1, first))
            self.slot += 1
            self.seen.append(seen)
        end = len(self.seen)
        pieces = [(start, count, first, end) for start, count in cached]
        for start, count, query in places:
            self.causal.append((start, count, query, query + count))
            if query + count < end:
                pieces.append((start, count, query + count, end))
        self.context[:0] = pieces  # from the top down

    def step(self) -> Step:
        return make_step(
            positions=[len(s) - 1 for s in self.seen],
            slots=[s[-1] for s in self.seen],
            context=self.context,
            causal=self.causal,
        )


def make_step(*, positions, slots, context, causal=()) -> Step:
    nothing = empty_i64(0)
    return Step(
        token_ids=np.zeros(len(slots), dtype=np.int64),
        positions=np.array(positions, dtype=np.int64),
        slots=np.array(slots, dtype=np.int64),
        context=np.array(context, dtype=np.int64).reshape(-1, 4),
        causal=np.array(causal, dtype=np.int64).reshape(-1, 4),
        moves=empty_i64(0, 3),
        logit_sources=nothing,
        hold_queries=nothing,
        hold_ids=nothing,
        free_holds=nothing,
    )


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_each_query_attends_to_its_slots_in_windows_of_its_own(data) -> None:
    tree = TreeSteps(data.draw)
    plan = plan_windows(tree.step())
    found: list[list[int]] = [[] for _ in tree.seen]
    for first, end, query, query_end, num_positions, limit in plan.runs.tolist():
        slots = [s for start, n in plan.parts[first:end].tolist() for s in range(start, start + n)]
        assert len(slots) == num_positions
        assert end - first == 1 or num_positions <= WINDOW
        for q in range(query, query_end):
            assert len(found[q]) % WINDOW == 0, "a run begins within a window"
            visible = min(num_positions, limit + q - query)
            assert visible > 0
            found[q] += slots[:visible]
    assert found == tree.seen


def test_a_window_lies_in_one_piece_where_it_can() -> None:
    """Two rows under a node of a window and 8 tokens: the window is attended to once for both."""
    size = WINDOW + 8
    step = make_step(
        positions=[size + 1, size],
        slots=[401, 500],
        context=[[100, size, 0, 2], [400, 2, 0, 1], [500, 1, 1, 2]],
    )
    plan = plan_windows(step)
    whole, first, second = [0, 1, 0, 2, WINDOW, WINDOW], [1, 3, 0, 1, 10, 10], [3, 5, 1, 2, 9, 9]
    assert plan.runs.tolist() == [whole, first, second]
    rest = [100 + WINDOW, 8]
    assert plan.parts.tolist() == [[100, WINDOW], rest, [400, 2], rest, [500, 1]]


@pytest.fixture(params=[each for each in Level if each <= (level() or 0)], ids=lambda e: e.name)
def each_level(request: pytest.FixtureRequest):
    limit_level(request.param)
    yield
    limit_level(Level.AMX)


def attend(
    step: Step, kv: torch.Tensor, q: torch.Tensor, num_slots: int, sliding: int | None
) -> torch.Tensor:
    """[T, 192], of a layer with a sliding window or without; ``kv``: [2, 1, num_slots, 64], slots
    in use; the rest of the pool is NaN."""
    backend = CpuAttention(
        AttentionShape(
            num_layers=1,
            num_heads=3,
            num_kv_heads=1,
            head_dim=64,
            scale=0.125,
            dtype=kv.dtype,
            device=torch.device("cpu"),
            batch_invariant=True,
            layer_windows=(sliding,),
        )
    )
    pool = backend.allocate(num_slots)
    pool.storage.fill_(math.nan)
    used = sorted(
        {s for start, n, *_ in step.context.tolist() for s in range(start, start + n)}
        - set(step.slots.tolist())
    )
    pool.write(0, np.array(used, dtype=np.int64), kv[:, :, used])
    new = kv[:, :, step.slots].transpose(1, 2)
    return backend.run(0, q, new[0], new[1], pool, backend.plan(step))


@pytest.mark.skipif(library() is None, reason="the C kernels were not built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sliding", [None, 50, 1], ids=str)
def test_a_row_gets_the_same_bits_alone_and_in_any_tree(each_level, dtype, sliding) -> None:
    """Each query of a random tree against itself as the only one, its slots side by side."""

    @given(st.data())
    @settings(max_examples=4 if sliding else 8, deadline=None)
    def check(data) -> None:
        tree = TreeSteps(data.draw)
        step = tree.step()
        torch.manual_seed(len(tree.seen))
        kv = torch.randn(2, 1, tree.slot + 1, 64).to(dtype)
        q = torch.randn(step.num_tokens, 3, 64).to(dtype)
        together = attend(step, kv, q, tree.slot + 1, sliding)
        for t in {*range(0, step.num_tokens, 7), step.num_tokens - 1}:
            n = len(tree.seen[t])
            alone = make_step(positions=[n - 1], slots=[n - 1], context=[[0, n, 0, 1]])
            row, held = q[t : t + 1], kv[:, :, tree.seen[t]]
            assert torch.equal(together[t : t + 1], attend(alone, held, row, n, sliding))
            pieces = [(0, n, 0, 1)], []
            wanted = tree_attention_reference(row, *held, *pieces, scale=0.125, window=sliding)
            assert_matches(together[t].view(1, 3, 64), wanted, TOLERANCES[dtype])

    check()
