"""Choosing tokens on the device gives what the host would choose."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from late_accelerator import LateAccelerator

from batchradix.engine.device_sampling import DeviceSampler
from batchradix.engine.sampling import Sampler, SamplingBatch
from batchradix.types import RowSettings

VOCAB, CHOICES = 75, 70

ROW = st.builds(
    RowSettings,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([-1, 0, 1, 5, 200]),
    top_p=st.sampled_from([1.0, 0.7, 0.05]),
    min_p=st.sampled_from([0.0, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.4]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.3]),
)


def make_batch(rows: list[RowSettings], seed: int, *, masked: bool) -> SamplingBatch:
    draw = np.random.default_rng(seed)
    bitmask = None
    is_masked = np.zeros(len(rows), dtype=np.bool_)
    if masked:
        words = draw.integers(-(2**31), 2**31, (len(rows), -(-VOCAB // 32)), dtype=np.int64)
        bitmask = torch.from_numpy(words.astype(np.int32))
        is_masked = draw.random(len(rows)) < 0.6
        bitmask[0] = 0  # a row that may have no token
    return SamplingBatch(
        settings=rows,
        rng_key=draw.integers(0, 2**63, len(rows)).astype(np.uint64),
        num_generated=draw.integers(0, 9, len(rows)),
        prompt_ids=[draw.integers(0, VOCAB, 6).astype(np.uint32) for _ in rows],
        generated_ids=[draw.integers(0, CHOICES, 4).tolist() for _ in rows],
        bitmask=bitmask,
        masked_rows=is_masked,
    )


@given(
    rows=st.lists(ROW, min_size=1, max_size=6),
    seed=st.integers(0, 10**6),
    masked=st.booleans(),
    broken=st.sampled_from([None, float("nan"), float("inf")]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(deadline=None)
def test_a_device_chooses_what_the_host_chooses(
    rows: list[RowSettings], seed: int, masked: bool, broken: float | None, dtype: Any
) -> None:
    batch = make_batch(rows, seed, masked=masked)
    torch.manual_seed(seed)
    logits = (3 * torch.randn(len(rows), VOCAB)).to(dtype)
    logits[:, CHOICES:] = 99.0  # padding of the vocabulary
    if broken is not None:
        logits[-1, 3] = broken
    before = logits.clone()
    wanted = Sampler(VOCAB, CHOICES).sample(logits.clone(), batch)
    accelerator = LateAccelerator()
    sampler = DeviceSampler(accelerator, CHOICES)
    half = len(rows) // 2
    spans = [(0, half), (half, len(rows))] if half else [(0, len(rows))]
    parts = [
        sampler.launch(logits[a:b], batch.take(np.arange(a, b, dtype=np.int64))) for a, b in spans
    ]
    chosen = sampler.download(parts, batch)
    assert "wait" not in accelerator.events
    found = chosen.get()
    assert accelerator.events.count("wait") == 1
    assert found.token_ids.tolist() == wanted.token_ids.tolist()
    assert found.non_finite.tolist() == wanted.non_finite.tolist()
    assert found.nothing_allowed.tolist() == wanted.nothing_allowed.tolist()
    good = ~found.non_finite
    assert chosen.token_ids.numpy()[good].tolist() == found.token_ids[good].tolist()
    assert torch.equal(logits, before) or broken is not None


def test_the_device_is_not_asked_to_draw_where_every_row_takes_the_likeliest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import batchradix.engine.device_sampling as module

    monkeypatch.setattr(module, "masked_sample", None)
    batch = make_batch([RowSettings(), RowSettings()], 1, masked=True)
    logits = torch.randn(2, VOCAB)
    sampler = DeviceSampler(LateAccelerator(), CHOICES)
    found = sampler.download([sampler.launch(logits, batch)], batch).get()
    assert (
        found.token_ids.tolist() == Sampler(VOCAB, CHOICES).sample(logits, batch).token_ids.tolist()
    )
