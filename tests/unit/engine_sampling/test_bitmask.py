from __future__ import annotations

import numpy as np
import pytest
import torch
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix_kernels.masked_sampling import apply_bitmask


def random_mask(rng, num_rows, vocab_size):
    words = rng.integers(-(2**31), 2**31, size=(num_rows, -(-vocab_size // 32)), dtype=np.int64)
    words &= rng.choice([0, -1, 0x0F0F0F0F], size=words.shape)
    return torch.from_numpy(words.astype(np.int32))


@pytest.mark.parametrize("vocab_size", [1, 8, 31, 32, 33, 255, 264, 1000, 4099])
def test_masking_equals_xgrammars_own(vocab_size):
    rng = np.random.default_rng(vocab_size)
    mask = random_mask(rng, 5, vocab_size)
    ours = torch.from_numpy(rng.standard_normal((5, vocab_size)).astype(np.float32))
    theirs = ours.clone()
    rows = [0, 2, 3]
    apply_bitmask(ours, mask, rows)
    xgrammar.apply_token_bitmask_inplace(theirs, mask, vocab_size=vocab_size, indices=rows)
    assert torch.equal(ours, theirs)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 200), st.integers(0, 2**32 - 1))
def test_every_bit_allows_its_own_token(vocab_size, seed):
    rng = np.random.default_rng(seed)
    mask = random_mask(rng, 2, vocab_size)
    x = torch.from_numpy(rng.standard_normal((2, vocab_size)).astype(np.float32))
    before = x.clone()
    apply_bitmask(x, mask, [0, 1])
    for r in range(2):
        for i in range(vocab_size):
            allowed = (int(mask[r, i // 32]) >> (i % 32)) & 1
            assert x[r, i] == (before[r, i] if allowed else float("-inf"))


def test_a_narrower_view_of_wider_logits_is_masked_in_place():
    logits = torch.zeros(2, 50)
    mask = torch.tensor([[1 << 3, 0]] * 2, dtype=torch.int32)
    apply_bitmask(logits[:, :40], mask, [1])
    assert torch.isfinite(logits[0]).all()
    assert torch.isfinite(logits[1]).nonzero().flatten().tolist() == [3, *range(40, 50)]
