"""Latent attention in Triton against the float64 reference, unused memory poisoned."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_pieces import Pieces, decoding_tree, in_pages

from batchradix_kernels.mla_attention import mla_attention, mla_attention_reference
from batchradix_kernels.mla_attention.triton import TritonLatentAttention
from batchradix_kernels.testing import TOLERANCES, assert_matches, poison_except

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ABSORBED = [(16, 512, 64), (3, 24, 8), (20, 64, 16), (100, 40, 16)]  # heads, latent, rope
EXPANDED = [(2, 128, 64, 128), (5, 24, 8, 20), (1, 16, 16, 40)]  # heads, key, rope, value
CPU = torch.device("cpu")


@dataclass
class Case:
    """Queries and pieces over latents, or keys and values of each head, all else being NaN.

    ``dims``: heads, the parts of a key, and of a value where expanded. A pool of latents is
    [S, A + R], the rows of the expanded form are [H, S, A + V], so that all are views.
    """

    num_queries: int
    context: Pieces = field(default_factory=list)
    causal: Pieces = field(default_factory=list)
    dims: tuple[int, ...] = (3, 24, 8)
    dtype: torch.dtype = torch.float32
    page_size: int = 0
    num_programs: int = 8
    padding: int = 0  # items without queries behind the real ones
    q_scale: float = 1.0

    def __post_init__(self) -> None:
        torch.manual_seed(self.num_queries)
        num_heads, key_dim, rope_dim, *value = self.dims
        self.used = sorted({s for a, n, *_ in self.context + self.causal for s in range(a, a + n)})
        num_slots = max(self.used) + 3
        self.q = (torch.randn(self.num_queries, num_heads, key_dim) * self.q_scale).to(self.dtype)
        self.q_rope = torch.randn(self.num_queries, num_heads, rope_dim).to(self.dtype)
        self.pool = poison_except(torch.randn(num_slots, key_dim + rope_dim), 0, self.used)
        self.pool = self.pool.to(self.dtype)
        self.rows = None
        if value:
            rows = torch.randn(num_heads, num_slots, key_dim + value[0])
            self.rows = poison_except(rows, 1, self.used).to(self.dtype)

    def tensors(self, pool: torch.Tensor, rows: torch.Tensor | None):
        """(q, q_rope, keys, ropes, values)"""
        key_dim = self.dims[1]
        latents, ropes = pool[:, :key_dim], pool[:, key_dim:]
        if rows is None:
            return self.q, self.q_rope, latents[None], ropes, None
        return self.q, self.q_rope, rows[..., :key_dim], ropes, rows[..., key_dim:]

    @property
    def scale(self) -> float:
        return sum(self.dims[1:3]) ** -0.5

    def kernel(self) -> TritonLatentAttention:
        num_heads, key_dim, rope_dim, *value = self.dims
        kernel = TritonLatentAttention(
            absorbed=not value,
            num_heads=num_heads,
            key_dim=key_dim,
            rope_dim=rope_dim,
            value_dim=value[0] if value else key_dim,
            scale=self.scale,
            dtype=self.dtype,
            device=CPU,
        )
        kernel._num_programs = self.num_programs
        return kernel

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        kernel, kinds, pages = self.kernel(), [self.context, self.causal], None
        pool, rows = self.pool, self.rows
        if self.page_size:
            place, kinds, pages = in_pages(len(pool), self.page_size, kinds)
            old, new = torch.tensor(self.used), torch.from_numpy(place[self.used])
            size = int(place.max()) + 1
            pool = torch.full((size, pool.shape[1]), math.nan, dtype=self.dtype)
            pool[new] = self.pool[old]
            if rows is not None:
                rows = torch.full((len(rows), size, rows.shape[2]), math.nan, dtype=self.dtype)
                rows[:, new] = self.rows[:, old]
        context, causal = (np.array(kind, dtype=np.int64).reshape(-1, 4) for kind in kinds)
        plan = kernel.plan(context, causal, self.num_queries, pages=pages, page_size=self.page_size)
        empty = torch.zeros(self.padding, 8, dtype=torch.int32)
        chunks = tuple(torch.cat([items, empty]) for items in plan.chunks[0])
        plan = replace(plan, chunks=(chunks,))
        plan.partial.fill_(math.nan)
        plan.partial_lse.fill_(math.nan)
        kernel.attend(plan, *self.tensors(pool, rows))
        width = plan.partial.shape[2]
        out = torch.full((*self.q.shape[:2], width), math.nan, dtype=self.dtype)
        lse = torch.full(self.q.shape[:2], math.nan)
        kernel.merge(plan, out, lse)
        return out, lse

    def check(self) -> None:
        out, lse = self.run()
        wanted, wanted_lse = mla_attention_reference(
            *self.tensors(self.pool, self.rows), self.context, self.causal, scale=self.scale
        )
        assert_matches(out, wanted, TOLERANCES[self.dtype])
        assert_matches(lse, wanted_lse, TOLERANCES[torch.float32], what="lse")


def decoding(num_rows: int, **changes) -> Case:
    return Case(num_rows, decoding_tree(num_rows)[1], **changes)


FORMS = [pytest.param((3, 24, 8), id="absorbed"), pytest.param((3, 24, 8, 20), id="expanded")]


@pytest.mark.parametrize(
    ("dims", "dtype"),
    [
        *((dims, DTYPES[number % 3]) for number, dims in enumerate(ABSORBED + EXPANDED)),
        *((dims, dtype) for dims in (ABSORBED[1], EXPANDED[1]) for dtype in DTYPES),
    ],
)
def test_decoding_rows_below_shared_nodes_equal_the_reference(dtype, dims):
    decoding(7, dims=dims, dtype=dtype).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("dims", "length"), [(ABSORBED[2], 33), (EXPANDED[0], 150), (FORMS[0].values[0], 1)]
)
def test_prefill_behind_a_context_equals_the_reference(dtype, dims, length):
    context, causal = [(3, 70, 0, length)], [(77, length, 0, length)]
    Case(length, context, causal, dims=dims, dtype=dtype).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", FORMS)
def test_one_query_may_see_its_own_slot_alone(dtype, dims):
    Case(1, [(3, 1, 0, 1)], dims=dims, dtype=dtype).check()
    Case(1, [], [(3, 1, 0, 1)], dims=dims, dtype=dtype).check()


@pytest.mark.parametrize("dims", FORMS)
def test_nested_new_nodes_with_many_queries_equal_the_reference(dims):
    causal = [(9, 50, 0, 50), (70, 30, 50, 80), (111, 10, 80, 90)]
    Case(90, [(0, 9, 0, 90), (9, 50, 50, 90)], causal, dims=dims).check()


@pytest.mark.parametrize("num_programs", [1, 4000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dims", FORMS)
def test_a_long_node_is_the_same_in_one_run_or_split(dtype, num_programs, dims):
    context, causal = [(3, 1100, 0, 5)], [(1110, 5, 0, 5)]
    Case(5, context, causal, dims=dims, dtype=dtype, num_programs=num_programs).check()


@pytest.mark.parametrize(
    ("page_size", "dtype"), [(1, torch.float32), (4, torch.bfloat16), (64, torch.float16)]
)
@pytest.mark.parametrize("dims", FORMS)
def test_pages_in_any_order_equal_the_reference_whatever_their_tables_end_in(
    page_size, dtype, dims
):
    decoding(5, dtype=dtype, dims=dims, page_size=page_size).check()
    pieces = [(3, 70, 0, 33)], [(77, 33, 0, 33)]
    Case(33, *pieces, dims=dims, dtype=dtype, page_size=page_size).check()


@pytest.mark.parametrize("dims", FORMS)
def test_pieces_without_slots_or_queries_count_for_nothing(dims):
    context = decoding_tree(3)[1]
    context[1:1] = [(4, 0, 0, 3), (0, 5, 2, 2)]
    case = Case(3, context, [(9, 0, 1, 1)], dims=dims)
    case.pool[:5] = math.nan
    case.check()


@pytest.mark.parametrize("dims", FORMS)
def test_items_without_queries_do_nothing(dims):
    decoding(3, dims=dims, padding=2).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", FORMS)
def test_scores_far_apart_neither_overflow_nor_vanish(dtype, dims):
    decoding(5, dims=dims, dtype=dtype, q_scale=300).check()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, at NaN
@pytest.mark.parametrize("broken", ["q", "q_rope", "pool"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dims", FORMS)
def test_a_broken_decoding_row_breaks_itself_alone(broken, value, dims):
    case = decoding(7, dims=dims)
    slots = decoding_tree(7)[0]
    healthy, _ = case.run()
    getattr(case, broken)[slots[4] if broken == "pool" else 4] = value
    out, _ = case.run()
    assert not out[4].isfinite().any()
    others = [0, 1, 2, 3, 5, 6]
    assert torch.equal(out[others], healthy[others])


def test_a_query_that_sees_nothing_gets_zero():
    case = Case(3, [(0, 5, 0, 1), (0, 5, 2, 3)])
    out, lse = mla_attention(
        *case.tensors(case.pool, None), case.context, case.causal, scale=case.scale
    )
    wanted, wanted_lse = mla_attention_reference(
        *case.tensors(case.pool, None), case.context, case.causal, scale=case.scale
    )
    assert_matches(out, wanted, TOLERANCES[torch.float32])
    torch.testing.assert_close(lse, wanted_lse)
    assert not out[1].any()


def test_slots_given_in_chunks_and_parts_of_the_caller_are_merged_with_the_rest():
    """The last of three pieces comes as a part, in place of the kernel's own."""
    pieces = [(0, 40, 0, 5), (40, 9, 0, 2), (49, 20, 1, 4)]
    case = Case(5, pieces, dims=(3, 24, 8, 20))
    wanted = mla_attention_reference(
        *case.tensors(case.pool, case.rows), pieces, [], scale=case.scale
    )
    own = mla_attention_reference(
        *case.tensors(case.pool, case.rows), pieces[2:], [], scale=case.scale
    )
    kernel, none = case.kernel(), np.zeros((0, 4), dtype=np.int64)
    extra = np.array([1, 2, 3])
    plan = kernel.plan(np.array(pieces[:2]), none, 5, chunk_ends=[40, 49], extra_queries=extra)
    plan.partial.fill_(math.nan)
    for chunk, (start, end) in enumerate([(0, 40), (40, 49)]):
        rows, pool = case.rows[:, start:end].clone(), case.pool[start:end].clone()
        kernel.attend(plan, *case.tensors(pool, rows), chunk=chunk)
    plan.extra.copy_(own[0][extra])
    plan.extra_lse.copy_(own[1][extra])
    out, lse = torch.empty(5, 3, 20), torch.empty(5, 3)
    kernel.merge(plan, out, lse)
    assert_matches(out, wanted[0], TOLERANCES[torch.float32])
    assert_matches(lse, wanted[1], TOLERANCES[torch.float32], what="lse")


@st.composite
def trees(draw) -> Case:
    """Any tree of old nodes, new nodes and decoding rows, its slots with gaps."""
    context: Pieces = []
    causal: Pieces = []
    at, num_queries = draw(st.integers(0, 40)), 0

    def grow(depth: int) -> None:
        nonlocal at, num_queries
        length, start = draw(st.integers(1, 40)), at
        at += length + draw(st.integers(0, 3))
        place, first = len(context), num_queries
        if draw(st.booleans()) or depth == 0:
            causal.append((start, length, num_queries, num_queries + length))
            num_queries += length
            first = num_queries
        if depth:
            for _ in range(draw(st.integers(1, 2))):
                grow(depth - 1)
            context.insert(place, (start, length, first, num_queries))

    grow(draw(st.integers(0, 3)))
    return Case(
        num_queries,
        context,
        causal,
        dims=draw(st.sampled_from(ABSORBED[1:] + EXPANDED[1:])),
        dtype=draw(st.sampled_from(DTYPES)),
        page_size=draw(st.sampled_from([0, 3])),
    )


@settings(deadline=None, max_examples=6, derandomize=True)
@given(case=trees())
def test_any_tree_equals_the_reference(case):
    case.check()
