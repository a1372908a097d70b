"""Random models of families that differ from a Llama answer as transformers does row by row: with
latent attention, experts, windows, caps, sinks, other norms and rotations."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from batchradix.checkpoint.checkpoint import Checkpoint, open_checkpoint
from batchradix.engine.attention import registry
from batchradix.engine.attention.mla_torch import TorchMla
from batchradix.errors import OptionError
from batchradix.plan.order import make_plan
from batchradix.plan.tree import build_tree
from batchradix.types import TokenTable

LATENT = [
    "deepseek-v2",
    "deepseek-v2-lite",
    "deepseek-v3",
    "deepseek-v3-no-groups",
    "deepseek-v3-plain",
]
EXPERTS = ["mixtral", "qwen2-moe", "qwen3-moe"]
OTHERS = ["qwen3-sliding", "gemma2", "gemma3", "phi3", "gpt-oss", "smollm3", "olmo3", "granite"]
FAMILIES = [*LATENT, *EXPERTS, *OTHERS]
MAX_TOKENS = [1, 4, 9]
NUM_ROWS = 100


def make_texts() -> list[str]:
    """Questions about documents under one instruction, some longer than the yarn models' original
    context of 32 tokens by far; prompts that begin others, duplicates, and unshared ones."""
    draw = random.Random(5)

    def words(count: int) -> str:
        return " ".join(draw.choices(["tea", "river", "stone", "seven", "lamp", "of"], k=count))

    texts = []
    for number in range(8):
        document = f"Answer from text {number % 3}: {words(draw.randrange(4, 22))}."
        texts += [f"{document} Q: {words(draw.randrange(1, 4))}?" for _ in range(9)]
    texts += [text[: draw.randrange(1, len(text))] for text in draw.sample(texts, 12)]
    texts += draw.sample(texts, 6)
    texts += [chr(draw.randrange(33, 127)) + words(draw.randrange(3)) for _ in range(10)]
    draw.shuffle(texts)
    assert len(texts) == NUM_ROWS
    return texts


@dataclass(frozen=True, kw_only=True)
class Case:
    """A checkpoint and what transformers answers to every prompt with it."""

    family: str
    checkpoint: Checkpoint
    alone: Any
    oracle: list[Any]

    @property
    def prompts(self) -> list[Any]:
        return [row.prompt for row in self.oracle]

    @property
    def max_tokens(self) -> list[int]:
        return [row.max_tokens for row in self.oracle]

    @property
    def num_distinct_tokens(self) -> int:
        tokens = TokenTable.from_rows(self.prompts)
        return build_tree(make_plan(tokens), tokens.lengths).distinct_tokens

    @property
    def smallest_pool(self) -> int:
        return max(len(row.prompt) + row.max_tokens - 1 for row in self.oracle)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tiny_model_folder: Any, i3: ModuleType) -> Case:
    folder = tiny_model_folder("random", family=request.param, prepend_bos=False)
    checkpoint = open_checkpoint(str(folder))
    alone = i3.Alone.load(folder, checkpoint.tokenizer.eos_ids)
    oracle = [
        alone(list(text.encode()), MAX_TOKENS[number % len(MAX_TOKENS)])
        for number, text in enumerate(make_texts())
    ]
    return Case(family=request.param, checkpoint=checkpoint, alone=alone, oracle=oracle)


def check(harness: ModuleType, i3: ModuleType, case: Case, engine: Any, **of_job: Any) -> None:
    """Runs all rows and compares every answer with the oracle's (I3)."""
    engine.submit(harness.make_job(case.prompts, case.max_tokens, **of_job))
    answers = {}
    for (_, row), completion in harness.drain(engine).items():
        harness.check_completion(completion, case.max_tokens[row])
        answers[row] = i3.Answer.of(completion)
    i3.compare(case.oracle, answers, case.checkpoint.tokenizer.eos_ids, case.alone).check()
    engine.close()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="batched"),
        pytest.param({"prefill_tokens": 11, "batch_size": 7}, id="prefill in small chunks"),
    ],
)
def test_with_a_cache_each_distinct_token_is_computed_once(
    harness: ModuleType, i3: ModuleType, case: Case, changes: dict[str, Any]
) -> None:
    settings = harness.engine_settings(attention="auto", **changes)
    engine = harness.make_engine(case.checkpoint, settings, poison=True)
    check(harness, i3, case, engine)
    assert engine.usage.computed_tokens == case.num_distinct_tokens
    assert engine.usage.recomputed_tokens == 0


def test_without_a_cache_the_answers_are_the_same(
    harness: ModuleType, i3: ModuleType, case: Case
) -> None:
    settings = harness.engine_settings(attention="auto", prefix_cache=False)
    engine = harness.make_engine(case.checkpoint, settings, poison=True)
    check(harness, i3, case, engine, prefix_cache=False)
    assert engine.usage.computed_tokens == sum(map(len, case.prompts))


def test_a_pool_for_the_longest_row_only_changes_no_answer(
    harness: ModuleType, i3: ModuleType, case: Case
) -> None:
    settings = harness.engine_settings(attention="auto", kv_tokens=case.smallest_pool)
    engine = harness.make_engine(case.checkpoint, settings, poison=True)
    check(harness, i3, case, engine)
    assert engine.usage.preemptions > 0
    assert engine.usage.peak_kv_tokens <= case.smallest_pool


@pytest.mark.parametrize("case", LATENT, indirect=True)
@pytest.mark.parametrize("form", [None, "absorbed", "expanded"])
def test_latents_are_attended_to_in_any_form(
    harness: ModuleType,
    i3: ModuleType,
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
    form: Any,
) -> None:
    backend = partial(TorchMla, form=form, max_expanded=100 * 4 * 48)  # 100 slots at a time
    monkeypatch.setitem(registry.MLA_BACKENDS, "torch", backend)
    settings = harness.engine_settings(attention="torch", prefill_tokens=50)
    engine = harness.make_engine(case.checkpoint, settings, poison=True)
    check(harness, i3, case, engine)


@pytest.mark.parametrize("case", ["deepseek-v2"], indirect=True)
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kv_dtype": "fp8"}, "kv_dtype fp8 is not supported .* latent attention"),
        ({"deterministic": True}, "deterministic is not supported .* latent attention"),
        ({"attention": "flash"}, "attention must be auto, .* latent attention"),
        ({"attention": "flashinfer"}, "flashinfer, kernels for GPUs, cannot be used here"),
        ({"cuda_graphs": "on"}, "cuda_graphs are not supported .* latent attention"),
    ],
)
def test_what_is_not_there_for_latents_is_refused(
    harness: ModuleType, case: Case, changes: dict[str, Any], says: str
) -> None:
    settings = harness.engine_settings(**({"attention": "auto"} | changes))
    with pytest.raises(OptionError, match=says):
        harness.make_engine(case.checkpoint, settings)
