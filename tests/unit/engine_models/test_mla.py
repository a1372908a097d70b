"""Latent attention against a float64 reference on random trees in a poisoned pool."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from batchradix.engine.attention.cpu_backend import CpuAttention
from batchradix.engine.attention.mla_base import MlaShape, UpProjection, pieces_by_form
from batchradix.engine.attention.mla_cpu import CpuMla, one_key_head
from batchradix.engine.attention.mla_torch import TorchMla
from batchradix.engine.attention.mla_triton import TritonMla
from batchradix.engine.attention.registry import make_mla_backend
from batchradix.errors import OptionError
from batchradix_kernels.testing import TOLERANCES, assert_matches
from batchradix_kernels.tree_attention.reference import slots_of_query
from batchradix_kernels.triton_runtime import interprets

# Under Triton's interpreter (`tests/interpreted`) the Triton backend alone.
NAME, BACKEND = ("triton", TritonMla) if interprets() else ("torch", TorchMla)
SLOTS_AT_ONCE = [40] if interprets() else [1000, 40, 7]

POOL_SLOTS = 500


def make_shape(dtype=torch.float32, **sizes) -> MlaShape:
    values = {
        "num_layers": 2,
        "num_heads": 3,
        "kv_lora_rank": 20,
        "rope_dim": 6,
        "nope_dim": 10,
        "v_dim": 14,
        "scale": 0.3,
        "dtype": dtype,
        "device": torch.device("cpu"),
    }
    return MlaShape(**(values | sizes))


V3 = make_shape(num_heads=128, kv_lora_rank=512, rope_dim=64, nope_dim=128, v_dim=128)


def reference(q_nope, q_rope, rows, up, context, causal, shape) -> torch.Tensor:
    """float32[T, H · V]: keys and values of all heads made from a layer's rows, in float64."""
    latent, k_rope = rows.double().split((shape.kv_lora_rank, shape.rope_dim), dim=1)
    out = []
    for t in range(len(q_nope)):
        slots = slots_of_query(t, context, causal)
        keys = torch.einsum("hpc,sc->hsp", up.w_uk_HPC.double(), latent[slots])
        values = torch.einsum("hcv,sc->hsv", up.w_uv_HCV.double(), latent[slots])
        scores = torch.einsum("hp,hsp->hs", q_nope[t].double(), keys)
        scores += torch.einsum("hr,sr->hs", q_rope[t].double(), k_rope[slots])
        weights = (scores * shape.scale).softmax(dim=-1)
        out.append(torch.einsum("hs,hsv->hv", weights, values).flatten())
    return torch.stack(out).float()


