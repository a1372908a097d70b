"""Runs that begin with what earlier runs computed: the same answers, from a store on disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from batchradix import pipeline
from batchradix.checkpoint.checkpoint import Checkpoint, open_checkpoint
from batchradix.config import EngineOptions, RunConfig, SamplingOptions
from batchradix.engine.cache import store as store_module
from batchradix.engine.cache.store import BLOCK_TOKENS
from batchradix.engine.core import RadixEngine
from batchradix.plan.order import make_plan
from batchradix.plan.tree import build_tree
from batchradix.settings import EngineSettings
from batchradix.types import TokenTable
from batchradix_kernels.tree_attention.cpu import is_supported

INSTRUCTION = "Read the letter and say in one word what it is about. " * 3
EXAMPLES = "Letter: my cat is ill. Word: cats. Letter: it pours again. Word: rain. "
MAX_TOKENS = 12


def night(number: int, opening: str = INSTRUCTION + EXAMPLES) -> list[list[int]]:
    """The prompts of one night: all begin alike, and each night's rows differ."""
    endings = [f"Letter {number}{i}: {chr(97 + i) * (1 + i % 5)}. Word:" for i in range(20)]
    endings += [f"Letter {number}{i}" for i in range(4)]
    return [list((opening + ending).encode()) for ending in [*endings, ""]]


def distinct_tokens(prompts: Sequence[Sequence[int]]) -> int:
    tokens = TokenTable.from_rows(prompts)
    return build_tree(make_plan(tokens), tokens.lengths).distinct_tokens


@pytest.fixture(params=["llama", "qwen3", "deepseek-v2"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def checkpoint(family: str, tiny_model_folder: Any) -> Checkpoint:
    return open_checkpoint(str(tiny_model_folder("random", family=family, prepend_bos=False)))


def run_night(
    harness: ModuleType,
    checkpoint: Checkpoint,
    prompts: Sequence[Sequence[int]],
    store: Path | None,
    **changes: Any,
) -> tuple[list[tuple[int, ...]], RadixEngine]:
    """The answers of a fresh engine, and the engine, drained and checked (I1, I6)."""
    settings = harness.engine_settings(kv_store=store, **changes)
    engine: RadixEngine = harness.make_engine(checkpoint, settings, poison=True)
    engine.submit(harness.make_job(prompts, [MAX_TOKENS] * len(prompts)))
    done = harness.drain(engine)
    assert engine.scheduler.pool.num_used == 0
    return [done[0, row].token_ids for row in range(len(prompts))], engine


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="batched"),
        pytest.param({"prefill_tokens": 7, "batch_size": 3}, id="prefill in small chunks"),
        pytest.param({"kv_tokens": 300, "batch_size": 8}, id="a small pool"),
    ],
)
def test_greedy_float32_answers_warm_from_the_store_are_those_of_transformers(
    harness: ModuleType,
    i3: ModuleType,
    checkpoint: Checkpoint,
    tmp_path: Path,
    changes: dict[str, Any],
) -> None:
    _, cold = run_night(harness, checkpoint, night(1), tmp_path, **changes)
    assert cold.usage.computed_tokens == distinct_tokens(night(1))
    assert cold.usage.loaded_tokens == 0

    prompts = night(2)
    answers, warm = run_night(harness, checkpoint, prompts, tmp_path, **changes)
    alone = i3.Alone.load(checkpoint.path, checkpoint.tokenizer.eos_ids)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = alone(prompt, MAX_TOKENS).ids
        assert answer == (ids[:-1] if ids[-1] in checkpoint.tokenizer.eos_ids else ids)
    common = len((INSTRUCTION + EXAMPLES).encode())
    assert warm.usage.loaded_tokens == common // BLOCK_TOKENS * BLOCK_TOKENS
    assert warm.usage.computed_tokens + warm.usage.loaded_tokens == distinct_tokens(prompts)
    assert warm.notices == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_loaded_is_bit_for_bit_what_was_computed(
    harness: ModuleType, checkpoint: Checkpoint, tmp_path: Path, dtype: str
) -> None:
    run_night(harness, checkpoint, night(1), tmp_path, dtype=dtype)
    files = sorted(tmp_path.iterdir(), key=lambda path: int(path.stem.split("-")[1]))
    kept = [load_file(path) for path in files]
    assert kept[0]["k"].dtype == getattr(torch, dtype)

    settings = harness.engine_settings(kv_store=tmp_path, dtype=dtype)
    engine = harness.make_engine(checkpoint, settings)
    prompts = night(2)
    engine.submit(harness.make_job(prompts, [MAX_TOKENS] * len(prompts)))
    done = {(c.job_id, c.row): c for c in engine.step()}
    node = engine.scheduler.cache.match(np.array(prompts[0], np.uint32))[0]
    slots = np.concatenate([np.arange(s, s + n) for above in node.path() for s, n in above.extents])
    runner = engine._runner
    k, v = runner._attention.export(runner._pool, slots[: len(kept) * BLOCK_TOKENS])
    assert torch.equal(k, torch.cat([one["k"] for one in kept], dim=2))
    assert torch.equal(v, torch.cat([one["v"] for one in kept], dim=2))
    done |= harness.drain(engine)
    assert len(done) == len(prompts)
    usage = engine.usage
    assert usage.computed_tokens + usage.loaded_tokens == distinct_tokens(prompts)
    assert usage.loaded_tokens == len(kept) * BLOCK_TOKENS
    engine.close()


