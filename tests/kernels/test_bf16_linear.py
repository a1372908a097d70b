"""bfloat16 linear layers: C on every instruction set that has them beside sums in float64."""

from __future__ import annotations

import pytest
import torch

from batchradix_kernels.bf16_linear import Bf16Weight, bf16_linear, bf16_linear_reference, serves
from batchradix_kernels.native import Level
from batchradix_kernels.testing import TOLERANCES, assert_matches

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [
    (1, 2, 1),
    (3, 8, 5),
    (2, 48, 33),
    (16, 64, 32),
    (17, 32, 31),
    (33, 96, 65),
    (35, 192, 50),
    (1, 576, 960),
    (70, 64, 16),
]


@pytest.fixture
def served(every_level: Level) -> None:
    """Skips the instruction sets without products of bfloat16."""
    if every_level < Level.AVX512_BF16:
        assert not serves(64, 64)
        pytest.skip("no products of bfloat16")


def exact(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool
) -> torch.Tensor:
    out = x.double() @ weight.double().T
    out = out if bias is None else out + bias.double()
    if not gated:
        return out
    gates, ups = out.chunk(2, dim=1)
    return gates * gates.sigmoid() * ups


def random(*size: int) -> torch.Tensor:
    return torch.randn(size).bfloat16()


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_it_gives_the_sums(dtype, shape, has_bias):
    rows, in_size, out_size = shape
    torch.manual_seed(in_size)
    weight, bias = random(out_size, in_size), random(out_size) if has_bias else None
    # What lies behind the rows must not count, whatever it is.
    memory = torch.full((rows * in_size + 4096,), torch.nan, dtype=torch.bfloat16)
    x = memory[: rows * in_size].view(rows, in_size)
    x.copy_(random(rows, in_size))
    out = bf16_linear(x, Bf16Weight(weight, bias), dtype)
    assert out.dtype == dtype
    assert_matches(out, exact(x, weight, bias, gated=False), TOLERANCES[dtype])


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("rows", [1, 16, 37])
@pytest.mark.parametrize("width", [16, 48, 1536])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gates_are_applied(rows, width, has_bias):
    torch.manual_seed(width)
    weight, bias = random(2 * width, 64) / 8, random(2 * width) if has_bias else None
    x = random(rows, 64)
    out = bf16_linear(x, Bf16Weight(weight, bias, gated=True))
    wanted = exact(x, weight, bias, gated=True)
    assert_matches(out, wanted, TOLERANCES[torch.bfloat16])
    reference = bf16_linear_reference(x, weight, bias, gated=True)
    assert_matches(reference, wanted, TOLERANCES[torch.float32])


@pytest.mark.usefixtures("served")
def test_large_and_broken_gates():
    """An infinite gate lets its output through, one far below zero holds it back."""
    weight = torch.zeros(32, 32)
    weight[:3, 0] = torch.tensor([1.0, -1.0, 0.0])
    weight[16:, 1] = 1
    x = torch.zeros(3, 32)
    x[:, 0] = torch.tensor([1e30, 100.0, torch.nan])
    x[:, 1] = 2
    out = bf16_linear(x.bfloat16(), Bf16Weight(weight.bfloat16(), gated=True)).float()
    assert out[0, 0] == pytest.approx(2e30, rel=1e-2)
    assert out[1, :3].tolist() == pytest.approx([200, 0, 0], abs=1e-30)
    assert out[2, :3].isnan().all()
    assert not out[:2].isnan().any()


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("in_size", [48, 576])
def test_a_row_depends_on_itself_alone(in_size, gated):
    torch.manual_seed(0)
    layer = Bf16Weight(random(96, in_size) / 8, random(96), gated=gated)
    x = random(130, in_size)
    x[3, 4] = torch.nan
    whole = bf16_linear(x, layer)
    assert whole.isnan().any(dim=1).nonzero().flatten().tolist() == [3]
    for first, last in ((0, 1), (2, 5), (5, 70), (7, 40), (113, 130), (129, 130)):
        part = bf16_linear(x[first:last], layer)
        assert torch.equal(part.nan_to_num(), whole[first:last].nan_to_num())


@pytest.mark.usefixtures("served")
def test_many_rows_are_gone_over_in_parts():
    torch.manual_seed(0)
    weight, x = random(33, 4096) / 64, random(300, 4096)
    out = bf16_linear(x, Bf16Weight(weight), torch.float32)
    assert_matches(out, exact(x, weight, None, gated=False), TOLERANCES[torch.float32])


@pytest.mark.usefixtures("served")
def test_no_rows_give_none():
    assert bf16_linear(random(0, 64), Bf16Weight(random(8, 64))).shape == (0, 8)


def test_what_it_serves():
    assert not serves(63, 64)  # inputs go in pairs
    assert not serves(64, 48, gated=True)  # gates and outputs go in blocks of 16
