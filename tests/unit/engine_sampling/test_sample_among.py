"""Sampling where only some tokens have logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from batchradix.engine.sampling import Sampler
from batchradix.types import RowSettings

VOCAB = 1000
IDS = np.array([3, 40, 41, 500, 501, 502, 730, 999], dtype=np.int64)
SETTINGS = [
    RowSettings(),
    RowSettings(temperature=1.0),
    RowSettings(temperature=0.7, top_k=2),
    RowSettings(temperature=1.3, top_p=0.6),
    RowSettings(temperature=1.0, min_p=0.2),
    RowSettings(repetition_penalty=1.8),
    RowSettings(temperature=1.0, presence_penalty=1.5, frequency_penalty=0.5),
    RowSettings(temperature=2.0, repetition_penalty=0.4, top_k=5, top_p=0.9),
]


def bitmask_of(rows: list[np.ndarray]) -> torch.Tensor:
    words = np.zeros((len(rows), -(-VOCAB // 32)), dtype=np.uint32)
    for r, ids in enumerate(rows):
        np.bitwise_or.at(words[r], ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return torch.from_numpy(words.view(np.int32))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_it_samples_what_sampling_among_all_does(settings, make_batch) -> None:
    rng = np.random.default_rng(2)
    n = 64
    sampler = Sampler(VOCAB, VOCAB)
    logits = torch.from_numpy(rng.normal(0, 2, (n, VOCAB)).astype(np.float32))
    allowed = [np.sort(rng.choice(IDS, rng.integers(1, 9), replace=False)) for _ in range(n)]
    batch = make_batch(
        [settings] * n,
        rng_key=np.arange(n, dtype=np.uint64),
        num_generated=np.full(n, 5),
        prompt_ids=[rng.choice(VOCAB, 300).astype(np.uint32) for _ in range(n)],
        generated_ids=[rng.choice(IDS, 4).tolist() for _ in range(n)],
        bitmask=bitmask_of(allowed),
        masked_rows=np.ones(n, dtype=np.bool_),
    )
    few = sampler.sample_among(logits[:, torch.from_numpy(IDS)].clone(), IDS, batch)
    everything = sampler.sample(logits.clone(), batch)
    assert few.token_ids.tolist() == everything.token_ids.tolist()
    assert not few.non_finite.any()
    assert all(t in ids for t, ids in zip(few.token_ids, allowed, strict=True))
    assert len(set(few.token_ids.tolist())) > 3


def test_equal_logits_go_to_the_lowest_id(make_batch) -> None:
    batch = make_batch(
        [RowSettings()] * 2,
        bitmask=bitmask_of([IDS, IDS[3:]]),
        masked_rows=np.ones(2, dtype=np.bool_),
    )
    out = Sampler(VOCAB, VOCAB).sample_among(torch.ones(2, len(IDS)), IDS, batch)
    assert out.token_ids.tolist() == [3, 500]


def test_a_row_without_a_number_fails_alone(make_batch) -> None:
    logits = torch.zeros(3, len(IDS))
    logits[1, 4] = float("nan")
    logits[2] = -torch.inf
    batch = make_batch(
        [RowSettings(), RowSettings(temperature=1.0), RowSettings()],
        bitmask=bitmask_of([IDS] * 3),
        masked_rows=np.ones(3, dtype=np.bool_),
    )
    out = Sampler(VOCAB, VOCAB).sample_among(logits, IDS, batch)
    assert out.non_finite.tolist() == [False, True, True]
    assert out.nothing_allowed.tolist() == [False, False, True]
    assert out.token_ids.tolist() == [3, 0, 0]