def test_what_torch_computed_serves_the_c_kernels_and_the_other_way_round(
    harness: ModuleType, tiny_model_folder: Any, tmp_path: Path
) -> None:
    if not is_supported(torch.float32, 32):
        pytest.skip("the C kernels were not built")
    checkpoint = open_checkpoint(str(tiny_model_folder("random", family="qwen3")))
    for first, second in (("torch", "cpu"), ("cpu", "torch")):
        store = tmp_path / first
        run_night(harness, checkpoint, night(1), store, attention=first)
        cold, _ = run_night(harness, checkpoint, night(2), None, attention=second)
        warm, engine = run_night(harness, checkpoint, night(2), store, attention=second)
        assert warm == cold
        assert engine.usage.loaded_tokens > 0


def test_another_dtype_or_model_begins_cold_and_both_find_their_own(
    harness: ModuleType, tiny_model_folder: Any, tmp_path: Path
) -> None:
    checkpoints = [
        open_checkpoint(str(tiny_model_folder("random", seed=seed, prepend_bos=False)))
        for seed in (7, 8)
    ]
    runs = [(model, dtype) for model in checkpoints for dtype in ("float32", "bfloat16")]
    for loaded in (False, True):
        for model, dtype in runs:
            _, engine = run_night(harness, model, night(int(loaded)), tmp_path, dtype=dtype)
            assert (engine.usage.loaded_tokens > 0) == loaded


def test_a_setting_counts_unless_it_is_known_to_decide_nothing(tmp_path: Path) -> None:
    """A new setting of the engine keeps stores apart until someone says that it need not."""
    names = {field.name for field in dataclasses.fields(EngineSettings)}
    assert names >= store_module._NEUTRAL_SETTINGS
    assert "dtype" not in store_module._NEUTRAL_SETTINGS


def test_a_run_says_what_it_loaded_and_which_blocks_it_ignored(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    def run(number: int) -> Any:
        config = RunConfig(
            input=[{"prompt": bytes(prompt).decode()} for prompt in night(number)],
            model=str(checkpoint.path),
            sampling=SamplingOptions(max_tokens=MAX_TOKENS),
            engine=EngineOptions(dtype="float32", num_threads=1, kv_store=str(tmp_path)),
        )
        return pipeline.run(config)

    assert run(1).summary.to_json()["loaded_tokens"] == 0
    first = next(path for path in tmp_path.iterdir() if f"-{BLOCK_TOKENS}." in path.name)
    warm = run(2)
    summary = warm.summary.to_json()
    assert summary["loaded_tokens"] > 0
    assert summary["computed_tokens"] + summary["loaded_tokens"] == summary["distinct_tokens"]
    assert any("from the store" in text for _, text in warm.summary.table())
    assert summary["warnings"] == []

    first.write_bytes(first.read_bytes()[:-1])
    damaged = run(2)
    summary = damaged.summary.to_json()
    assert summary["loaded_tokens"] == 0
    assert summary["computed_tokens"] == summary["distinct_tokens"]
    assert len(summary["warnings"]) == 1
    assert "damaged" in summary["warnings"][0]
    for column in ("text", "cached_tokens"):
        assert damaged.table[column].equals(warm.table[column])
