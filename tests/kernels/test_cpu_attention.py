"""Attention in C on every instruction set of this machine, against the float64 reference."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix_kernels.native import Level, level, library, limit_level
from batchradix_kernels.testing import TOLERANCES, assert_matches
from batchradix_kernels.tree_attention import tree_attention_reference
from batchradix_kernels.tree_attention.cpu import CpuTreeAttention, is_supported
from batchradix_kernels.tree_attention.reference import slots_of_query, tree_attention_lse_reference

pytestmark = pytest.mark.skipif(library() is None, reason="the C kernels were not built")

LEVELS = [each for each in Level if each <= (level() or 0)]
DTYPES = [torch.float32, torch.bfloat16]
HEADS = [(2, 2, 64), (9, 3, 64), (4, 1, 128), (7, 1, 96), (16, 2, 32), (6, 2, 80), (3, 1, 20)]


@pytest.fixture(params=LEVELS, ids=[each.name for each in LEVELS])
def each_level(request: pytest.FixtureRequest):
    limit_level(request.param)
    yield request.param
    limit_level(Level.AMX)


@dataclass
class Case:
    """Queries and pieces over a pool in which everything else is NaN."""

    slots: list[int]  # of the queries
    context: list[tuple[int, int, int, int]] = field(default_factory=list)
    causal: list[tuple[int, int, int, int]] = field(default_factory=list)
    heads: tuple[int, int, int] = (6, 2, 64)
    dtype: torch.dtype = torch.float32
    seed: int = 0
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    def __post_init__(self) -> None:
        num_heads, num_kv_heads, head_dim = self.heads
        count = len(self.slots)
        torch.manual_seed(self.seed)
        self.q, self.k, self.v = (
            torch.randn(count, heads, head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads)
        )
        pieces = self.context + self.causal
        self.num_slots = max(start + length for start, length, *_ in pieces) + 3
        used = {s for start, length, *_ in pieces for s in range(start, start + length)}
        self.old = sorted(used - set(self.slots))
        self.old_kv = torch.randn(2, num_kv_heads, len(self.old), head_dim).to(self.dtype)
        self.scale = head_dim**-0.5
        self.sinks = torch.randn(num_heads) if self.has_sinks else None

    def kernel(self) -> CpuTreeAttention:
        num_heads, num_kv_heads, head_dim = self.heads
        return CpuTreeAttention(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=self.scale,
            dtype=self.dtype,
            softcap=self.softcap,
        )

    def run(self, *, change=None):
        """Output [T, H, E] and log-sum-exps [T, H]; ``change(pool)`` after the old slots."""
        kernel = self.kernel()
        pool = kernel.allocate(2, self.num_slots)
        pool.storage.fill_(math.nan)
        unseen = torch.from_numpy(np.isin(self.old, self.unseen()))
        old_kv = self.old_kv.masked_fill(unseen[:, None], math.nan)
        pool.write(1, np.array(self.old, dtype=np.int64), old_kv)
        if change is not None:
            change(pool)
        plan = kernel.plan(
            np.array(self.slots, dtype=np.int64),
            np.array(self.context, dtype=np.int64).reshape(-1, 4),
            np.array(self.causal, dtype=np.int64).reshape(-1, 4),
            self.num_slots,
            window=self.window,
        )
        lse = torch.full(self.q.shape[:2], math.nan)
        out = kernel.run(plan, pool, 1, self.q, self.k, self.v, lse=lse, sinks=self.sinks)
        assert pool.storage[0].isnan().all()
        return out.view(self.q.shape), lse

    def unseen(self) -> list[int]:
        """The old slots in no query's window."""
        if self.window is None:
            return []
        seen = [slots_of_query(t, self.context, self.causal) for t in range(len(self.slots))]
        return sorted(set(self.old) - {s for slots in seen for s in slots[-self.window :]})

    def pool(self) -> torch.Tensor:
        """Keys and values [2, K, S, E] as they are after the step, NaN where none are."""
        _, num_kv_heads, head_dim = self.heads
        pool = torch.full((2, num_kv_heads, self.num_slots, head_dim), math.nan)
        pool[:, :, self.old] = self.old_kv.float()
        new = torch.stack([self.k, self.v]).to(self.dtype).float()
        pool[:, :, self.slots] = new.transpose(1, 2)
        return pool

    def check(self) -> None:
        out, lse = self.run()
        assert out.dtype == self.dtype
        q, pool = self.q.to(self.dtype), self.pool()
        pieces = self.context, self.causal
        of = {"scale": self.scale, "window": self.window, "softcap": self.softcap}
        wanted = tree_attention_reference(q, *pool, *pieces, **of, sinks=self.sinks)
        assert_matches(out, wanted, TOLERANCES[self.dtype])
        wanted = tree_attention_lse_reference(q, pool[0], *pieces, **of)
        assert_matches(lse, wanted, TOLERANCES[torch.float32], what="lse")


