"""With ``deterministic`` a row's logits are its own to the last bit, whatever runs beside it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest

from batchradix.checkpoint.checkpoint import Checkpoint, open_checkpoint
from batchradix.engine.core import RadixEngine
from batchradix.errors import OptionError
from batchradix.types import EngineJob
from batchradix_kernels.native import library

needs_kernels = pytest.mark.skipif(library() is None, reason="the C kernels were not built")

Logits = dict[tuple[int, int], bytes]  # by the row's name and the place in its answer


def prompts_that_share(draw: random.Random, num_tokens: int) -> list[list[int]]:
    """24 prompts below 4 documents, whose lengths fall on every side of a window's edge."""

    def ids(count: int) -> list[int]:
        return [draw.randrange(20, num_tokens) for _ in range(count)]

    head = ids(21)
    documents = [head + ids(length) for length in (11, 40, 75, 130)]
    return [document + ids(draw.randrange(1, 40)) for document in documents for _ in range(6)]


def logits_of(engine: RadixEngine, job: EngineJob, names: Sequence[int]) -> Logits:
    """The logits from which every token was chosen; ``names``: by the job's rows."""
    seen: Logits = {}
    last: list[Any] = []
    collect, take = engine._runner.collect, engine._take

    def recording_collect(rows: Any = None) -> Any:
        logits = collect(rows)
        last[:] = [logits.clone()]
        return logits

    def recording_take(flight: Any, sampled: Any) -> Any:
        for row, logits in zip(flight.rows, last[0], strict=True):
            key = (names[row.row], len(row.answer))
            bits = logits.numpy().tobytes()
            assert seen.setdefault(key, bits) == bits
        return take(flight, sampled)

    engine._runner.collect, engine._take = recording_collect, recording_take
    engine.submit(job)
    while engine.has_work:
        engine.step()
    engine.check()
    engine._runner.collect, engine._take = collect, take
    return seen


def all_the_ways(
    harness: ModuleType,
    checkpoint: Checkpoint,
    prompts: list[list[int]],
    new_tokens: int,
    *,
    poison: bool = True,
    **changes: Any,
) -> dict[str, Logits]:
    """The same rows alone, together, in another order, in chunks, short of slots, unshared."""

    def run(order: Sequence[int], *, prefix_cache: bool = True, **more: Any) -> Logits:
        settings = harness.engine_settings(
            attention="auto", prefix_cache=prefix_cache, **changes, **more
        )
        engine = harness.make_engine(checkpoint, settings, poison=poison)
        job = harness.make_job(
            [prompts[i] for i in order],
            [new_tokens] * len(order),
            prefix_cache=prefix_cache,
        )
        logits = logits_of(engine, job, order)
        engine.close()
        return logits

    rows = list(range(len(prompts)))
    shuffled = random.Random(3).sample(rows, len(rows))
    longest = max(map(len, prompts)) + new_tokens
    alone: Logits = {}
    for row in rows[:: max(1, len(rows) // 6)]:
        alone |= run([row])
    return {
        "alone": alone,
        "together": run(rows),
        "some, in another order": run(shuffled[: len(rows) // 2], batch_size=5),
        "in chunks": run(shuffled, prefill_tokens=13, batch_size=7),
        "short of slots": run(rows, kv_tokens=2 * longest, batch_size=16),
        "without a cache": run(shuffled, prefix_cache=False, batch_size=3),
    }


def check_all_equal(ways: dict[str, Logits], num_rows: int, new_tokens: int) -> None:
    together = ways["together"]
    assert len({row for row, _ in together}) == num_rows
    assert len(together) > num_rows * new_tokens / 2
    for name, logits in ways.items():
        differing = [key for key, bits in logits.items() if together[key] != bits]
        assert logits, name
        assert not differing, f"{name}: {len(differing)} of {len(logits)} logits differ"


@needs_kernels
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"dtype": "bfloat16"}, id="bfloat16"),
        pytest.param({"dtype": "float32"}, id="float32"),
        pytest.param({"dtype": "bfloat16", "quantize": "int8"}, id="int8"),
    ],
)
@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_a_rows_logits_are_its_own(
    harness: ModuleType, tiny_model_folder: Any, family: str, changes: dict[str, Any]
) -> None:
    checkpoint = open_checkpoint(str(tiny_model_folder("random", family=family)))
    prompts = prompts_that_share(random.Random(5), 250)
    ways = all_the_ways(harness, checkpoint, prompts, 12, deterministic=True, **changes)
    check_all_equal(ways, len(prompts), 12)


@needs_kernels
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("gemma2", "bfloat16"),
        ("gemma3", "float32"),
        ("phi3", "bfloat16"),
        ("gpt-oss", "bfloat16"),
        ("olmo3", "bfloat16"),
        ("granite", "float32"),
    ],
)
def test_a_rows_logits_are_its_own_in_other_families(
    harness: ModuleType, tiny_model_folder: Any, family: str, dtype: str
) -> None:
    checkpoint = open_checkpoint(str(tiny_model_folder("random", family=family, seed=8)))
    prompts = prompts_that_share(random.Random(5), 250)[::2]
    ways = all_the_ways(harness, checkpoint, prompts, 6, deterministic=True, dtype=dtype)
    check_all_equal(ways, len(prompts), 6)


@needs_kernels
@pytest.mark.model
def test_a_rows_logits_are_its_own_on_a_real_model(harness: ModuleType) -> None:
    checkpoint = open_checkpoint("smollm2-135m")
    prompts = prompts_that_share(random.Random(6), 40_000)[::2]
    ways = all_the_ways(
        harness, checkpoint, prompts, 8, poison=False, deterministic=True, dtype="bfloat16"
    )
    check_all_equal(ways, len(prompts), 8)


@needs_kernels
@pytest.mark.parametrize(
    ("changes", "cause"),
    [({"attention": "torch"}, "attention is torch"), ({"dtype": "float16"}, "for dtype float16")],
)
def test_what_has_no_such_kernels_is_refused_and_named(
    harness: ModuleType, tiny_model_folder: Any, changes: dict[str, str], cause: str
) -> None:
    checkpoint = open_checkpoint(str(tiny_model_folder("random")))
    settings = harness.engine_settings(deterministic=True, **changes)
    with pytest.raises(OptionError, match=f"deterministic needs the attention .* {cause}"):
        harness.make_engine(checkpoint, settings)
