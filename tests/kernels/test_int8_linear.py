"""Integer linear layers: C on every instruction set beside exact sums in int64."""

from __future__ import annotations

import pytest
import torch

from batchradix_kernels.int8_linear import Int8Weight, int8_linear, int8_linear_reference
from batchradix_kernels.quantise_rows import (
    QuantisedRows,
    quantise_rows,
    rotate_rows_reference,
)
from batchradix_kernels.testing import TOLERANCES, assert_matches

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [
    (1, 1, 1),
    (3, 7, 5),
    (2, 48, 33),
    (16, 64, 32),
    (35, 192, 50),
    (1, 576, 960),
    (70, 64, 16),
]


def exact(x: QuantisedRows, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    values, scales = quantise_rows(weight)
    sums = (x.values.long() @ values.long().T).double()
    out = sums * x.scales.double()[:, None] * scales.double()
    return out if bias is None else out + bias.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_it_gives_the_exact_sums(every_level, dtype, shape, has_bias):
    rows, in_size, out_size = shape
    torch.manual_seed(in_size)
    weight = torch.randn(out_size, in_size)
    bias = torch.randn(out_size).to(dtype) if has_bias else None
    # What lies behind the rows must not count, whatever it is.
    memory = torch.full((rows * in_size + 4096,), 127, dtype=torch.int8)
    x = quantise_rows(torch.randn(rows, in_size))
    memory[: rows * in_size] = x.values.flatten()
    x = QuantisedRows(memory[: rows * in_size].view(rows, in_size), x.scales)
    out = int8_linear(x, Int8Weight(weight), bias, dtype)
    assert out.dtype == dtype
    assert_matches(out, exact(x, weight, bias), TOLERANCES[dtype])


def test_it_is_the_layer_but_for_the_rounding(every_level):
    """Rows and weights are rotated alike."""
    torch.manual_seed(0)
    x, weight = torch.randn(9, 576), torch.randn(50, 576)
    out = int8_linear(quantise_rows(x), Int8Weight(weight), None, torch.float32)
    wanted = x @ weight.T
    assert (out - wanted).norm() < 0.015 * wanted.norm()


def test_the_reference_gives_the_exact_sums():
    x, weight, bias = quantise_rows(torch.randn(5, 70)), torch.randn(9, 70), torch.randn(9)
    out = int8_linear_reference(*x, *quantise_rows(weight), bias)
    assert_matches(out, exact(x, weight, bias), TOLERANCES[torch.float32])


def test_the_largest_products_do_not_saturate(every_level):
    signs = torch.tensor([1.0, -1.0])[torch.arange(40) % 2]
    rows = signs[:, None].expand(40, 1024)
    back = rotate_rows_reference(torch.eye(1024)).T  # elements of ±1/32: there and back is exact
    x, weight = quantise_rows(rows @ back), Int8Weight(rows @ back)
    assert (x.values.abs() == 127).all()
    out = int8_linear(x, weight, None, torch.float32)
    assert_matches(out, 1024 * signs[:, None] * signs, TOLERANCES[torch.float32])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_size", [48, 576])
def test_a_row_depends_on_itself_alone(every_level, dtype, in_size):
    torch.manual_seed(0)
    layer, bias = Int8Weight(torch.randn(100, in_size)), torch.randn(100).to(dtype)
    x = torch.randn(130, in_size)
    x[3, 4] = torch.nan
    whole = int8_linear(quantise_rows(x), layer, bias, dtype)
    assert whole.isnan().any(dim=1).nonzero().flatten().tolist() == [3]
    assert whole[3].isnan().all()
    for first, last in ((0, 1), (2, 5), (5, 70), (7, 40), (113, 130), (129, 130)):
        part = int8_linear(quantise_rows(x[first:last]), layer, bias, dtype)
        assert torch.equal(part.nan_to_num(), whole[first:last].nan_to_num())


def test_many_rows_are_gone_over_in_parts(every_level):
    """More activations than a part holds, and the first row of a part may not be the first."""
    torch.manual_seed(0)
    weight, x = torch.randn(33, 4096), quantise_rows(torch.randn(300, 4096))
    out = int8_linear(x, Int8Weight(weight), None, torch.float32)
    assert_matches(out, exact(x, weight, None), TOLERANCES[torch.float32])
