"""Tokens under masks: C on every instruction set, numpy and the engine's sampler beside torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from batchradix.engine.rng import uniforms
from batchradix.engine.sampling import Sampler, SamplingBatch
from batchradix.types import RowSettings
from batchradix_kernels.masked_sampling import (
    masked_argmax,
    masked_argmax_reference,
    masked_sample,
)
from batchradix_kernels.masked_sampling.bitmask import masked_argmax_cpu
from batchradix_kernels.testing import poison

DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [1, 7, 31, 32, 33, 264, 512, 515, 1100, 2048]


def make(width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Seven rows of logits with NaN behind each, many of them equal, and masks for them."""
    rng = np.random.default_rng(width)
    logits = poison(torch.empty(7, width + 13, dtype=dtype))[:, :width]
    logits[:] = torch.from_numpy(rng.integers(-9, 9, size=(7, width)) / 2)
    words = rng.integers(-(2**31), 2**31, size=(7, -(-width // 32) + 1), dtype=np.int64)
    words &= rng.choice([0, -1, 0x0F0F0F0F], size=words.shape)
    return logits, torch.from_numpy(words.astype(np.int32))


def assert_same(got: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_largest_allowed_logit_is_found_with_its_first_token(every_level, dtype, width):
    logits, bitmask = make(width, dtype)
    some = torch.tensor([True, False, True, True, False, True, True])
    for mask, masked in ((None, None), (bitmask, None), (bitmask, some), (bitmask, ~some)):
        wanted = masked_argmax_reference(logits, mask, masked)
        assert_same(masked_argmax(logits, mask, masked), wanted)
        assert_same(masked_argmax_cpu(logits, mask, masked), wanted)
    allowed = masked_argmax(logits, bitmask)[0]
    for row, token in enumerate(allowed.tolist()):
        word = int(bitmask[row, token // 32])
        assert token == 0 or (word >> (token % 32)) & 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, 5, 130, 299])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_with_nan_or_infinity_says_so_even_where_it_is_forbidden(
    every_level, dtype, place, value
):
    logits = torch.randn(3, 300).to(dtype)
    logits[1, place] = value
    only_fourth = torch.zeros(3, 10, dtype=torch.int32)
    only_fourth[:, 0] = 1 << 4
    for mask in (None, only_fourth):
        tokens, peaks = masked_argmax(logits, mask)
        assert peaks.isnan().tolist() == [False, True, False]
        assert tokens[1] == 0
        assert_same(masked_argmax_cpu(logits, mask, None), (tokens, peaks))


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_nothing_is_left_the_largest_logit_is_minus_infinity(every_level, dtype):
    logits = torch.zeros(3, 70, dtype=dtype)
    logits[2] = -math.inf
    mask = torch.tensor([[0, 0, 0], [0, 0, 1 << 5], [-1, -1, -1]], dtype=torch.int32)
    tokens, peaks = masked_argmax(logits, mask)
    assert tokens.tolist() == [0, 69, 0]
    assert peaks.tolist() == [-math.inf, 0.0, -math.inf]
    assert_same(masked_argmax_cpu(logits, mask, None), (tokens, peaks))


def test_both_zeros_are_equal(every_level):
    logits = torch.full((1, 600), -1.0)
    logits[0, 530], logits[0, 540] = -0.0, 0.0
    assert masked_argmax(logits)[0].tolist() == [530]


def test_the_last_token_of_a_whole_vocabulary_can_be_taken(every_level):
    logits = torch.zeros(1, 64)
    logits[0, 63] = 1.0
    mask = torch.tensor([[0, -(2**31)]], dtype=torch.int32)
    assert masked_argmax(logits, mask)[0].tolist() == [63]


SETTINGS = [
    RowSettings(),
    RowSettings(temperature=1.0),
    RowSettings(temperature=0.4, top_k=7),
    RowSettings(temperature=1.5, top_p=0.7),
    RowSettings(temperature=1.0, min_p=0.1),
    RowSettings(temperature=2.0, top_k=30, top_p=0.5, min_p=0.05),
    RowSettings(temperature=0.8, top_k=1),
    RowSettings(temperature=1.0, top_p=1e-6),
    RowSettings(temperature=3.0, top_k=400, top_p=0.999),
]


@pytest.mark.parametrize("width", [5, 33, 300])
@pytest.mark.parametrize("has_mask", [False, True])
def test_the_reference_chooses_what_the_engine_chooses(width, has_mask):
    settings = SETTINGS * 6
    num_rows = len(settings)
    rng = np.random.default_rng(width)
    logits = torch.from_numpy(rng.integers(-12, 12, size=(num_rows, width)) / 4).float()
    keys, positions = np.arange(num_rows, dtype=np.uint64), np.arange(num_rows)
    bitmask, masked = None, rng.random(num_rows) < 0.7
    if has_mask:
        words = rng.integers(-(2**31), 2**31, size=(num_rows, -(-width // 32)), dtype=np.int64)
        bitmask = torch.from_numpy((words | 1).astype(np.int32))
    batch = SamplingBatch(
        settings=settings,
        rng_key=keys,
        num_generated=positions,
        prompt_ids=[np.zeros(0, dtype=np.uint32)] * num_rows,
        generated_ids=[[]] * num_rows,
        bitmask=bitmask,
        masked_rows=masked & has_mask,
    )
    tokens, peaks = masked_sample(
        logits,
        torch.tensor([s.temperature for s in settings]),
        torch.tensor([s.top_k for s in settings], dtype=torch.int32),
        torch.tensor([s.top_p for s in settings], dtype=torch.float64),
        torch.tensor([s.min_p for s in settings], dtype=torch.float64),
        torch.from_numpy(uniforms(keys, positions)),
        bitmask,
        torch.from_numpy(masked) if has_mask else None,
    )
    assert tokens.tolist() == Sampler(width, width).sample(logits, batch).token_ids.tolist()
    assert peaks.isfinite().all()
