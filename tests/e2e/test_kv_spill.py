"""A pool that is too small, with room beside it: nothing is computed twice."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from batchradix.checkpoint.checkpoint import LISTED_MODELS, Checkpoint, open_checkpoint
from batchradix.config import EngineOptions
from batchradix.engine.cache.spill import SpillSpace
from batchradix.engine.core import RadixEngine
from batchradix.errors import OptionError
from batchradix.settings import Machine, resolve_engine

ORACLE = Path(__file__).parents[1] / "oracle" / "smollm2.json.gz"
ROOM = 1 << 30


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a small and busy machine measures, the file is worth it."""
    monkeypatch.setattr(SpillSpace, "pays", lambda space, num_tokens: num_tokens > 0)


def run(harness: ModuleType, checkpoint: Checkpoint, prompts: Any, **changes: Any) -> Any:
    """Answers by row, and the counters."""
    settings = harness.engine_settings(**changes)
    engine: RadixEngine = harness.make_engine(checkpoint, settings, poison=True)
    engine.submit(harness.make_job(prompts, [40] * len(prompts)))
    done = harness.drain(engine)
    assert engine.scheduler.pool.num_used == 0
    engine.close()
    return [done[0, row].token_ids for row in range(len(prompts))], engine.usage


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek-v2"])
def test_rows_that_gave_way_go_on_where_they_were(
    harness: ModuleType, i3: ModuleType, tiny_model_folder: Any, family: str, dtype: str
) -> None:
    folder = tiny_model_folder("random", family=family, prepend_bos=False)
    checkpoint = open_checkpoint(str(folder))
    texts = [f"{'One beginning. ' * 4}{chr(97 + i) * 20}{i}" for i in range(16)]
    prompts = [list(text.encode()) for text in texts]
    small: dict[str, Any] = {"dtype": dtype, "kv_tokens": 150, "batch_size": 16}
    _, without = run(harness, checkpoint, prompts, **small)
    answers, within = run(harness, checkpoint, prompts, **small, kv_disk_bytes=ROOM)
    assert without.preemptions > 0
    assert without.recomputed_tokens > 0
    assert within.computed_tokens == without.computed_tokens
    assert within.recomputed_tokens == 0
    assert within.reloaded_tokens > 0
    if dtype == "float32":
        alone = i3.Alone.load(folder, checkpoint.tokenizer.eos_ids)
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = alone(prompt, 40).ids
            assert answer == (ids[:-1] if ids[-1] in checkpoint.tokenizer.eos_ids else ids)


def test_host_memory_is_refused_beside_host_memory_and_taken_beside_a_gpu() -> None:
    machine: dict[str, Any] = {"num_threads": 1, "free_memory_bytes": 1 << 33, "has_bf16": True}
    model = {"num_kv_elements_per_token": 10, "weight_bytes_float32": 10}
    options = EngineOptions(kv_host_memory_bytes=ROOM)
    with pytest.raises(OptionError, match="kv_host_memory_bytes is for a GPU"):
        resolve_engine(options, Machine(**machine), **model)
    gpu = Machine(**machine, device="cuda", free_device_memory_bytes=1 << 33)
    assert resolve_engine(options, gpu, **model).kv_host_memory_bytes == ROOM
    with pytest.raises(OptionError, match="exclude each other"):
        EngineOptions(kv_host_memory_bytes=ROOM, kv_disk_bytes=ROOM)


@pytest.mark.model
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("eager")
def test_a_real_model_in_a_pool_for_its_longest_row_computes_nothing_twice(
    harness: ModuleType, i3: ModuleType
) -> None:
    oracle, facts = i3.load_rows(ORACLE)
    assert facts["sha256"] == LISTED_MODELS["smollm2-135m"].sha256
    smallest = max(len(row.prompt) + row.max_tokens - 1 for row in oracle)
    checkpoint = open_checkpoint("smollm2-135m")
    settings = harness.engine_settings(
        num_threads=2, batch_size=64, prefill_tokens=128, kv_tokens=smallest, kv_disk_bytes=ROOM
    )
    engine: RadixEngine = harness.make_engine(checkpoint, settings)
    prompts = [row.prompt for row in oracle]
    engine.submit(harness.make_job(prompts, [row.max_tokens for row in oracle]))
    done = harness.drain(engine)
    answers = {row: i3.Answer.of(completion) for (_, row), completion in done.items()}

    def continue_from(prompt: Any, max_tokens: int) -> Any:
        path, eos_ids = checkpoint.path, checkpoint.tokenizer.eos_ids
        return i3.Alone.load(path.parent, eos_ids, gguf_file=path.name)(prompt, max_tokens)

    i3.compare(oracle, answers, checkpoint.tokenizer.eos_ids, continue_from).check()
    print(engine.usage)
    assert engine.usage.preemptions > 0
    assert engine.usage.reloaded_tokens > 0
    assert engine.usage.recomputed_tokens <= engine.usage.preemptions  # last tokens of prompts
    engine.close()