# A finished prefix, a new document of 23 tokens below it with two new questions, and five rows
# that decode below the document of an earlier step: queries 0 to 36 and 37 to 41.
CONTEXT = [
    (100, 60, 0, 42), (200, 23, 23, 37), (300, 90, 37, 42),
    *[(400 + 10 * row, 4 + row, 37 + row, 38 + row) for row in range(5)],
]  # fmt: skip
CAUSAL = [(200, 23, 0, 23), (230, 9, 23, 32), (240, 5, 32, 37)]
NEW_SLOTS = [*range(200, 223), *range(230, 239), *range(240, 245)]
NEW_SLOTS += [400 + 10 * row + 3 + row for row in range(5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [None, "absorbed", "expanded"])
@pytest.mark.parametrize("slots_at_once", SLOTS_AT_ONCE)
def test_every_form_equals_the_reference(lab, dtype, form, slots_at_once):
    shape = make_shape(dtype)
    backend = BACKEND(shape, form, max_expanded=slots_at_once * 3 * 30)
    pool = backend.allocate(POOL_SLOTS)
    backend.poison(pool, 0, POOL_SLOTS)
    torch.manual_seed(1)
    used = sorted({slot for t in range(42) for slot in slots_of_query(t, CONTEXT, CAUSAL)})
    old = [slot for slot in used if slot not in NEW_SLOTS]
    pool[:, old] = torch.randn(2, len(old), shape.width).to(dtype)
    num_tokens = len(NEW_SLOTS)
    step = lab.make_step(
        range(num_tokens), range(num_tokens), NEW_SLOTS, context=CONTEXT, causal=CAUSAL
    )
    plan = backend.plan(step)
    for layer in range(2):
        q_nope = torch.randn(num_tokens, 3, shape.nope_dim).to(dtype)
        q_rope = torch.randn(num_tokens, 3, shape.rope_dim).to(dtype)
        rows = torch.randn(num_tokens, shape.width).to(dtype)
        latent, k_rope = rows.split((shape.kv_lora_rank, shape.rope_dim), dim=1)
        kv_b = torch.randn(3 * (shape.nope_dim + shape.v_dim), shape.kv_lora_rank) / 4
        up = UpProjection.split(kv_b.to(dtype), (3, shape.nope_dim, shape.v_dim))
        out = backend.run(layer, q_nope, q_rope, latent, k_rope, up, pool, plan)
        assert out.dtype == dtype
        assert torch.equal(pool[layer, NEW_SLOTS], rows)
        wanted = reference(q_nope, q_rope, pool[layer], up, CONTEXT, CAUSAL, shape)
        assert_matches(out, wanted, TOLERANCES[dtype])
    others = sorted(set(range(POOL_SLOTS)) - set(used))
    assert pool[:, others].isnan().all()


def test_exported_latents_and_rope_keys_come_back_in_other_slots():
    shape = make_shape()
    backend = make_mla_backend(NAME, shape)
    pool = backend.allocate(40)
    pool.normal_()
    latents, keys = backend.export(pool, np.array([3, 30, 8]))
    assert latents.shape == (2, 1, 3, 20)
    assert keys.shape == (2, 1, 3, 6)
    backend.load(pool, 11, latents, keys)
    assert torch.equal(pool[:, 11:14], pool[:, [3, 30, 8]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_in_c_equal_the_reference(lab, dtype):
    shape = make_shape(dtype)
    if not CpuAttention.serves(one_key_head(shape)):
        pytest.skip("the C kernels were not built")
    backend = make_mla_backend("auto", shape)
    assert isinstance(backend, CpuMla)
    pool = backend.allocate(POOL_SLOTS)
    backend.poison(pool, 0, POOL_SLOTS)
    torch.manual_seed(1)
    rows = torch.full((2, POOL_SLOTS, shape.width), torch.nan, dtype=dtype)
    used = sorted({slot for t in range(42) for slot in slots_of_query(t, CONTEXT, CAUSAL)})
    for slot in used:
        rows[:, slot] = torch.randn(2, shape.width).to(dtype)
        if slot not in NEW_SLOTS:
            latent, key = rows[:, None, slot : slot + 1].split((20, 6), dim=-1)
            backend.load(pool, slot, latent, key)
    num_tokens = len(NEW_SLOTS)
    step = lab.make_step(
        range(num_tokens), range(num_tokens), NEW_SLOTS, context=CONTEXT, causal=CAUSAL
    )
    plan = backend.plan(step)
    for layer in range(2):
        q_nope = torch.randn(num_tokens, 3, shape.nope_dim).to(dtype)
        q_rope = torch.randn(num_tokens, 3, shape.rope_dim).to(dtype)
        latent, k_rope = rows[layer, NEW_SLOTS].split((20, 6), dim=1)
        kv_b = torch.randn(3 * (shape.nope_dim + shape.v_dim), shape.kv_lora_rank) / 4
        up = UpProjection.split(kv_b.to(dtype), (3, shape.nope_dim, shape.v_dim))
        out = backend.run(layer, q_nope, q_rope, latent, k_rope, up, pool, plan)
        assert out.dtype == dtype
        wanted = reference(q_nope, q_rope, rows[layer], up, CONTEXT, CAUSAL, shape)
        assert_matches(out, wanted, TOLERANCES[dtype])
    latents, keys = backend.export(pool, np.array(used))
    assert torch.equal(torch.cat((latents, keys), dim=-1)[:, 0], rows[:, used])


def test_moves_read_everything_before_they_write():
    backend = make_mla_backend(NAME, make_shape())
    pool = backend.allocate(20)
    pool.normal_()
    before = pool.clone()
    backend.move(pool, np.array([[0, 2, 5], [5, 0, 2]]))
    assert torch.equal(pool[:, 2:7], before[:, 0:5])
    assert torch.equal(pool[:, 0:2], before[:, 5:7])


def forms(lab, shape, num_tokens, context, causal) -> tuple[list[int], list[int]]:
    """Where the absorbed and where the expanded pieces begin in the pool."""
    step = lab.make_step(range(num_tokens), context=context, causal=causal)
    return tuple(
        sorted([*pieces.context[:, 0], *pieces.causal[:, 0]])
        for pieces in pieces_by_form(step, shape)
    )


@pytest.mark.parametrize(("num_rows", "expanded"), [(64, False), (170, False), (171, True)])
def test_rows_that_decode_below_one_node_expand_it_from_171_on(lab, num_rows, expanded):
    tails = [(5000 + 8 * row, 5, row, row + 1) for row in range(num_rows)]
    found = forms(lab, V3, num_rows, [(0, 4000, 0, num_rows), *tails], [])
    assert (0 in found[1]) == expanded
    assert set(found[0]) >= {start for start, *_ in tails}


def test_a_prompt_that_shares_nothing_is_expanded_however_short(lab):
    assert forms(lab, V3, 12, [], [(7, 12, 0, 12)]) == ([], [7])


def test_a_short_chunk_below_a_long_prefix_is_absorbed_and_a_long_one_expanded(lab):
    assert forms(lab, V3, 60, [(0, 9000, 0, 60)], [(9500, 60, 0, 60)]) == ([0, 9500], [])
    assert forms(lab, V3, 512, [(0, 9000, 0, 512)], [(9500, 512, 0, 512)]) == ([], [0, 9500])


def test_what_no_backend_does_is_refused():
    with pytest.raises(OptionError, match=r"latent attention.*'flash'"):
        make_mla_backend("flash", make_shape())
    with pytest.raises(OptionError, match=r"kernels in C.*float16"):
        make_mla_backend("cpu", make_shape(torch.float16))
    if not interprets():
        with pytest.raises(OptionError, match="it needs a GPU"):
            make_mla_backend("triton", make_shape())
    with pytest.raises(OptionError, match="deterministic"):
        make_mla_backend("auto", make_shape(batch_invariant=True))
