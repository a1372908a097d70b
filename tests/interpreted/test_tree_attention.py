"""Attention over tree pieces in Triton against the float64 reference, unused memory poisoned."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix_kernels.float8 import FLOAT8, as_bytes, stored
from batchradix_kernels.testing import TOLERANCES, assert_matches, poison_except
from batchradix_kernels.tree_attention import tree_attention_reference
from batchradix_kernels.tree_attention.reference import slots_of_query, tree_attention_lse_reference
from batchradix_kernels.tree_attention.tiles import Tile, tile_choices
from batchradix_kernels.tree_attention.triton import TritonTreeAttention

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HEADS = [(2, 2, 64), (9, 3, 64), (4, 1, 128), (8, 1, 96), (6, 2, 80), (20, 1, 24)]
CPU = torch.device("cpu")
Pieces = list[tuple[int, int, int, int]]


@dataclass
class Case:
    """Queries and pieces over a pool in which everything else is NaN.

    ``kv_dtype``: of the pool, where it is another than that of the model. With ``page_size`` the
    positions of a piece lie in shuffled pages of that size, behind tables whose unused ends name
    pages that do not exist.
    """

    slots: list[int]  # of the queries
    context: Pieces = field(default_factory=list)
    causal: Pieces = field(default_factory=list)
    heads: tuple[int, int, int] = (6, 2, 64)
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    tiles: tuple[Tile, ...] | None = None
    page_size: int = 0
    num_programs: int = 8
    padding: int = 0  # items without queries behind the real ones
    q_scale: float = 1.0
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    def __post_init__(self) -> None:
        num_heads, num_kv_heads, head_dim = self.heads
        torch.manual_seed(len(self.slots))
        self.used = sorted({s for a, n, *_ in self.context + self.causal for s in range(a, a + n)})
        self.num_slots = max(self.used) + 3
        self.q = torch.randn(len(self.slots), num_heads, head_dim) * self.q_scale
        kv = torch.randn(2, num_kv_heads, self.num_slots, head_dim)
        self.kv = stored(kv, self.kv_dtype or self.dtype).to(self.dtype)
        poison_except(self.kv, 2, self.used)
        self.sinks = torch.randn(num_heads) if self.has_sinks else None
        if self.window is not None:  # nor may be read what is in no query's window
            seen = [slots_of_query(t, self.context, self.causal) for t in range(len(self.slots))]
            poison_except(self.kv, 2, {slot for slots in seen for slot in slots[-self.window :]})

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        num_heads, num_kv_heads, head_dim = self.heads
        kernel = TritonTreeAttention(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            dtype=self.dtype,
            device=CPU,
            kv_dtype=self.kv_dtype,
            tiles=self.tiles,
            softcap=self.softcap,
        )
        kernel._num_programs = self.num_programs
        place = np.arange(self.num_slots)  # of each slot in the pool
        context, causal, pages = self.context, self.causal, None
        if self.page_size:
            place, context, causal, pages = self._paged()
        pool = torch.full((2, num_kv_heads, int(place.max()) + 1, head_dim), math.nan)
        pool = pool.to(self.kv_dtype or self.dtype)
        old = [slot for slot in self.used if slot not in self.slots]
        as_bytes(pool)[:, :, place[old]] = as_bytes(self.kv[:, :, old].to(pool.dtype))
        plan = kernel.plan(
            place[self.slots],
            np.array(context, dtype=np.int64).reshape(-1, 4),
            np.array(causal, dtype=np.int64).reshape(-1, 4),
            pages=pages,
            page_size=self.page_size,
            window=self.window,
        )
        empty = torch.zeros(self.padding, 8, dtype=torch.int32)
        plan = replace(plan, items=tuple(torch.cat([items, empty]) for items in plan.items))
        plan.partial.fill_(math.nan)
        plan.partial_lse.fill_(math.nan)
        lse = torch.full(self.q.shape[:2], math.nan)
        k, v = self.kv[:, :, self.slots].transpose(1, 2).float()
        out = kernel.run(plan, pool, self.q, k, v, lse=lse, sinks=self.sinks)
        written, new = pool[:, :, place[self.slots]], self.kv[:, :, self.slots]
        assert torch.equal(written.float().nan_to_num(99), new.float().nan_to_num(99))
        unused = np.setdiff1d(np.arange(pool.shape[2]), place[self.used])
        assert pool[:, :, unused].isnan().all()
        return out.view(self.q.shape), lse

    def _paged(self):
        """Where each slot goes, the pieces by places in the table, and the table."""
        size, rng = self.page_size, np.random.default_rng(3)
        starts = sorted({(a, n) for a, n, *_ in self.context + self.causal})
        counts = [-(-n // size) for _, n in starts]
        free = rng.permutation(sum(counts) + 5).tolist()
        place, table, first = np.zeros(self.num_slots, dtype=np.int64), [], {}
        for (a, n), count in zip(starts, counts, strict=True):
            first[a] = len(table)
            taken = [free.pop() for _ in range(count)]
            at = np.arange(n)
            place[a : a + n] = np.array(taken)[at // size] * size + at % size
            table += [*taken, -7, 1 << 30]
        pieces = [
            [(first[a], n, q, end) for a, n, q, end in kind] for kind in (self.context, self.causal)
        ]
        return place, *pieces, np.array(table, dtype=np.int32)

    def check(self) -> None:
        out, lse = self.run()
        assert out.dtype == self.dtype
        q, scale = self.q.to(self.dtype), self.heads[2] ** -0.5
        pieces = (self.context, self.causal)
        of = {"scale": scale, "window": self.window, "softcap": self.softcap}
        wanted = tree_attention_reference(q, *self.kv, *pieces, **of, sinks=self.sinks)
        assert_matches(out, wanted, TOLERANCES[self.dtype])
        wanted = tree_attention_lse_reference(q, self.kv[0], *pieces, **of)
        assert_matches(lse, wanted, TOLERANCES[torch.float32], what="lse")


def tree(num_rows: int) -> tuple[list[int], Pieces]:
    """A shared root, a document for every four rows, a tail of another length for each."""
    context, slots, at = [(5, 70, 0, num_rows)], [], 78
    for row in range(0, num_rows, 4):
        context.append((at, 33 + row, row, min(row + 4, num_rows)))
        at += 34 + row
    for row in range(num_rows):
        length = 1 + 7 * row % 50
        context.append((at, length, row, row + 1))
        slots.append(at + length - 1)
        at += length + row % 2
    return slots, context


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        *((heads, DTYPES[number % 3]) for number, heads in enumerate(HEADS)),
        *(((8, 2, 64), dtype) for dtype in DTYPES),
    ],
)
def test_decoding_rows_below_shared_nodes_equal_the_reference(dtype, heads):
    Case(*tree(7), heads=heads, dtype=dtype).check()


def sets_of_tiles(head_dim: int, group: int) -> list[tuple[Tile, ...]]:
    """Every choice for 16 bits beside the built-in ones."""
    choices = tile_choices(head_dim, group, torch.bfloat16)
    tiles = tuple(each[0] for each in choices)
    return [
        (*tiles[:place], tile, *tiles[place + 1 :])
        for place, each in enumerate(choices)
        for tile in each
    ]


@pytest.mark.parametrize(
    "tiles", sets_of_tiles(64, 3), ids=lambda tiles: " and ".join(map(str, tiles))
)
@pytest.mark.parametrize("kv_dtype", [None, FLOAT8])
def test_every_choice_of_tiles_equals_the_reference(tiles, kv_dtype):
    case = Case(*tree(7), heads=(9, 3, 64), dtype=torch.bfloat16, kv_dtype=kv_dtype, tiles=tiles)
    case.check()
    causal = [(77, 50, 0, 50)]
    case = Case(list(range(77, 127)), [(3, 70, 0, 50)], causal, heads=(9, 3, 64))
    replace(case, dtype=torch.bfloat16, kv_dtype=kv_dtype, tiles=tiles).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(9, 3, 64), (8, 1, 96)])
def test_keys_and_values_in_8_bits_are_multiplied_as_they_were_rounded(dtype, heads):
    """The tolerances are those of the dtype that products are in: widening is exact."""
    Case(*tree(7), heads=heads, dtype=dtype, kv_dtype=FLOAT8).check()
    causal = [(77, 33, 0, 33)]
    prefill = Case(list(range(77, 110)), [(3, 70, 0, 33)], causal, heads=heads, dtype=dtype)
    replace(prefill, kv_dtype=FLOAT8).check()
    slots, context = tree(5)
    Case(slots, context, heads=heads, dtype=dtype, kv_dtype=FLOAT8, page_size=4).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "length"), [((9, 3, 64), 1), ((8, 1, 96), 33)])
def test_prefill_behind_a_context_equals_the_reference(dtype, heads, length):
    context, causal = [(3, 70, 0, length)], [(77, length, 0, length)]
    Case(list(range(77, 77 + length)), context, causal, heads=heads, dtype=dtype).check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_query_may_see_its_own_slot_alone(dtype):
    Case([3], [(3, 1, 0, 1)], dtype=dtype).check()
    Case([3], [], [(3, 1, 0, 1)], dtype=dtype).check()


def test_nested_new_nodes_with_many_queries_equal_the_reference():
    slots = [*range(9, 59), *range(70, 100), *range(111, 121)]
    causal = [(9, 50, 0, 50), (70, 30, 50, 80), (111, 10, 80, 90)]
    Case(slots, [(0, 9, 0, 90), (9, 50, 50, 90)], causal, heads=(4, 1, 64)).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 40, 10**6])
def test_queries_see_their_windows_alone(dtype, window):
    Case(*tree(7), heads=(9, 3, 64), dtype=dtype, window=window).check()
    context, causal = [(3, 70, 0, 50)], [(77, 50, 0, 50)]
    slots = list(range(77, 127))
    Case(slots, context, causal, heads=(8, 1, 96), dtype=dtype, window=window).check()
    Case(*tree(5), dtype=dtype, page_size=4, window=window, has_sinks=True).check()


@pytest.mark.parametrize("num_programs", [1, 4000])
def test_a_window_may_begin_within_a_run_of_a_long_node(num_programs):
    context, causal = [(3, 900, 0, 5)], [(910, 5, 0, 5)]
    Case(list(range(910, 915)), context, causal, num_programs=num_programs, window=500).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_scores_are_capped_and_sinks_take_weight(dtype, softcap):
    case = Case(*tree(5), dtype=dtype, softcap=softcap, has_sinks=True, q_scale=2 * softcap)
    case.q[2] = 0
    case.check()


@pytest.mark.parametrize("num_programs", [1, 4000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_node_is_the_same_in_one_run_or_split(dtype, num_programs):
    context, causal = [(3, 700, 0, 5)], [(710, 5, 0, 5)]
    case = Case(list(range(710, 715)), context, causal, dtype=dtype, num_programs=num_programs)
    case.check()


def test_a_long_causal_node_may_be_split():
    slots = list(range(2, 302))
    Case(slots, [], [(2, 300, 0, 300)], heads=(1, 1, 16), num_programs=4000).check()


@pytest.mark.parametrize(
    ("page_size", "dtype"), [(1, torch.float32), (4, torch.bfloat16), (16, torch.float16)]
)
def test_pages_in_any_order_equal_the_reference_whatever_their_tables_end_in(page_size, dtype):
    slots, context = tree(5)
    Case(slots, context, dtype=dtype, page_size=page_size).check()
    own = list(range(77, 110))
    causal = [(77, 33, 0, 33)]
    Case(own, [(3, 70, 0, 33)], causal, dtype=dtype, page_size=page_size).check()


def test_pieces_without_slots_or_queries_count_for_nothing():
    slots, context = tree(3)
    context[1:1] = [(4, 0, 0, 3), (0, 5, 2, 2)]
    case = Case(slots, context, [(9, 0, 1, 1)])
    case.used = [slot for slot in case.used if slot >= 5]
    case.kv[:, :, :5] = math.nan
    case.check()


def test_items_without_queries_do_nothing():
    Case(*tree(3), padding=2).check()


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_far_apart_neither_overflow_nor_vanish(dtype):
    Case(*tree(5), dtype=dtype, q_scale=300).check()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, at NaN
@pytest.mark.parametrize("broken", ["q", "k", "v"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_decoding_row_breaks_itself_alone(broken, value):
    case = Case(*tree(7))
    healthy, _ = case.run()
    if broken == "q":
        case.q[4] = value
    else:
        case.kv["kv".index(broken), :, case.slots[4]] = value
    kernel_out, _ = case.run()
    assert not kernel_out[4].isfinite().any()
    others = [0, 1, 2, 3, 5, 6]
    assert torch.equal(kernel_out[others], healthy[others])


@st.composite
def trees(draw) -> Case:
    """Any tree of old nodes, new nodes and decoding rows, its slots with gaps and in any order."""
    slots: list[int] = []
    context: Pieces = []
    causal: Pieces = []
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
            for _ in range(draw(st.integers(1, 2))):
                grow(depth - 1)
            context.insert(place, (start, length, first, len(slots)))

    grow(draw(st.integers(0, 3)))
    return Case(
        slots,
        context,
        causal,
        heads=draw(st.sampled_from(HEADS)),
        dtype=draw(st.sampled_from(DTYPES)),
        kv_dtype=draw(st.sampled_from([None, FLOAT8])),
        page_size=draw(st.sampled_from([0, 3])),
        window=draw(st.none() | st.integers(1, 60)),
        softcap=draw(st.sampled_from([None, 3.0])),
        has_sinks=draw(st.booleans()),
    )


@settings(deadline=None, max_examples=6, derandomize=True)
@given(case=trees())
def test_any_tree_equals_the_reference(case):
    case.check()
