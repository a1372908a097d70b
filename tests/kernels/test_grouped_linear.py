"""Weights of few bits with scales a group: widened as they are said to be, and multiplied as the
same numbers in bfloat16, to the last bit."""

from __future__ import annotations

import pytest
import torch

from batchradix_kernels.bf16_linear import Bf16Weight, bf16_linear
from batchradix_kernels.grouped_linear import (
    GroupedWeight,
    Groups,
    grouped_linear,
    grouped_linear_reference,
    serves,
)
from batchradix_kernels.native import Level
from batchradix_kernels.testing import TOLERANCES, assert_matches


def scales(rows: int, count: int) -> torch.Tensor:
    return (torch.rand(rows, count) * 0.01).half()


def small(rows: int, count: int) -> torch.Tensor:
    return torch.randint(0, 64, (rows, count), dtype=torch.int8)


def nibbles(rows: int, size: int) -> torch.Tensor:
    return torch.randint(0, 16, (rows, size), dtype=torch.int8)


def plain_4_bits(rows: int, size: int) -> Groups:
    return Groups(codes=nibbles(rows, size), bits=4, offset=8, scales=scales(rows, size // 32))


def factored_4_bits(rows: int, size: int) -> Groups:
    return Groups(
        codes=nibbles(rows, size),
        bits=4,
        scales=scales(rows, size // 64),
        factors=small(rows, size // 32),
        minima=scales(rows, size // 64),
        minimum_factors=small(rows, size // 32),
    )


def signed_8_bits(rows: int, size: int) -> Groups:
    return Groups(
        codes=torch.randint(-128, 128, (rows, size), dtype=torch.int8),
        bits=8,
        scales=scales(rows, size // 32),
        factors=-small(rows, size // 16),
    )


KINDS = [plain_4_bits, factored_4_bits, signed_8_bits]


@pytest.fixture
def served(every_level: Level) -> None:
    if every_level < Level.AVX512_BF16:
        assert not serves([plain_4_bits(16, 32)])
        pytest.skip("no products of bfloat16")


def naive(groups: Groups) -> torch.Tensor:
    """One number after the other."""
    rows, size = groups.shape
    weight = torch.empty(rows, size)
    for n in range(rows):
        for k in range(size):
            at = k * groups.scales.shape[1] // size
            scale = float(groups.scales[n, at])
            minimum = 0.0 if groups.minima is None else float(groups.minima[n, at])
            if groups.factors is not None:
                scale *= int(groups.factors[n, k * groups.factors.shape[1] // size])
            if groups.minimum_factors is not None:
                column = k * groups.minimum_factors.shape[1] // size
                minimum *= int(groups.minimum_factors[n, column])
            weight[n, k] = scale * (int(groups.codes[n, k]) - groups.offset) - minimum
    return weight


@pytest.mark.parametrize("make", KINDS)
def test_numbers_are_widened_as_said(make):
    torch.manual_seed(0)
    groups = make(3, 128)
    assert torch.equal(groups.widen(), naive(groups))
    order = torch.tensor([2, 0])
    assert torch.equal(groups.take_rows(order).widen(), groups.widen()[order])


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 16, 33, 130])
@pytest.mark.parametrize("size", [64, 576, 4096])
def test_products_are_those_of_the_same_numbers_in_bfloat16(rows, size, dtype):
    """Layers of different kinds side by side, an odd number of blocks, in parts of the rows."""
    torch.manual_seed(size)
    parts = [make(16 * count, size) for make, count in zip(KINDS, (1, 2, 2), strict=True)]
    bias = torch.randn(80).bfloat16()
    memory = torch.full((rows * size + 4096,), torch.nan, dtype=torch.bfloat16)
    x = memory[: rows * size].view(rows, size)
    x.copy_(torch.randn(rows, size))
    weight = torch.cat([part.widen() for part in parts]).bfloat16()
    out = grouped_linear(x, GroupedWeight(parts, bias), dtype)
    assert torch.equal(out, bf16_linear(x, Bf16Weight(weight, bias), dtype))


@pytest.mark.usefixtures("served")
def test_the_reference_multiplies_what_is_rounded_to_bfloat16():
    torch.manual_seed(0)
    groups, bias, x = (
        plain_4_bits(32, 64),
        torch.randn(32).bfloat16(),
        torch.randn(5, 64).bfloat16(),
    )
    wanted = x.double() @ groups.widen().bfloat16().double().T + bias.double()
    tolerance = TOLERANCES[torch.float32]
    assert_matches(grouped_linear_reference(x, groups, bias), wanted, tolerance)
    out = grouped_linear(x, GroupedWeight([groups], bias), torch.float32)
    assert_matches(out, wanted, tolerance)


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("rows", [1, 37])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gates_are_applied(rows, has_bias):
    torch.manual_seed(rows)
    parts = [plain_4_bits(48, 64), signed_8_bits(48, 64)]
    bias = torch.randn(96).bfloat16() if has_bias else None
    x = torch.randn(rows, 64).bfloat16()
    weight = torch.cat([part.widen() for part in parts]).bfloat16()
    out = grouped_linear(x, GroupedWeight(parts, bias, gated=True))
    assert torch.equal(out, bf16_linear(x, Bf16Weight(weight, bias, gated=True)))


@pytest.mark.usefixtures("served")
def test_threads_share_the_columns():
    torch.manual_seed(0)
    layer, x = GroupedWeight([factored_4_bits(1024, 512)]), torch.randn(9, 512).bfloat16()
    before = torch.get_num_threads()
    outs = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        outs.append(grouped_linear(x, layer))
    torch.set_num_threads(before)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.usefixtures("served")
def test_4_bits_take_a_quarter_of_the_memory():
    weight = GroupedWeight([factored_4_bits(64, 512)])
    assert 64 * 512 / 2 < weight.num_bytes < 0.35 * 2 * 64 * 512


@pytest.mark.usefixtures("served")
def test_columns_and_groups_that_do_not_fit_are_not_served():
    assert serves([plain_4_bits(16, 32), signed_8_bits(32, 32)])
    assert not serves([plain_4_bits(24, 32)])
    odd = Groups(codes=nibbles(16, 32), bits=4, scales=scales(16, 8))
    assert not serves([odd])
