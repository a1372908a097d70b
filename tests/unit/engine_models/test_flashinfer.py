"""The levels FlashInfer gets, and the calls it gets them by, on a stand-in with its contract."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch_flashinfer
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import shared_decode, trees

from batchradix.engine.attention import flashinfer_backend, flashinfer_module
from batchradix.engine.attention.base import AttentionShape
from batchradix.engine.attention.flashinfer_backend import FlashInferAttention
from batchradix.engine.attention.flashinfer_plan import Level, plan_levels
from batchradix.engine.attention.registry import make_backend
from batchradix.engine.step import Step
from batchradix.errors import OptionError
from batchradix_kernels.testing import TOLERANCES, assert_matches
from batchradix_kernels.tree_attention import tree_attention_reference
from batchradix_kernels.tree_attention.reference import slots_of_query

SHAPE = AttentionShape(
    num_layers=1,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    scale=0.125,
    dtype=torch.float16,
    device=torch.device("cpu"),
)


def make_step(lab, slots, context, causal=()) -> Step:
    tokens = range(len(slots))
    return lab.make_step(tokens, tokens, slots, context=context, causal=causal)


def levels_of(step: Step, *, most: int = 4, saving: int = 1) -> tuple[Level, ...]:
    return plan_levels(
        step.context, step.causal, step.num_tokens, max_levels=most, min_saved_slots=saving
    )


def entries(level: Level) -> list[tuple[range, list[int]]]:
    """Each entry's queries and slots."""
    queries = zip(level.qo_indptr[:-1], level.qo_indptr[1:], strict=True)
    slots = zip(level.kv_indptr[:-1], level.kv_indptr[1:], strict=True)
    return [
        (range(first, end), level.kv_indices[begin:stop].tolist())
        for (first, end), (begin, stop) in zip(queries, slots, strict=True)
    ]


def slots_seen(levels: tuple[Level, ...], num_queries: int) -> list[list[int]]:
    """What each query attends to at all levels, sorted."""
    seen: list[list[int]] = [[] for _ in range(num_queries)]
    for level in levels:
        for queries, slots in entries(level):
            for query in queries:
                hidden = queries[-1] - query if level.causal else 0
                seen[query] += slots[: len(slots) - hidden]
    return [sorted(slots) for slots in seen]


@settings(deadline=None, max_examples=200)
@given(tree=trees(), data=st.data())
def test_every_query_sees_each_of_its_slots_once_whatever_the_limits(lab, tree, data):
    step = make_step(lab, *tree)
    ends = sorted(data.draw(st.tuples(*[st.integers(0, step.num_tokens)] * 2)))
    if ends[0] < ends[1]:
        step = step.part(*ends)
    most, saving = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([1, 20, 10**6]))
    levels = levels_of(step, most=most, saving=saving)
    pieces = (step.context.tolist(), step.causal.tolist())
    assert slots_seen(levels, step.num_tokens) == [
        sorted(slots_of_query(query, *pieces)) for query in range(step.num_tokens)
    ]
    assert len(levels) <= most
    assert levels[-1].is_full
    for level in levels:
        tables = (level.qo_indptr, level.kv_indptr, level.kv_indices, level.last_page_len)
        assert {table.dtype for table in tables} == {np.dtype(np.int32)}
        assert level.qo_indptr[[0, -1]].tolist() == [0, step.num_tokens]
        assert level.last_page_len.tolist() == [min(len(slots), 1) for _, slots in entries(level)]
        assert level.seen.tolist() == [
            bool(slots) for queries, slots in entries(level) for _ in queries
        ]


def test_what_rows_share_is_listed_once_and_their_tails_are_theirs(lab):
    root, documents, own = levels_of(make_step(lab, *shared_decode(4)))
    assert entries(root) == [(range(4), list(range(10)))]
    assert entries(documents) == [
        (range(2), list(range(10, 15))),
        (range(2, 4), list(range(15, 20))),
    ]
    assert [slots for _, slots in entries(own)] == [[n, n + 1, n + 2] for n in (20, 23, 26, 29)]
    assert not own.causal


def test_of_the_depths_those_that_save_most_become_levels(lab):
    step = make_step(lab, *shared_decode(4))
    root, own = levels_of(step, most=2)
    assert entries(root) == [(range(4), list(range(10)))]
    assert entries(own)[1] == (range(1, 2), [10, 11, 12, 13, 14, 23, 24, 25])
    # the root saves three times its 10 slots, the documents twice 5
    assert len(levels_of(step, saving=11)) == 2
    assert len(levels_of(step, saving=31)) == 1


def test_a_chunk_behind_its_context_and_rows_alone_are_one_level(lab):
    chunk = make_step(lab, range(7, 12), [(0, 7, 0, 5)], [(7, 5, 0, 5)])
    [level] = levels_of(chunk)
    assert entries(level) == [(range(5), list(range(12)))]
    assert level.causal
    rows = make_step(lab, [3, 9], [(0, 4, 0, 1), (5, 5, 1, 2)])
    assert len(levels_of(rows)) == 1


