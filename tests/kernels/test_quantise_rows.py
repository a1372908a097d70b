"""Rows as int8: C on every instruction set beside torch."""

from __future__ import annotations

import pytest
import torch

from batchradix_kernels.quantise_rows import (
    QuantisedRows,
    quantise_rows,
    quantise_rows_reference,
    rotate_rows_reference,
)
from batchradix_kernels.testing import TOLERANCES, assert_matches

WIDTHS = [1, 2, 3, 7, 8, 48, 64, 576, 577, 1536]


def read(rows: QuantisedRows) -> torch.Tensor:
    return rows.values.double() * rows.scales.double()[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_equals_its_reference_but_for_the_rounding_of_halves(every_level, dtype, width):
    torch.manual_seed(1)
    x = (torch.randn(3, width) * torch.tensor([1e-20, 1, 1e20])[:, None]).to(dtype)
    rotated = rotate_rows_reference(x.double())
    for values, scales in (quantise_rows(x), quantise_rows_reference(x)):
        peaks = rotated.abs().amax(dim=1)
        assert ((scales - peaks / 127).abs() <= 1e-5 * peaks / 127).all()
        steps = values.double() - rotated / scales.double()[:, None]
        assert steps.abs().max() <= 0.501
        assert (values.abs().amax(dim=1) == 127).all()


@pytest.mark.parametrize("width", WIDTHS)
def test_the_rotation_keeps_the_products_of_rows(width):
    identity = torch.eye(width, dtype=torch.float64)
    rotation = rotate_rows_reference(identity)
    assert_matches(rotation @ rotation.T, identity, TOLERANCES[torch.float32])


@pytest.mark.parametrize("width", [64, 576, 1536])
def test_a_channel_that_is_far_larger_does_not_drown_the_rest(every_level, width):
    torch.manual_seed(0)
    x, weight = torch.randn(40, width), torch.randn(30, width)
    x[:, width // 3] = 100
    weight[:, width // 3] = 0
    wanted = x.double() @ weight.double().T
    error = read(quantise_rows(x)) @ read(quantise_rows(weight)).T - wanted
    without = (x * 1.27).round() / 1.27
    assert error.norm() < 0.3 * (without.double() @ weight.double().T - wanted).norm()


@pytest.mark.parametrize("width", [64, 576, 1536])
def test_equal_elements_do_not_become_one_large_element(every_level, width):
    """As a Hadamard matrix makes of them."""
    scales = quantise_rows(torch.ones(1, width)).scales
    assert scales.item() * 127 < 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_zero_or_not_finite_keep_to_themselves(every_level, dtype):
    x = torch.ones(4, 19).to(dtype)
    x[0] = 0
    x[1, 3], x[2, 4] = torch.nan, -torch.inf
    values, scales = quantise_rows(x)
    assert (values[:3] == 0).all()
    assert scales[0] == 0
    assert scales[1:3].isnan().all()
    assert values[3].abs().max() == 127
    wanted, wanted_scales = quantise_rows_reference(x)
    assert torch.equal(values, wanted)
    assert torch.equal(scales.isnan(), wanted_scales.isnan())


@pytest.mark.parametrize("width", [48, 577])
def test_a_row_depends_on_itself_alone(every_level, width):
    x = torch.randn(70, width)
    whole = quantise_rows(x)
    for first, last in ((0, 1), (2, 5), (69, 70)):
        part = quantise_rows(x[first:last])
        assert torch.equal(part.values, whole.values[first:last])
        assert torch.equal(part.scales, whole.scales[first:last])


def test_halves_go_to_the_even_neighbour(every_level):
    wanted = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 4.5] * 2])
    back = rotate_rows_reference(torch.eye(16)).T  # elements of ±1/4: there and back is exact
    rows = quantise_rows(wanted @ back)
    assert rows.values.tolist() == [[127, 0, 2, 2, 0, -2, 126, 4] * 2]
