"""The gated activation: C on every instruction set beside torch in float64."""

from __future__ import annotations

import pytest
import torch

from batchradix_kernels.quantise_rows import rotate_rows_reference
from batchradix_kernels.swiglu import SILU, Gating, swiglu, swiglu_int8, swiglu_reference
from batchradix_kernels.testing import TOLERANCES, assert_matches, poison

DTYPES = [torch.float32, torch.bfloat16]
GATINGS = [SILU, Gating("gelu_tanh"), Gating("clamped", 1.702, 7.0)]
SHAPES = [(1, 1), (3, 7), (64, 1536), (33, 577)]


def make(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(width)
    size = rows * 2 * width
    memory = poison(torch.empty(size + 64, dtype=dtype))
    memory[:size] = 5 * torch.randn(size)
    return memory[:size].view(rows, 2 * width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gating", GATINGS)
def test_it_equals_its_reference(every_level, dtype, shape, gating):
    gate_up = make(*shape, dtype)
    out = swiglu(gate_up, gating)
    assert out.dtype == dtype
    assert_matches(out, swiglu_reference(gate_up.double(), gating), TOLERANCES[dtype])


@pytest.mark.parametrize("gating", GATINGS[1:])
def test_other_gates_of_every_size_are_exact_to_float32(every_level, gating):
    gates = torch.cat((torch.linspace(-100, 100, 100_001), torch.tensor([-3e37, 3e37, 0.0])))
    gate_up = torch.cat((gates, torch.linspace(-9, 9, len(gates))))[None]
    wanted = swiglu_reference(gate_up.double(), gating)
    off = (swiglu(gate_up, gating) - wanted).abs()
    # Below -4 little is left of gelu.
    assert (off <= 2e-6 * wanted.abs() + 1e-6).all()


def test_gates_of_every_size_are_exact_to_float32(every_level):
    gates = torch.cat((torch.linspace(-100, 100, 100_001), torch.tensor([-3e38, 3e38, 0.0])))
    out = swiglu(torch.cat((gates, torch.ones_like(gates)))[None])[0]
    wanted = torch.nn.functional.silu(gates.double())
    assert ((out - wanted).abs() <= 4e-7 * wanted.abs() + 1e-34).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gating", GATINGS)
def test_a_row_depends_on_itself_alone(every_level, dtype, gating):
    gate_up = make(70, 577, dtype)
    gate_up[3, 5] = torch.nan
    gate_up[4, 577 + 5] = torch.nan
    whole = swiglu(gate_up, gating)
    assert whole.isnan().nonzero().tolist() == [[3, 5], [4, 5]]
    for first, last in ((0, 1), (2, 5), (69, 70)):
        part = swiglu(gate_up[first:last], gating)
        assert torch.equal(part.nan_to_num(), whole[first:last].nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gating", GATINGS)
def test_the_quantised_form_is_half_a_step_away_at_most(every_level, dtype, shape, gating):
    gate_up = make(*shape, dtype)
    values, scales = swiglu_int8(gate_up, gating)
    wanted = rotate_rows_reference(swiglu_reference(gate_up.double(), gating))
    assert ((values.double() - wanted / scales.double()[:, None]).abs() <= 0.501).all()
