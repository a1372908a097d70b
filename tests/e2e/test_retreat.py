"""Memory that runs out in a step: the step goes through in parts, and nobody can tell."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from batchradix.checkpoint.checkpoint import Checkpoint, open_checkpoint
from batchradix.engine.core import RadixEngine
from batchradix.errors import OutOfMemoryError
from batchradix_kernels.native import library

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
PROMPTS = [
    list(f"{'One beginning. ' * 9}{'ab'[i % 2] * 30}{chr(97 + i) * i}".encode()) for i in range(20)
]


@pytest.fixture
def checkpoint(tiny_model_folder: Any) -> Checkpoint:
    return open_checkpoint(str(tiny_model_folder("random", family="qwen3", prepend_bos=False)))


def limit(engine: RadixEngine, *, tokens: int = 10**6, rows: int = 10**6) -> list[int]:
    """Leaves an engine memory for so many tokens in a forward pass, which is found out at its
    end only, and for so many rows when tokens are chosen. The sizes of the passes that fit."""
    sizes: list[int] = []
    model, sampler = engine._runner._model, engine._selector._sampler  # type: ignore[union-attr]
    forward, sample = model.forward, sampler.sample

    def small_forward(batch: Any) -> Any:
        hidden = forward(batch)
        if len(batch.token_ids) > tokens:
            raise FULL
        sizes.append(len(batch.token_ids))
        return hidden

    def small_sample(logits: Any, batch: Any) -> Any:
        if len(logits) > rows:
            raise FULL
        return sample(logits, batch)

    model.forward, sampler.sample = small_forward, small_sample
    return sizes


def answers(harness: ModuleType, engine: RadixEngine) -> list[tuple[int, ...]]:
    engine.submit(harness.make_job(PROMPTS, [12] * len(PROMPTS)))
    done = harness.drain(engine)
    engine.close()
    return [done[0, row].token_ids for row in range(len(PROMPTS))]


@pytest.mark.parametrize("attention", ["torch", "auto"])
@pytest.mark.parametrize(
    "room", [{"tokens": 50}, {"tokens": 3}, {"rows": 3}, {"tokens": 7, "rows": 1}]
)
@pytest.mark.parametrize("kv_tokens", [5000, 260])
def test_a_run_short_of_memory_gives_the_same_tokens_and_counts_nothing_twice(
    harness: ModuleType,
    checkpoint: Checkpoint,
    attention: str,
    room: dict[str, int],
    kv_tokens: int,
) -> None:
    settings = harness.engine_settings(attention=attention, kv_tokens=kv_tokens, batch_size=16)
    plain = harness.make_engine(checkpoint, settings, poison=True)
    wanted = answers(harness, plain)
    engine = harness.make_engine(checkpoint, settings, poison=True)
    sizes = limit(engine, **room)
    assert answers(harness, engine) == wanted
    assert engine.usage == plain.usage
    assert max(sizes) <= room.get("tokens", 10**6)
    assert len(sizes) > engine.usage.forward_steps or "tokens" not in room
    assert len(engine.notices) == len(room)
    assert all("memory ran out" in notice and "lower --" in notice for notice in engine.notices)


@pytest.mark.skipif(library() is None, reason="the C kernels were not built")
def test_with_deterministic_the_parts_are_the_whole_to_the_last_bit(
    harness: ModuleType, checkpoint: Checkpoint
) -> None:
    settings = harness.engine_settings(attention="auto", deterministic=True, dtype="bfloat16")
    hidden = []
    for tokens in (10**6, 7):
        engine = harness.make_engine(checkpoint, settings)
        limit(engine, tokens=tokens)
        engine.submit(harness.make_job(PROMPTS, [12] * len(PROMPTS)))
        seen = []
        while engine.has_work:
            engine.step()
            seen.append(engine._runner._hidden.clone())
        hidden.append(seen)
    assert len(hidden[0]) == len(hidden[1])
    assert all(map(torch.equal, *hidden))


def test_only_one_token_too_many_ends_the_run(harness: ModuleType, checkpoint: Checkpoint) -> None:
    engine = harness.make_engine(checkpoint, harness.engine_settings())
    limit(engine, tokens=0)
    engine.submit(harness.make_job(PROMPTS, [12] * len(PROMPTS)))
    with pytest.raises(OutOfMemoryError, match="; lower prefill_tokens, batch_size or kv_tokens"):
        engine.step()
    engine.close()
