"""A real model, from its GGUF file, answers as transformers does row by row.

The oracle is committed data; `tests/oracle/make_oracle.py` made it.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from batchradix import pipeline
from batchradix.checkpoint.checkpoint import LISTED_MODELS, Checkpoint, open_checkpoint
from batchradix.config import RunConfig
from batchradix.engine.core import RadixEngine
from batchradix.plan.order import make_plan
from batchradix.plan.tree import build_tree
from batchradix.report.progress import Silent
from batchradix.types import TokenTable

pytestmark = [pytest.mark.model, pytest.mark.timeout(1200)]

MODEL = "smollm2-135m"
ORACLE = Path(__file__).parents[1] / "oracle" / "smollm2.json.gz"


@pytest.fixture(scope="module")
def oracle(i3: ModuleType) -> list[Any]:
    rows, facts = i3.load_rows(ORACLE)
    assert facts["sha256"] == LISTED_MODELS[MODEL].sha256, "the oracle is another model's"
    assert len(rows) >= 200
    return list(rows)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(MODEL)


@pytest.fixture(scope="module")
def distinct_tokens(oracle: list[Any]) -> int:
    tokens = TokenTable.from_rows([row.prompt for row in oracle])
    return build_tree(make_plan(tokens), tokens.lengths).distinct_tokens


def answer_all(
    i3: ModuleType, harness: ModuleType, checkpoint: Checkpoint, oracle: list[Any], **changes: Any
) -> RadixEngine:
    """Runs every row of the oracle and compares; the drained engine, still open."""
    settings = harness.engine_settings(num_threads=2, **changes)
    engine: RadixEngine = harness.make_engine(checkpoint, settings)
    job = harness.make_job(
        [row.prompt for row in oracle],
        [row.max_tokens for row in oracle],
        prefix_cache=settings.prefix_cache,
    )
    engine.submit(job)
    answers = {}
    for (_, row), completion in harness.drain(engine).items():
        harness.check_completion(completion, oracle[row].max_tokens)
        answers[row] = i3.Answer.of(completion)

    def continue_from(prompt: Any, max_tokens: int) -> Any:
        path = checkpoint.path
        eos_ids = checkpoint.tokenizer.eos_ids
        alone = i3.Alone.load(path.parent, eos_ids, gguf_file=path.name)
        return alone(prompt, max_tokens)

    result = i3.compare(oracle, answers, checkpoint.tokenizer.eos_ids, continue_from)
    result.check()
    print(f"{result.num_rows} rows, {result.num_steps} steps, {result.num_ties} ties")
    print(engine.usage)
    assert engine.scheduler.pool.num_used == 0
    return engine


def test_prompts_and_chats_become_the_ids_that_transformers_makes(
    i3: ModuleType, checkpoint: Checkpoint, oracle: list[Any]
) -> None:
    sources = i3.load_rows(ORACLE)[1]["sources"]
    for column in ("prompt", "messages"):
        numbers = [number for number, source in enumerate(sources) if column in source]
        config = RunConfig(input=[sources[number] for number in numbers], model=MODEL)
        parts = pipeline.open_parts(config, progress=Silent(), checkpoint=checkpoint)
        planned = pipeline.plan_rows(parts, folder=None, progress=Silent())
        assert not planned.rows.errors
        for place, number in enumerate(numbers):
            assert tuple(planned.rows.tokens[place].tolist()) == oracle[number].prompt
        expected = [oracle[number].max_tokens for number in numbers]
        assert np.array_equal(planned.rows.requests.max_tokens, expected)


def test_with_a_cache_each_distinct_token_is_computed_once(
    i3: ModuleType,
    harness: ModuleType,
    checkpoint: Checkpoint,
    oracle: list[Any],
    distinct_tokens: int,
) -> None:
    engine = answer_all(i3, harness, checkpoint, oracle, batch_size=32, prefill_tokens=512)
    assert engine.usage.computed_tokens == distinct_tokens
    assert engine.usage.recomputed_tokens == 0
    assert engine.usage.preemptions == 0
    engine.close()


def test_without_a_cache_every_prompt_token_is_computed(
    i3: ModuleType, harness: ModuleType, checkpoint: Checkpoint, oracle: list[Any]
) -> None:
    engine = answer_all(
        i3, harness, checkpoint, oracle, batch_size=32, prefill_tokens=512, prefix_cache=False
    )
    assert engine.usage.computed_tokens == sum(len(row.prompt) for row in oracle)
    assert engine.usage.recomputed_tokens == 0
    engine.close()


def test_a_pool_for_the_longest_row_only_changes_no_answer(
    i3: ModuleType,
    harness: ModuleType,
    checkpoint: Checkpoint,
    oracle: list[Any],
    distinct_tokens: int,
) -> None:
    smallest = max(len(row.prompt) + row.max_tokens - 1 for row in oracle)
    engine = answer_all(
        i3, harness, checkpoint, oracle, batch_size=64, prefill_tokens=128, kv_tokens=smallest
    )
    assert engine.usage.computed_tokens == distinct_tokens
    assert engine.usage.preemptions > 0
    assert engine.usage.recomputed_tokens > 0
    assert engine.usage.peak_kv_tokens <= smallest
    engine.close()
