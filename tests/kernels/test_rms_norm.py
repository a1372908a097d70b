"""Normalisation behind a residual: C on every instruction set beside torch in float64."""

from __future__ import annotations

import pytest
import torch

from batchradix_kernels.quantise_rows import rotate_rows_reference
from batchradix_kernels.rms_norm import rms_norm, rms_norm_int8, rms_norm_reference
from batchradix_kernels.testing import TOLERANCES, assert_matches, poison

DTYPES = [torch.float32, torch.bfloat16]


def make(rows: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """x, residual and weight, with NaN in memory right behind them."""
    torch.manual_seed(rows * 1000 + width)
    made = []
    for shape in ((rows, width), (rows, width), (width,)):
        memory = poison(torch.empty(rows * width + 64, dtype=dtype))
        size = torch.Size(shape).numel()
        memory[:size] = 3 * torch.randn(size)
        made.append(memory[:size].view(shape))
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 48), (64, 576), (130, 577)])
@pytest.mark.parametrize("has_residual", [True, False])
def test_it_equals_its_reference(every_level, dtype, shape, has_residual):
    x, residual, weight = make(*shape, dtype)
    left = residual if has_residual else None
    summed = x + residual if has_residual else x.clone()
    out = rms_norm(x, weight, 1e-5, left)
    wanted = rms_norm_reference(summed.double(), weight.double(), 1e-5)
    assert torch.equal(x, summed)
    assert out.dtype == dtype
    assert_matches(out, wanted, TOLERANCES[dtype])


@pytest.mark.parametrize("shape", [(3, 7), (64, 576)])
def test_weights_may_be_float32_beside_bfloat16(every_level, shape):
    x, residual, weight = make(*shape, torch.bfloat16)
    weight = weight.float() + 1e-3  # which bfloat16 would round off
    wanted = rms_norm_reference((x + residual).double(), weight.double(), 1e-5)
    out = rms_norm(x, weight, 1e-5, residual)
    assert out.dtype == torch.bfloat16
    # Computed in float32 and rounded once.
    assert ((out.double() - wanted).abs() <= wanted.abs() * 2**-8 * 1.01).all()
    values, scales = rms_norm_int8(x, weight, 1e-5)
    turned = rotate_rows_reference(wanted)
    assert ((values.double() - turned / scales.double()[:, None]).abs() <= 0.501).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_depends_on_itself_alone(every_level, dtype):
    x, residual, weight = make(130, 577, dtype)
    whole = rms_norm(x.clone(), weight, 1e-5, residual)
    for first, last in ((0, 1), (1, 3), (7, 71), (129, 130)):
        rows = slice(first, last)
        assert torch.equal(rms_norm(x[rows].clone(), weight, 1e-5, residual[rows]), whole[rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_in_its_row(every_level, dtype):
    x, residual, weight = make(3, 37, dtype)
    x[1, 5] = torch.nan
    out = rms_norm(x, weight, 1e-5, residual)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()
    values, scales = rms_norm_int8(x, weight, 1e-5)
    assert scales.isnan().tolist() == [False, True, False]
    assert (values[1] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 7), (64, 576)])
def test_the_quantised_norm_is_half_a_step_away_at_most(every_level, dtype, shape):
    x, residual, weight = make(*shape, dtype)
    normed = rms_norm_reference((x + residual).double(), weight.double(), 1e-5)
    wanted = rotate_rows_reference(normed)
    values, scales = rms_norm_int8(x, weight, 1e-5, residual)
    steps = (values.double() - wanted / scales.double()[:, None]).abs()
    assert steps.max() <= 0.501
    assert (values.abs().amax(dim=1) == 127).all()