def test_queries_without_a_piece_at_a_level_are_entries_without_slots(lab):
    context = [(0, 4, 1, 3), (9, 1, 0, 1), (4, 2, 1, 2), (6, 2, 2, 3), (8, 1, 3, 4)]
    shared, own = levels_of(make_step(lab, [9, 5, 7, 8], context))
    assert entries(shared) == [(range(1), []), (range(1, 3), [0, 1, 2, 3]), (range(3, 4), [])]
    assert shared.last_page_len.tolist() == [0, 1, 0]
    assert (shared.is_full, own.is_full) == (False, True)


@pytest.fixture
def flashinfer(monkeypatch):
    torch_flashinfer.install(monkeypatch)


@settings(deadline=None, max_examples=60)
@given(tree=trees(), most=st.integers(1, 4), is_hopper=st.booleans())
def test_any_tree_equals_the_reference(lab, tree, most, is_hopper):
    with pytest.MonkeyPatch.context() as patch:
        torch_flashinfer.install(patch)
        patch.setattr(flashinfer_backend, "MAX_LEVELS", most)
        if is_hopper:
            patch.setattr(flashinfer_backend, "capability", lambda device: (9, 0))
        out, wanted = attend(lab, *tree)
    assert_matches(out, wanted, TOLERANCES[SHAPE.dtype])


def attend(lab, slots, context, causal=(), *, backend=None) -> tuple[torch.Tensor, torch.Tensor]:
    """What the backend gives, unused slots poisoned, and what is right."""
    backend = backend or make_backend("flashinfer", SHAPE)
    device, num_kv_heads = backend.shape.device, SHAPE.num_kv_heads
    torch.manual_seed(len(slots))
    used = {s for start, n, *_ in [*context, *causal] for s in range(start, start + n)}
    pool = backend.allocate(max(used) + 2)
    backend.poison(pool, 0, max(used) + 2)
    for slot in sorted(used - set(slots)):
        old = torch.randn(2, 1, num_kv_heads, 1, SHAPE.head_dim)
        backend.load(pool, slot, *old.to(pool))
    q = torch.randn(len(slots), SHAPE.num_heads, SHAPE.head_dim).to(pool)
    k, v = torch.randn(2, len(slots), num_kv_heads, SHAPE.head_dim).to(pool)
    plan = backend.plan(make_step(lab, slots, context, causal))
    out = backend.run(0, q, k, v, pool, plan)
    assert out.dtype == pool.dtype
    wanted = tree_attention_reference(q.cpu(), *pool[0].cpu(), context, causal, scale=SHAPE.scale)
    assert device == out.device
    return out.view(wanted.shape).cpu(), wanted


@pytest.mark.parametrize(
    ("changes", "is_hopper", "cascades"),
    [
        pytest.param({}, False, True, id="every query at every level"),
        pytest.param({}, True, False, id="few queries on Hopper"),
        pytest.param({"num_heads": 192}, False, False, id="more heads than its merge has threads"),
    ],
)
def test_flashinfers_own_cascade_serves_where_nothing_is_lost(
    lab, flashinfer, monkeypatch, changes, is_hopper, cascades
):
    if is_hopper:
        monkeypatch.setattr(flashinfer_backend, "capability", lambda device: (9, 0))
    backend = FlashInferAttention(replace(SHAPE, **changes))
    plan = backend.plan(make_step(lab, *shared_decode(4)))
    assert (plan.cascade is not None) == cascades
    if not cascades:
        wrappers = [level.wrapper for level in plan.shared] + [plan.own]
        assert {wrapper.backend for wrapper in wrappers} == {"fa2" if is_hopper else "auto"}
        assert [level.merges for level in plan.shared] == [None, None]


def test_more_heads_than_a_merge_has_threads_equal_the_reference(lab, flashinfer, monkeypatch):
    monkeypatch.setattr(flashinfer_backend, "_MERGE_ELEMENTS", 6 * 64 - 1)
    out, wanted = attend(lab, *shared_decode(4))
    assert_matches(out, wanted, TOLERANCES[SHAPE.dtype])


def test_long_chunks_on_hopper_are_left_to_flashinfers_choice(lab, flashinfer, monkeypatch):
    monkeypatch.setattr(flashinfer_backend, "capability", lambda device: (9, 0))
    backend = make_backend("flashinfer", SHAPE)
    long = backend.plan(make_step(lab, range(128), [], [(0, 128, 0, 128)]))
    assert long.own.backend == "auto"
    short = backend.plan(make_step(lab, range(127), [], [(0, 127, 0, 127)]))
    assert short.own.backend == "fa2"


def test_wrappers_are_kept_from_step_to_step_and_serve_the_last_plan_only(lab, flashinfer):
    backend = make_backend("flashinfer", SHAPE)
    slots, context = shared_decode(2, documents=False)
    first = backend.plan(make_step(lab, slots, context))
    again = backend.plan(make_step(lab, slots, context))
    assert first.cascade is again.cascade
    assert again.cascade.wrappers[0].num_plans == 2
    pool, kv = backend.allocate(30), torch.zeros(2, 2, 64, dtype=SHAPE.dtype)
    with pytest.raises(AssertionError, match="later plan"):
        backend.run(0, torch.zeros(2, 6, 64), kv, kv, pool, first)


