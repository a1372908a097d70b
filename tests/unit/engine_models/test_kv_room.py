"""How large the pool may be is measured with a step of the largest kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from late_accelerator import LateAccelerator

from batchradix.checkpoint.checkpoint import Checkpoint, open_checkpoint
from batchradix.engine.model_runner import ModelRunner
from batchradix.errors import OutOfMemoryError
from batchradix.settings import EngineSettings

SETTINGS = EngineSettings(
    dtype="float32",
    device="cpu",
    attention="torch",
    batch_size=4,
    prefill_tokens=20,
    kv_tokens=1000,
    prefix_cache=True,
    num_threads=1,
    profile_kv=True,
)


class Watching(LateAccelerator):
    """Notes how many tokens the trial step has."""

    num_tokens = 0

    def peak_bytes(self, work: Callable[[], object]) -> int:
        before = len(self.events)
        peak = super().peak_bytes(work)
        assert self.events[before:].count("upload") == 2
        return peak


@pytest.fixture
def tiny_checkpoint(saved: Any) -> Checkpoint:
    return open_checkpoint(str(saved("llama")[0]))


def test_the_pool_gets_what_weights_and_the_largest_step_leave(tiny_checkpoint: Checkpoint) -> None:
    token_bytes = tiny_checkpoint.config.num_kv_elements_per_token * 4
    trial = 24 * token_bytes  # the trial's own pool, which goes again
    for free, peak, wanted in ((10**9, 0, 1000), (500 * token_bytes, trial, 450)):
        accelerator = Watching(free=free, peak=peak)
        runner = ModelRunner(tiny_checkpoint, SETTINGS, accelerator=accelerator)
        assert runner.num_slots == wanted
        runner.close()
    fewer = Watching(free=500 * token_bytes, peak=trial + 100 * token_bytes)
    runner = ModelRunner(tiny_checkpoint, SETTINGS, accelerator=fewer)
    assert runner.num_slots == 360
    runner.close()


def test_a_pool_that_was_asked_for_is_not_measured(tiny_checkpoint: Checkpoint) -> None:
    settings = replace(SETTINGS, profile_kv=False)
    runner = ModelRunner(tiny_checkpoint, settings, accelerator=Watching(free=0))
    assert runner.num_slots == 1000
    runner.close()


def test_no_room_at_all_is_said_with_what_to_lower(tiny_checkpoint: Checkpoint) -> None:
    with pytest.raises(OutOfMemoryError, match="lower prefill_tokens or batch_size"):
        ModelRunner(tiny_checkpoint, SETTINGS, accelerator=Watching(free=10**6, peak=10**7))


def test_keys_and_values_in_8_bits_get_a_byte_an_element(tiny_checkpoint: Checkpoint) -> None:
    elements = tiny_checkpoint.config.num_kv_elements_per_token
    accelerator = Watching(free=400 * elements, peak=24 * elements)
    settings = replace(SETTINGS, kv_dtype="fp8")
    runner = ModelRunner(tiny_checkpoint, settings, accelerator=accelerator)
    assert runner.num_slots == 360
    runner.close()
