"""Row-wise kernels in Triton beside torch in float64, unused memory poisoned."""

from __future__ import annotations

import pytest
import torch

from batchradix_kernels.rms_norm import rms_norm_reference
from batchradix_kernels.rms_norm.triton import rms_norm_triton
from batchradix_kernels.rope import rope_reference
from batchradix_kernels.rope.triton import rope_triton
from batchradix_kernels.rope_delta import rope_delta_reference
from batchradix_kernels.rope_delta.triton import rope_delta_triton
from batchradix_kernels.swiglu import swiglu_reference
from batchradix_kernels.swiglu.triton import swiglu_triton
from batchradix_kernels.testing import TOLERANCES, assert_matches, poison, poison_except

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def surrounded(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Random numbers with NaN in memory right before and behind them."""
    size = torch.Size(shape).numel()
    memory = poison(torch.empty(size + 128, dtype=dtype))
    memory[64 : 64 + size] = scale * torch.randn(size)
    return memory[64 : 64 + size].view(shape)


def angles(num: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    turned = 100 * torch.randn(num, half)
    return turned.cos(), turned.sin()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (3, 7), (5, 576), (2, 1100)])
@pytest.mark.parametrize("has_residual", [True, False])
def test_the_norm_equals_its_reference_and_leaves_the_sum(dtype, shape, has_residual):
    x, weight = surrounded(*shape, dtype=dtype), surrounded(shape[1], dtype=dtype)
    residual = surrounded(*shape, dtype=dtype) if has_residual else None
    summed = x + residual if has_residual else x.clone()
    out = rms_norm_triton(x, weight, 1e-5, residual)
    assert torch.equal(x, summed)
    assert out.dtype == dtype
    wanted = rms_norm_reference(summed.double(), weight.double(), 1e-5)
    assert_matches(out, wanted, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (3, 7), (2, 1500)])
def test_the_gate_equals_its_reference(dtype, shape):
    gate_up = surrounded(shape[0], 2 * shape[1], dtype=dtype, scale=5.0)
    out = swiglu_triton(gate_up)
    assert out.dtype == dtype
    assert_matches(out, swiglu_reference(gate_up.double()), TOLERANCES[dtype])


def test_the_gate_takes_numbers_of_every_size():
    gates = torch.tensor([-3e38, -100.0, -87.0, 0.0, 100.0, 3e38])
    out = swiglu_triton(torch.cat((gates, torch.ones(6)))[None])[0]
    assert_matches(out, torch.nn.functional.silu(gates.double()), TOLERANCES[torch.float32])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (3, 3, 2, 20), (2, 9, 3, 64), (2, 20, 1, 256)])
def test_rope_equals_its_reference(dtype, normalised, shape):
    num_tokens, num_q, num_k, head_dim = shape
    heads = surrounded(num_tokens, num_q + 2 * num_k, head_dim, dtype=dtype)
    poison(heads[:, num_q + num_k :])  # values are nobody's business
    cosines, sines = angles(num_tokens, head_dim // 2)
    norms = None
    if normalised:
        weights = (surrounded(head_dim, dtype=dtype) for _ in range(2))
        norms = (*weights, 1e-5)
    wanted = heads.double()
    rope_reference(wanted, cosines, sines, num_q, num_k, norms)
    rope_triton(heads, cosines, sines, num_q, num_k, norms)
    rotated = slice(0, num_q + num_k)
    assert_matches(heads[:, rotated], wanted[:, rotated], TOLERANCES[dtype])
    assert heads[:, num_q + num_k :].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 9, 20), (1, 1, 60, 128), (3, 2, 5, 2)])
@pytest.mark.parametrize("is_one_delta", [False, True])
def test_moving_keys_equals_its_reference(dtype, shape, is_one_delta):
    num_layers, num_heads, num_slots, head_dim = shape
    pool = surrounded(num_layers, 2, num_heads, num_slots, head_dim, dtype=dtype)
    slots = torch.randperm(num_slots)[: num_slots * 2 // 3].int()
    poison_except(pool, 3, slots.tolist())
    poison(pool[:, 1])  # values
    cosines, sines = angles(1 if is_one_delta else len(slots), head_dim // 2)
    cosines, sines = (a.expand(len(slots), -1) for a in (cosines, sines))
    wanted = pool.double()
    rope_delta_reference(wanted[:, 0], slots, cosines, sines)
    rope_delta_triton(pool[:, 0], slots, cosines, sines)
    used = slots.long()
    assert_matches(pool[:, 0, :, used], wanted[:, 0, :, used], TOLERANCES[dtype])
    pool[:, 0, :, used] = torch.nan
    assert pool.isnan().all()


def test_a_row_depends_on_itself_alone():
    gate_up, residual = surrounded(5, 64, dtype=torch.float32), torch.randn(5, 64)
    gate_up[2, 3] = torch.nan
    weight = torch.randn(64)
    gated = swiglu_triton(gate_up)
    assert gated.isnan().nonzero().tolist() == [[2, 3]]
    normed = rms_norm_triton(gate_up.clone(), weight, 1e-5, residual)
    assert normed.isnan().any(dim=1).tolist() == [False, False, True, False, False]
    alone = rms_norm_triton(gate_up[3:4].clone(), weight, 1e-5, residual[3:4])
    assert torch.equal(alone[0], normed[3])
