"""Keys and values in 8 bits: the answers are those of a model whose keys and values are rounded so,
and of nothing else."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from batchradix import pipeline
from batchradix.checkpoint.checkpoint import Checkpoint, open_checkpoint
from batchradix.config import EngineOptions, OutputOptions, RunConfig, SamplingOptions
from batchradix.engine.attention.torch_backend import TorchAttention
from batchradix.engine.cache.spill import SpillSpace
from batchradix.errors import OptionError, OutputMismatchError

SHARED = "Answer from the text: seven red stones lie by the river. " * 2
TEXTS = [*(f"{SHARED}Q{number}: where?" for number in range(12)), SHARED, "tea", "x"]
MAX_TOKENS = 24


def in_8_bits(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


def run(harness: ModuleType, checkpoint: Checkpoint, **changes: Any) -> Any:
    """Answers by row, and the counters; free slots are NaN all the while."""
    settings = harness.engine_settings(kv_dtype="fp8", **changes)
    engine = harness.make_engine(checkpoint, settings, poison=True)
    assert isinstance(engine._runner._attention, TorchAttention)
    assert engine._runner._pool.dtype == torch.float8_e4m3fn
    prompts = [list(text.encode()) for text in TEXTS]
    engine.submit(harness.make_job(prompts, [MAX_TOKENS] * len(prompts)))
    answers = {row: done for (_, row), done in harness.drain(engine).items()}
    engine.close()
    return answers, engine.usage


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_answers_are_those_of_a_model_with_rounded_keys_and_values(
    harness: ModuleType,
    i3: ModuleType,
    tiny_model_folder: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
) -> None:
    folder = tiny_model_folder("random", family=family, prepend_bos=False)
    checkpoint = open_checkpoint(str(folder))
    eos_ids = checkpoint.tokenizer.eos_ids
    alone = i3.Alone.load(folder, eos_ids, rounding=in_8_bits)
    oracle = [alone(list(text.encode()), MAX_TOKENS) for text in TEXTS]
    exact = i3.Alone.load(folder, eos_ids)
    assert any(exact(row.prompt, MAX_TOKENS).ids != row.ids for row in oracle)
    monkeypatch.setattr(SpillSpace, "pays", lambda space, num_tokens: num_tokens > 0)
    ways: dict[str, dict[str, Any]] = {
        "at once": {},
        "in chunks": {"prefill_tokens": 24, "batch_size": 3},
        "giving way": {"kv_tokens": 220, "batch_size": 8},
        "on disk": {"kv_tokens": 220, "batch_size": 8, "kv_disk_bytes": 1 << 30},
        "into the store": {"kv_store": tmp_path},
        "from the store": {"kv_store": tmp_path},
    }
    usages = {}
    for way, changes in ways.items():
        answers, usages[way] = run(harness, checkpoint, **changes)
        given = {row: i3.Answer.of(done) for row, done in answers.items()}
        comparison = i3.compare(oracle, given, eos_ids, alone)
        assert not comparison.failures, way
        comparison.check()
    assert usages["giving way"].preemptions > 0
    assert usages["on disk"].reloaded_tokens > 0
    assert usages["from the store"].loaded_tokens > 0
    settings = harness.engine_settings(kv_store=tmp_path)
    engine = harness.make_engine(checkpoint, settings)
    engine.submit(harness.make_job([row.prompt for row in oracle], [1] * len(oracle)))
    harness.drain(engine)
    assert engine.usage.loaded_tokens == 0  # the other dtype's are not taken for it
    engine.close()


@pytest.mark.parametrize("family", ["gemma2", "phi3", "gpt-oss"])
def test_windows_caps_and_sinks_are_over_rounded_keys_and_values(
    harness: ModuleType, i3: ModuleType, tiny_model_folder: Any, tmp_path: Path, family: str
) -> None:
    folder = tiny_model_folder("random", family=family, prepend_bos=False)
    checkpoint = open_checkpoint(str(folder))
    alone = i3.Alone.load(folder, checkpoint.tokenizer.eos_ids, rounding=in_8_bits)
    oracle = [alone(list(text.encode()), MAX_TOKENS) for text in TEXTS]
    ways: list[dict[str, Any]] = [{}, {"kv_store": tmp_path}, {"kv_store": tmp_path}]
    for changes in ways:
        answers, usage = run(harness, checkpoint, prefill_tokens=24, **changes)
        given = {row: i3.Answer.of(done) for row, done in answers.items()}
        i3.compare(oracle, given, checkpoint.tokenizer.eos_ids, alone).check()
    assert usage.loaded_tokens > 0


def config(folder: Path, output: Path | None = None, **engine: Any) -> RunConfig:
    return RunConfig(
        input=[{"prompt": text} for text in TEXTS],
        model=str(folder),
        sampling=SamplingOptions(max_tokens=2),
        engine=EngineOptions(num_threads=1, **engine),
        output=OutputOptions(path=output),
    )


def test_the_summary_says_that_a_token_takes_half(tiny_model_folder: Any) -> None:
    folder = tiny_model_folder("random")
    found = {}
    for dtype, kv_dtype in [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "fp8")]:
        summary = pipeline.run(config(folder, dtype=dtype, kv_dtype=kv_dtype)).summary
        found[dtype, kv_dtype] = summary.to_json()["kv_token_bytes"]
        assert f"of {found[dtype, kv_dtype]:,} bytes" in dict(summary.table())["memory"]
    elements = open_checkpoint(str(folder)).config.num_kv_elements_per_token
    assert list(found.values()) == [4 * elements, 2 * elements, elements]
    assert summary.dtype == "bfloat16 with fp8 keys and values"


def test_a_job_goes_on_with_the_same_rounding_alone(tiny_model_folder: Any, tmp_path: Path) -> None:
    folder, output = tiny_model_folder("random"), tmp_path / "out.parquet"
    pipeline.run(config(folder, output, kv_dtype="fp8"))
    with pytest.raises(OutputMismatchError, match="kv_dtype"):
        pipeline.run(config(folder, output))


def test_what_knows_no_8_bits_is_refused_before_anything_is_read() -> None:
    with pytest.raises(OptionError, match="deterministic needs the attention kernels in C"):
        EngineOptions(kv_dtype="fp8", deterministic=True)
    with pytest.raises(OptionError, match="leave attention out, or give torch"):
        EngineOptions(kv_dtype="fp8", attention="cpu")
    with pytest.raises(OptionError, match="kv_dtype must be auto or fp8, not 'int8'"):
        EngineOptions(kv_dtype="int8")  # type: ignore[arg-type]
