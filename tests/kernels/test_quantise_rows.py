"""Rows as int8: C on every instruction set beside torch."""

from __future__ import annotations

import pytest
import torch

from batchradix_kernels.quantise_rows import quantise_rows, quantise_rows_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (70, 577)])
def test_it_equals_its_reference_but_for_the_rounding_of_halves(every_level, dtype, shape):
    torch.manual_seed(1)
    x = (torch.randn(shape) * 10 ** torch.linspace(-20, 20, shape[0])[:, None]).to(dtype)
    for values, scales in (quantise_rows(x), quantise_rows_reference(x)):
        peaks = x.float().abs().amax(dim=1)
        assert torch.equal(scales, peaks / torch.full_like(peaks, 127.0))
        steps = values.double() - x.double() / scales.double()[:, None]
        assert steps.abs().max() <= 0.5001
        assert (values.abs().amax(dim=1) == 127).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_zero_or_not_finite_keep_to_themselves(every_level, dtype):
    x = torch.ones(4, 19).to(dtype)
    x[0] = 0
    x[1, 3], x[2, 4] = torch.nan, -torch.inf
    values, scales = quantise_rows(x)
    assert (values[:3] == 0).all()
    assert scales[0] == 0
    assert scales[1:3].isnan().all()
    assert (values[3] == 127).all()
    wanted, wanted_scales = quantise_rows_reference(x)
    assert torch.equal(values, wanted)
    assert torch.equal(scales.isnan(), wanted_scales.isnan())


def test_halves_go_to_the_even_neighbour(every_level):
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5]])
    assert quantise_rows(x).values.tolist() == [[127, 0, 2, 2, 0, -2, 126]]