def tree(num_rows: int, start: int = 5) -> tuple[list, list, list]:
    """A shared root, a document for every four rows, a tail of another length for each."""
    context, slots, at = [(start, 70, 0, num_rows)], [], start + 73
    for row in range(num_rows):
        if row % 4 == 0:
            context.append((at, 33 + row, row, min(row + 4, num_rows)))
            at += 33 + row + row % 3
    for row in range(num_rows):
        length = 1 + 7 * row % 50
        context.append((at, length, row, row + 1))
        slots.append(at + length - 1)
        at += length + row % 2
    return slots, context, []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("num_rows", [1, 9, 23])
def test_decoding_rows_below_shared_nodes_equal_the_reference(each_level, dtype, heads, num_rows):
    Case(*tree(num_rows), heads=heads, dtype=dtype, seed=num_rows).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("length", [1, 33, 100])
def test_prefill_behind_a_context_equals_the_reference(each_level, dtype, heads, length):
    start = 77
    slots = list(range(start, start + length))
    context, causal = [(3, 70, 0, length)], [(start, length, 0, length)]
    Case(slots, context, causal, heads=heads, dtype=dtype, seed=length).check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_three_hundred_queries_of_nested_new_nodes_equal_the_reference(each_level, dtype):
    """A new parent with two new children, the second after rows that decode below the first."""
    slots = [*range(9, 159), *range(170, 260), *range(301, 361)]
    causal = [(9, 150, 0, 150), (170, 90, 150, 240), (301, 60, 240, 300)]
    context = [(0, 9, 0, 300), (9, 150, 150, 300)]
    Case(slots, context, causal, heads=(3, 1, 64), dtype=dtype).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", range(0, 36, 5))
@pytest.mark.parametrize("length", [1, 2, 17, 32, 61])
def test_pieces_may_begin_and_end_anywhere(each_level, dtype, start, length):
    own = start + length + 2
    Case([own], [(start, length, 0, 1), (own, 1, 0, 1)], [], dtype=dtype).check()


# Windows that show one slot, end within a block, at its edge, within a node, and before all.
WINDOWS = [1, 32, 45, 129, 10**9]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", WINDOWS)
def test_decoding_rows_see_their_windows_alone(each_level, dtype, window):
    Case(*tree(23), dtype=dtype, window=window).check()
    Case(*tree(9), heads=(4, 1, 128), dtype=dtype, window=window, has_sinks=True).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", WINDOWS)
def test_prefilled_tokens_see_their_windows_alone(each_level, dtype, window):
    """Behind a context of two nodes, and of nothing, with a node of one token between."""
    context = [(3, 70, 0, 150), (80, 1, 0, 150), (90, 40, 0, 150)]
    for heads in ((3, 1, 64), (4, 2, 20)):
        slots = list(range(177, 327))
        Case(slots, context, [(177, 150, 0, 150)], heads, dtype, window=window).check()
    Case(list(range(5, 105)), [], [(5, 100, 0, 100)], dtype=dtype, window=window).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("heads", [(2, 2, 64), (9, 3, 64), (7, 1, 96)])