ON_CUDA = {"device": torch.device("cuda")}


@pytest.mark.parametrize(
    ("changes", "gpu", "why"),
    [
        ({}, (0, 0), "it needs a GPU of NVIDIA"),
        (ON_CUDA | {"dtype": torch.float32}, (9, 0), "none for dtype float32"),
        (ON_CUDA | {"head_dim": 80}, (9, 0), "none for heads of 80"),
        (ON_CUDA, (7, 5), "needs a GPU of compute capability 8.0"),
    ],
)
def test_what_it_does_not_serve_is_refused_with_a_remedy(monkeypatch, changes, gpu, why):
    monkeypatch.setattr(flashinfer_module, "find_spec", lambda name: object())  # kernels too
    monkeypatch.setattr(flashinfer_module, "capability", lambda device: gpu)
    with pytest.raises(OptionError, match=rf"flashinfer, .*{why}.*; use "):
        make_backend("flashinfer", replace(SHAPE, **changes))


def test_without_flashinfer_the_message_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(flashinfer_module, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"pip install 'batchradix\[gpu\]', or use triton"):
        make_backend("flashinfer", replace(SHAPE, **ON_CUDA))


def test_without_a_compiler_kernels_must_come_built(monkeypatch, tmp_path):
    """What is found there is asked for what comes next, a GPU that is not too old."""
    found = {"flashinfer": SimpleNamespace(submodule_search_locations=[str(tmp_path)])}
    monkeypatch.setattr(flashinfer_module, "find_spec", found.get)
    monkeypatch.setattr(flashinfer_module, "capability", lambda device: (7, 5))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(OptionError, match="with nvcc, which is not there; install the CUDA tool"):
        make_backend("flashinfer", replace(SHAPE, **ON_CUDA))
    (tmp_path / "data" / "aot").mkdir(parents=True)
    with pytest.raises(OptionError, match="compute capability"):
        make_backend("flashinfer", replace(SHAPE, **ON_CUDA))


def test_an_installation_that_does_not_import_is_told(flashinfer, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(OptionError, match=r"does not import .*pip install 'batchradix\[gpu\]'"):
        make_backend("flashinfer", SHAPE)


def test_kernels_that_cannot_be_built_are_told_before_the_run(flashinfer, monkeypatch):
    def plan(*_, **__):
        raise RuntimeError("Could not find nvcc\nand more")

    monkeypatch.setattr(torch_flashinfer.BatchPrefillWithPagedKVCacheWrapper, "plan", plan)
    with pytest.raises(OptionError, match=r"\(Could not find nvcc\); install the CUDA toolkit"):
        make_backend("flashinfer", SHAPE)


@pytest.mark.parametrize(
    "path",
    [
        "BatchPrefillWithPagedKVCacheWrapper.__init__",
        "BatchPrefillWithPagedKVCacheWrapper.plan",
        "BatchPrefillWithPagedKVCacheWrapper.run",
        "MultiLevelCascadeAttentionWrapper.__init__",
        "MultiLevelCascadeAttentionWrapper.plan",
        "MultiLevelCascadeAttentionWrapper.run",
        "merge_state_in_place",
    ],
)
def test_the_stand_in_takes_no_argument_that_flashinfer_does_not_take(path):
    real = pytest.importorskip("flashinfer")
    ours: object = torch_flashinfer
    for name in path.split("."):
        ours, real = getattr(ours, name), getattr(real, name)
    theirs = list(inspect.signature(real).parameters.values())
    by_name = {parameter.name: parameter for parameter in theirs}
    for place, parameter in enumerate(inspect.signature(ours).parameters.values()):
        same = by_name[parameter.name]
        assert parameter.default == same.default
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            assert theirs[place] is same


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("saving", [1, 10**6])
def test_on_a_gpu_flashinfer_itself_equals_the_reference(lab, monkeypatch, dtype, saving):
    monkeypatch.setattr(flashinfer_backend, "MIN_SAVED_SLOTS", saving)
    backend = make_backend(
        "flashinfer", replace(SHAPE, dtype=dtype, device=torch.device("cuda", 0))
    )
    partial = [(0, 40, 1, 3), (99, 1, 0, 1), (40, 20, 1, 2), (60, 20, 2, 3), (80, 1, 3, 4)]
    new = [*range(300, 500), *range(600, 630), 700]
    below = [(0, 9, 0, 231), (300, 200, 200, 231), (690, 11, 230, 231)]
    for tree in [
        shared_decode(8),
        ([99, 59, 79, 80], partial),
        (new[:200], [(0, 300, 0, 200)], [(300, 200, 0, 200)]),
        (new, below, [(300, 200, 0, 200), (600, 30, 200, 230)]),
    ]:
        out, wanted = attend(lab, *tree, backend=backend)
        assert_matches(out, wanted, TOLERANCES[dtype])
