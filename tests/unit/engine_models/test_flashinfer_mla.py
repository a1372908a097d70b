"""Latent attention by FlashInfer's calls, on a stand-in with its contract."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
import torch_flashinfer
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import shared_decode, trees

from batchradix.engine.attention import flashinfer_mla, flashinfer_module
from batchradix.engine.attention.flashinfer_mla import FlashInferMla
from batchradix.engine.attention.mla_base import MlaShape, UpProjection
from batchradix.engine.attention.mla_torch import TorchMla
from batchradix.engine.attention.registry import make_mla_backend
from batchradix.errors import OptionError
from batchradix_kernels.testing import TOLERANCES, assert_matches

SHAPE = MlaShape(
    num_layers=2,
    num_heads=4,
    kv_lora_rank=512,
    rope_dim=64,
    nope_dim=16,
    v_dim=24,
    scale=0.1,
    dtype=torch.bfloat16,
    device=torch.device("cpu"),
)


def attend(lab, slots, context, causal=(), *, backend) -> tuple[torch.Tensor, torch.Tensor]:
    """What the backend gives in its second layer, unused slots poisoned, and what torch gives from
    the same numbers in float32."""
    shape = backend.shape
    torch.manual_seed(len(slots))
    used = {s for start, n, *_ in [*context, *causal] for s in range(start, start + n)}
    num_slots, old = max(used) + 2, sorted(used - set(slots))
    pool = backend.allocate(num_slots)
    backend.poison(pool, 0, num_slots)
    pool[:, old] = torch.randn(2, len(old), shape.width).to(pool)
    num_tokens, heads = len(slots), shape.num_heads
    inputs = [
        torch.randn(num_tokens, heads, shape.nope_dim),
        torch.randn(num_tokens, heads, shape.rope_dim),
        torch.randn(num_tokens, shape.kv_lora_rank),
        torch.randn(num_tokens, shape.rope_dim),
    ]
    kv_b = 0.05 * torch.randn(heads * (shape.nope_dim + shape.v_dim), shape.kv_lora_rank)
    of_heads = (heads, shape.nope_dim, shape.v_dim)
    step = lab.make_step(
        range(num_tokens), range(num_tokens), slots, context=context, causal=causal
    )
    exact = TorchMla(replace(shape, dtype=torch.float32, device=torch.device("cpu")))
    exact_pool = exact.allocate(num_slots)
    exact_pool.copy_(pool)
    rounded = [tensor.to(shape.dtype).float() for tensor in (*inputs, kv_b)]
    wanted = exact.run(
        *(1, *rounded[:4], UpProjection.split(rounded[4], of_heads)), exact_pool, exact.plan(step)
    )
    given_ = [tensor.to(pool) for tensor in (*inputs, kv_b)]
    up = UpProjection.split(given_[4], of_heads)
    out = backend.run(1, *given_[:4], up, pool, backend.plan(step))
    assert out.dtype == shape.dtype
    return out.cpu(), wanted


@settings(deadline=None, max_examples=40)
@given(tree=trees(), most=st.integers(1, 4), dtype=st.sampled_from([torch.float32, SHAPE.dtype]))
def test_any_tree_equals_torch_in_float32(lab, tree, most, dtype):
    with pytest.MonkeyPatch.context() as patch:
        torch_flashinfer.install(patch)
        patch.setattr(flashinfer_mla, "MAX_LEVELS", most)
        backend = make_mla_backend("flashinfer", replace(SHAPE, dtype=dtype))
        assert_matches(*attend(lab, *tree, backend=backend), TOLERANCES[dtype])


@pytest.fixture
def flashinfer(monkeypatch):
    torch_flashinfer.install(monkeypatch)


def test_at_a_level_that_few_have_the_others_are_no_part_of_the_call(lab, flashinfer):
    context = [(0, 4, 1, 3), (9, 1, 0, 1), (4, 2, 1, 2), (6, 2, 2, 3), (8, 1, 3, 4)]
    backend = FlashInferMla(SHAPE)
    plan = backend.plan(lab.make_step(range(4), range(4), [9, 5, 7, 8], context=context))
    [shared] = plan.shared
    assert shared.queries.tolist() == [1, 2]
    assert [table.tolist() for table in shared.wrapper.tables] == [
        [0, 2],
        [0, 4],
        [0, 1, 2, 3],
        [4],
    ]
    full = backend.plan(
        lab.make_step(
            range(2),
            range(2),
            *shared_decode(2, documents=False)[:1],
            context=shared_decode(2, documents=False)[1],
        )
    )
    assert [level.queries for level in full.shared] == [None]


def test_more_queries_than_the_wrapper_has_room_for_are_refused(lab, flashinfer, monkeypatch):
    monkeypatch.setattr(flashinfer_mla, "_MAX_TILES", 3)
    backend = FlashInferMla(SHAPE)
    backend.plan(lab.make_step(range(96), range(96), range(96), causal=[[0, 96, 0, 96]]))
    with pytest.raises(OptionError, match="lower it"):
        backend.plan(lab.make_step(range(97), range(97), range(97), causal=[[0, 97, 0, 97]]))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kv_lora_rank": 256}, "latents of 256 and rope keys of 64"),
        ({"num_heads": 40}, "none for 40 heads"),
        ({"dtype": torch.float32}, "none for dtype float32"),
        ({"device": torch.device("cpu")}, "needs a GPU of NVIDIA"),
    ],
)
def test_what_it_does_not_serve_is_refused_with_a_remedy(monkeypatch, changes, why):
    monkeypatch.setattr(flashinfer_module, "find_spec", lambda name: object())
    monkeypatch.setattr(flashinfer_module, "capability", lambda device: (9, 0))
    with pytest.raises(OptionError, match=rf"flashinfer, .*{why}.*; use "):
        make_mla_backend(
            "flashinfer", replace(SHAPE, **({"device": torch.device("cuda")} | changes))
        )


@pytest.mark.parametrize("name", ["__init__", "plan", "run"])
def test_the_stand_in_takes_no_argument_that_flashinfer_does_not_take(name):
    real = pytest.importorskip("flashinfer").BatchMLAPagedAttentionWrapper
    theirs = list(inspect.signature(getattr(real, name)).parameters.values())
    by_name = {parameter.name: parameter for parameter in theirs}
    ours = inspect.signature(getattr(torch_flashinfer.BatchMLAPagedAttentionWrapper, name))
    for place, parameter in enumerate(ours.parameters.values()):
        same = by_name[parameter.name]
        assert parameter.default == same.default
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            assert theirs[place] is same


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("saving", [1, 10**6])
def test_on_a_gpu_flashinfer_itself_equals_torch(lab, monkeypatch, num_heads, saving):
    monkeypatch.setattr(flashinfer_mla, "MIN_SAVED_SLOTS", saving)
    shape = replace(SHAPE, num_heads=num_heads, device=torch.device("cuda", 0))
    backend = make_mla_backend("flashinfer", shape)
    new = [*range(300, 500), *range(600, 630), 700]
    below = [(0, 9, 0, 231), (300, 200, 200, 231), (690, 11, 230, 231)]
    for tree in [
        shared_decode(8),
        (new[:200], [(0, 300, 0, 200)], [(300, 200, 0, 200)]),
        (new, below, [(300, 200, 0, 200), (600, 30, 200, 230)]),
    ]:
        assert_matches(*attend(lab, *tree, backend=backend), TOLERANCES[shape.dtype])