def test_scores_are_capped_and_sinks_take_weight(each_level, dtype, softcap, heads):
    """Of any size, both signs and zero."""
    case = Case(*tree(23), heads=heads, dtype=dtype, softcap=softcap, has_sinks=True)
    case.q *= torch.linspace(0, 3 * softcap, 23)[:, None, None]
    case.check()
    case.sinks = torch.linspace(-200, 200, heads[0])
    out, _ = case.run()
    assert out.isfinite().all()
    assert (out[:, 0] != 0).any()
    assert (out[:, -1] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(9, 3, 64), (7, 1, 96)])
@pytest.mark.parametrize("window", [17, 90])
def test_a_row_with_a_window_is_the_same_whatever_stands_beside_it(
    each_level, dtype, heads, window
):
    case = Case(*tree(23), heads=heads, dtype=dtype, window=window, softcap=20.0)
    together, _ = case.run()
    pool = case.pool().to(dtype)
    for row in (0, 5, 13, 22):
        context = [(s, n, 0, 1) for s, n, a, b in case.context if a <= row < b]
        alone = Case([case.slots[row]], context, [], heads, dtype, window=window, softcap=20.0)
        alone.q, alone.k, alone.v = (x[row : row + 1] for x in (case.q, case.k, case.v))
        alone.old_kv = pool[:, :, alone.old]
        assert torch.equal(alone.run()[0][0], together[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("broken", ["k", "v"])
def test_a_broken_token_breaks_those_alone_that_have_it_in_their_window(each_level, dtype, broken):
    case = Case(list(range(7, 157)), [], [(7, 150, 0, 150)], dtype=dtype, window=40)
    healthy, _ = case.run()
    getattr(case, broken)[41] = math.nan
    out, _ = case.run()
    assert torch.equal(out[:41], healthy[:41])
    assert not out[41:81].isfinite().any()
    assert torch.equal(out[81:], healthy[81:])


@st.composite
def trees(draw) -> Case:
    """Any tree of old nodes, new nodes and decoding rows, its slots with gaps and in any order."""
    slots: list[int] = []
    context: list[tuple[int, int, int, int]] = []
    causal: list[tuple[int, int, int, int]] = []
    at = [draw(st.integers(0, 40))]

    def grow(depth: int) -> None:
        length, start = draw(st.integers(1, 40)), at[0]
        at[0] += length + draw(st.integers(0, 3))
        first, place = len(slots), len(context)
        is_new = draw(st.booleans()) or depth == 0
        if is_new:
            slots.extend(range(start, start + length))
            causal.append((start, length, first, first + length))
            first += length
        if depth:
            for _ in range(draw(st.integers(1, 3))):
                grow(depth - 1)
            context.insert(place, (start, length, first, len(slots)))

    grow(draw(st.integers(0, 3)))
    heads = draw(st.sampled_from(HEADS))
    return Case(
        slots,
        context,
        causal,
        heads=heads,
        dtype=draw(st.sampled_from(DTYPES)),
        window=draw(st.none() | st.integers(1, 150)),
        softcap=draw(st.sampled_from([None, None, 1.0, 30.0])),
        has_sinks=draw(st.booleans()),
    )


@settings(deadline=None, max_examples=40)
@given(case=trees(), limit=st.sampled_from(LEVELS), threads=st.sampled_from([1, 2, 7]))
def test_any_tree_equals_the_reference(case, limit, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    limit_level(limit)
    try:
        case.check()
    finally:
        limit_level(Level.AMX)
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_as_wide_as_a_latent_are_served(each_level, dtype):
    """Latent and rope key of DeepSeek, which all heads share."""
    Case(*tree(12), heads=(16, 1, 576), dtype=dtype).check()
    Case(list(range(50, 120)), [(3, 40, 0, 70)], [(50, 70, 0, 70)], heads=(16, 1, 576)).check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_inputs_of_either_dtype_equal_dense_ones(each_level, dtype):
    case = Case(*tree(9), dtype=dtype)
    dense, _ = case.run()
    qkv = torch.cat([case.q, case.k, case.v], dim=1)
    case.q, case.k, case.v = qkv[:, :6].to(dtype), qkv[:, 6:8], qkv[:, 8:].to(dtype)
    mixed, _ = case.run()
    assert torch.equal(dense, mixed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(2, 2, 64), (9, 3, 64), (7, 1, 96), (16, 1, 576)])
def test_a_row_is_the_same_bit_for_bit_whatever_stands_beside_it(each_level, dtype, heads):
    case = Case(*tree(23), heads=heads, dtype=dtype)
    together, together_lse = case.run()
    pool = case.pool().to(dtype)
    before = torch.get_num_threads()
    for row in (0, 5, 13, 22):
        context = [(s, n, 0, 1) for s, n, a, b in case.context if a <= row < b]
        alone = Case([case.slots[row]], context, [], heads=heads, dtype=dtype)
        alone.q, alone.k, alone.v = (x[row : row + 1] for x in (case.q, case.k, case.v))
        alone.old_kv = pool[:, :, alone.old]
        torch.set_num_threads(1)
        out, lse = alone.run()
        assert torch.equal(out[0], together[row])
        assert torch.equal(lse[0], together_lse[row])
    torch.set_num_threads(3)
    assert torch.equal(case.run()[0], together)
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prefill_row_is_the_same_whether_its_chunk_ends_behind_it_or_later(each_level, dtype):
    whole = Case(list(range(7, 107)), [], [(7, 100, 0, 100)], dtype=dtype)
    out, _ = whole.run()
    for length in (1, 40, 57):
        part = Case(list(range(7, 7 + length)), [], [(7, length, 0, length)], dtype=dtype)
        part.q, part.k, part.v = (x[:length] for x in (whole.q, whole.k, whole.v))
        assert torch.equal(part.run()[0], out[:length])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("broken", ["q", "k", "v"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_decoding_row_breaks_itself_alone(each_level, dtype, broken, value):
    case = Case(*tree(23), dtype=dtype)
    healthy, _ = case.run()
    getattr(case, broken)[13] = value
    out, _ = case.run()
    assert not out[13].isfinite().any()
    others = [row for row in range(23) if row != 13]
    assert torch.equal(out[others], healthy[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("broken", ["k", "v"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_token_breaks_no_token_before_it(each_level, dtype, broken, value):
    case = Case(list(range(7, 107)), [], [(7, 100, 0, 100)], dtype=dtype)
    healthy, _ = case.run()
    getattr(case, broken)[41] = value
    out, _ = case.run()
    assert torch.equal(out[:41], healthy[:41])
    assert not out[41:].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_far_apart_neither_overflow_nor_vanish(each_level, dtype):
    case = Case(*tree(9), dtype=dtype)
    case.q *= 300
    case.check()


def test_pools_give_back_what_was_written():
    for dtype in DTYPES:
        kernel = Case([0], [(0, 1, 0, 1)], heads=(4, 2, 20), dtype=dtype).kernel()
        pool = kernel.allocate(3, 100)
        slots = np.array([0, 99, 31, 32, 2, 45])
        kv = torch.randn(2, 2, len(slots), 20).to(dtype)
        pool.write(2, slots, kv)
        assert torch.equal(pool.read(2, slots), kv)


def test_half_precision_and_wide_heads_are_left_to_others():
    assert is_supported(torch.bfloat16, 640)
    assert not is_supported(torch.float16, 64)
    assert not is_supported(torch.float32, 641)
