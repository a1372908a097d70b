"""Tokens under masks in Triton beside the reference, what lies behind a row poisoned."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from batchradix_kernels.masked_sampling import (
    apply_bitmask_reference,
    masked_argmax_reference,
    masked_sample_reference,
    triton,
)
from batchradix_kernels.masked_sampling.triton import (
    apply_bitmask_triton,
    masked_argmax_triton,
    masked_sample_triton,
)
from batchradix_kernels.testing import poison

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SOME = torch.tensor([True, False, True, True])


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "BLOCK", 64)


def make(width: int, dtype: torch.dtype, num_rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of which many are equal, and masks with every kind of word and one more than needed;
    token 0 is always allowed."""
    rng = np.random.default_rng(width)
    logits = poison(torch.empty(num_rows, width + 13, dtype=dtype))[:, :width]
    logits[:] = torch.from_numpy(rng.integers(-9, 9, size=logits.shape) / 2)
    words = rng.integers(-(2**31), 2**31, size=(num_rows, -(-width // 32) + 1), dtype=np.int64)
    words &= rng.choice([0, -1, 0x0F0F0F0F], size=words.shape)
    words[:, 0] |= 1
    return logits, torch.from_numpy(words.astype(np.int32))


def assert_same(got: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 33, 64, 150])
def test_the_largest_allowed_logit_is_found_with_its_first_token(dtype, width):
    logits, bitmask = make(width, dtype)
    for mask, masked in ((None, None), (bitmask, None), (bitmask, SOME)):
        wanted = masked_argmax_reference(logits, mask, masked)
        assert_same(masked_argmax_triton(logits, mask, masked), wanted)


@pytest.mark.parametrize("width", [1, 33, 150])
def test_masking_equals_its_reference(width):
    logits, bitmask = make(width, torch.float32)
    wanted, rows = logits.clone(), torch.tensor([0, 3, 2])
    apply_bitmask_reference(wanted, bitmask, rows)
    apply_bitmask_triton(logits, bitmask, rows)
    assert torch.equal(logits, wanted)
    behind = torch.as_strided(logits, (4, 13), (width + 13, 1), width)
    assert behind.isnan().all()


def test_rows_without_a_token_say_why():
    logits = torch.zeros(6, 100)
    logits[1, 90], logits[2, 90], logits[3], logits[4, 90] = math.nan, math.inf, -math.inf, -1.0
    bitmask = torch.full((6, 4), -1, dtype=torch.int32)
    bitmask[1:3, 2] = 0  # forbidden, and still there
    bitmask[5] = 0
    settings = [
        torch.ones(6),
        torch.full((6,), 3, dtype=torch.int32),
        torch.full((6,), 0.5, dtype=torch.float64),
        torch.zeros(6, dtype=torch.float64),
        torch.zeros(6, dtype=torch.float64),
    ]
    tokens, peaks = masked_sample_triton(logits, *settings, bitmask)
    assert_same((tokens, peaks), masked_sample_reference(logits, *settings, bitmask))
    assert peaks.isnan().tolist() == [False, True, True, False, False, False]
    assert peaks[[3, 5]].tolist() == [-math.inf, -math.inf]
    assert tokens.tolist() == [0] * 6


# temperature, top-k, top-p, min-p
CUTS = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.4, 7, 1.0, 0.0),
    (1.5, 0, 0.7, 0.0),
    (1.0, 0, 1.0, 0.1),
    (2.0, 30, 0.5, 0.05),
    (0.8, 1, 1.0, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (3.0, 100, 0.999, 0.0),
    (1.0, 10**6, 0.9, 1.0),
]


def settings_of(num_rows: int) -> list[torch.Tensor]:
    temperature, top_k, top_p, min_p = zip(*(CUTS * num_rows)[:num_rows], strict=True)
    return [
        torch.tensor(temperature, dtype=torch.float32),
        torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p, dtype=torch.float64),
        torch.tensor(min_p, dtype=torch.float64),
        torch.from_numpy(np.random.default_rng(7).random(num_rows)),
    ]


@pytest.mark.parametrize(
    ("dtype", "width"),
    [(torch.float32, 3), (torch.float32, 150), (torch.float16, 64), (torch.bfloat16, 64)],
)
def test_what_is_drawn_is_what_the_reference_draws(dtype, width):
    num_rows = len(CUTS)
    logits, bitmask = make(width, dtype, num_rows)
    settings = settings_of(num_rows)
    masked = torch.arange(num_rows) % 3 > 0
    wanted = masked_sample_reference(logits, *settings, bitmask, masked)
    assert_same(masked_sample_triton(logits, *settings, bitmask, masked), wanted)


def test_many_random_numbers_reach_every_kept_token_and_no_other():
    logits, _ = make(60, torch.float32, 1)
    uniform = torch.arange(12).double() / 12
    for temperature, top_k, top_p, min_p in ((5.0, 0, 0.6, 0.0), (5.0, 9, 1.0, 0.3)):
        settings = [
            torch.full((12,), temperature),
            torch.full((12,), top_k, dtype=torch.int32),
            torch.full((12,), top_p, dtype=torch.float64),
            torch.full((12,), min_p, dtype=torch.float64),
            uniform,
        ]
        rows = logits.expand(12, -1)
        wanted = masked_sample_reference(rows, *settings)
        assert wanted[0].unique().numel() > 4
        assert_same(masked_sample_triton(rows, *settings), wanted)


def test_blocks_as_large_as_on_a_gpu_choose_alike(monkeypatch):
    monkeypatch.undo()
    logits, bitmask = make(1500, torch.float32, 1)
    settings = [setting[5:6] for setting in settings_of(6)]
    wanted = masked_sample_reference(logits, *settings, bitmask)
    assert_same(masked_sample_triton(logits, *settings, bitmask), wanted)
