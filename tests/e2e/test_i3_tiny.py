"""Random models of every family answer as transformers does row by row, however they are run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix import pipeline
from batchradix.api import LLM
from batchradix.checkpoint.checkpoint import Checkpoint, open_checkpoint
from batchradix.config import EngineOptions, RunConfig, SamplingOptions
from batchradix.plan.order import make_plan
from batchradix.plan.tree import build_tree
from batchradix.settings import EngineSettings
from batchradix.types import Completion, Engine, TokenTable

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
WORDS = [
    "red",
    "green",
    "stone",
    "river",
    "cloud",
    "seven",
    "lamp",
    "über",
    "tea",
    "42",
    "the",
    "of",
]
MAX_TOKENS = [1, 5, 16]


def make_texts() -> list[str]:
    """Over 200 prompts: questions about documents under one instruction, prompts that begin
    others, duplicates, and short ones that share little or nothing."""
    draw = random.Random(11)

    def words(count: int) -> str:
        return " ".join(draw.choices(WORDS, k=count))

    texts = []
    for number in range(20):
        document = f"Answer from the text. Text {number % 7}: {words(draw.randrange(2, 12))}."
        questions = [f" Q: {words(draw.randrange(1, 4))}?" for _ in range(draw.randrange(6, 11))]
        texts += [document + question for question in questions]
    beginnings = [text[: draw.randrange(1, len(text))] for text in draw.sample(texts, 20)]
    duplicates = draw.sample(texts, 12) + draw.sample(beginnings, 3) * 2
    unshared = [chr(draw.randrange(33, 127)) + words(draw.randrange(3)) for _ in range(25)]
    texts += [*beginnings, *duplicates, *unshared]
    draw.shuffle(texts)
    return texts


@dataclass(frozen=True, kw_only=True)
class Case:
    """A family's checkpoint and what transformers answers to every prompt with it."""

    checkpoint: Checkpoint
    alone: Any
    oracle: list[Any]
    texts: list[str]

    @property
    def prompts(self) -> list[Sequence[int]]:
        return [row.prompt for row in self.oracle]

    @property
    def max_tokens(self) -> list[int]:
        return [row.max_tokens for row in self.oracle]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def num_distinct_tokens(self) -> int:
        tokens = TokenTable.from_rows(self.prompts)
        return build_tree(make_plan(tokens), tokens.lengths).distinct_tokens

    @property
    def smallest_pool(self) -> int:
        """KV slots of the row that needs most: its prompt and its answer but for the last."""
        return max(len(row.prompt) + row.max_tokens - 1 for row in self.oracle)


@pytest.fixture(scope="module", params=["torch", "cpu"], autouse=True)
def attention(
    request: pytest.FixtureRequest, harness: ModuleType, native: Callable[[], None]
) -> Iterator[None]:
    if request.param == "cpu":
        native()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "ATTENTION", request.param)
        yield


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tiny_model_folder: Any, i3: ModuleType) -> Case:
    folder = tiny_model_folder("random", family=request.param, prepend_bos=False)
    checkpoint = open_checkpoint(str(folder))
    alone = i3.Alone.load(folder, checkpoint.tokenizer.eos_ids)
    texts = make_texts()
    oracle = [
        alone(list(text.encode()), MAX_TOKENS[number % len(MAX_TOKENS)])
        for number, text in enumerate(texts)
    ]
    assert len(oracle) >= 200
    return Case(checkpoint=checkpoint, alone=alone, oracle=oracle, texts=texts)


def compare(
    i3: ModuleType,
    harness: ModuleType,
    case: Case,
    completions: Sequence[tuple[int, Completion]],
) -> Any:
    """The `i3.Comparison` of completions, each with the oracle row it answers."""
    answers = {}
    for number, (row, completion) in enumerate(completions):
        harness.check_completion(completion, case.max_tokens[row])
        answers[number] = i3.Answer.of(completion)
    rows = [case.oracle[row] for row, _ in completions]
    return i3.compare(rows, answers, case.checkpoint.tokenizer.eos_ids, case.alone)


def check_all(
    i3: ModuleType, harness: ModuleType, case: Case, completions: Mapping[int, Completion]
) -> None:
    """Every row of the case was answered, and rightly (I3)."""
    assert completions.keys() == set(range(len(case.oracle)))
    compare(i3, harness, case, sorted(completions.items(), key=lambda item: item[0])).check()


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="batched"),
        pytest.param({"prefill_tokens": 16}, id="prefill in chunks"),
        pytest.param({"prefill_tokens": 5, "batch_size": 3}, id="prefill in small chunks"),
    ],
)
def test_with_a_cache_each_distinct_token_is_computed_once(
    harness: ModuleType, i3: ModuleType, case: Case, changes: dict[str, Any]
) -> None:
    engine = harness.make_engine(case.checkpoint, harness.engine_settings(**changes), poison=True)
    engine.submit(harness.make_job(case.prompts, case.max_tokens))
    done = harness.drain(engine)
    check_all(i3, harness, case, {row: c for (_, row), c in done.items()})
    assert engine.usage.computed_tokens == case.num_distinct_tokens
    assert engine.usage.recomputed_tokens == 0
    assert engine.usage.preemptions == 0
    assert engine.scheduler.pool.num_used == 0
    engine.close()


def test_without_a_cache_every_prompt_token_is_computed(
    harness: ModuleType, i3: ModuleType, case: Case
) -> None:
    settings = harness.engine_settings(prefix_cache=False)
    engine = harness.make_engine(case.checkpoint, settings, poison=True)
    engine.submit(harness.make_job(case.prompts, case.max_tokens, prefix_cache=False))
    done = harness.drain(engine)
    check_all(i3, harness, case, {row: c for (_, row), c in done.items()})
    assert engine.usage.computed_tokens == case.num_prompt_tokens
    assert engine.usage.recomputed_tokens == 0
    assert engine.scheduler.pool.num_used == 0
    engine.close()


@pytest.mark.parametrize(
    ("batch_size", "prefix_cache"), [(1, True), (7, True), (64, True), (7, False)]
)
def test_a_pool_for_the_longest_row_only_changes_no_answer(
    harness: ModuleType, i3: ModuleType, case: Case, batch_size: int, prefix_cache: bool
) -> None:
    settings = harness.engine_settings(
        kv_tokens=case.smallest_pool, batch_size=batch_size, prefix_cache=prefix_cache
    )
    engine = harness.make_engine(case.checkpoint, settings, poison=True)
    engine.submit(harness.make_job(case.prompts, case.max_tokens, prefix_cache=prefix_cache))
    done = harness.drain(engine)
    check_all(i3, harness, case, {row: c for (_, row), c in done.items()})
    usage = engine.usage
    expected = case.num_distinct_tokens if prefix_cache else case.num_prompt_tokens
    assert usage.computed_tokens == expected  # what goes again is counted apart
    assert usage.peak_kv_tokens <= case.smallest_pool
    if batch_size == 1:  # the pool holds the running row's path
        assert usage.preemptions == 0
        assert usage.recomputed_tokens == 0
    elif batch_size == 64:
        assert usage.preemptions > 0
        assert usage.recomputed_tokens > 0
    assert engine.scheduler.pool.num_used == 0
    engine.close()


@pytest.mark.parametrize("kv_tokens", [20_000, 400], ids=["room for all", "evicting"])
def test_retained_prefixes_serve_the_jobs_that_follow(
    harness: ModuleType, i3: ModuleType, case: Case, kv_tokens: int
) -> None:
    settings = harness.engine_settings(kv_tokens=kv_tokens, batch_size=7)
    engine = harness.make_engine(case.checkpoint, settings, poison=True)
    rows = list(range(len(case.oracle)))
    parts = [rows[0::4], rows[1::4], rows[2::4], rows[3::4]]
    row_of: dict[tuple[int, int], int] = {}

    def submit(part: Sequence[int]) -> None:
        job = harness.make_job(
            [case.prompts[row] for row in part],
            [case.max_tokens[row] for row in part],
            retain=True,
        )
        job_id = engine.submit(job)
        row_of.update({(job_id, place): row for place, row in enumerate(part)})

    submit(parts[0])
    done = harness.drain(engine)
    submit(parts[1])
    submit(parts[2])
    for _ in range(3):
        for completion in engine.step():
            done[completion.job_id, completion.row] = completion
    submit(parts[3])  # while others run
    done |= harness.drain(engine)
    check_all(i3, harness, case, {row_of[key]: c for key, c in done.items()})
    first_pass = engine.usage.computed_tokens
    if kv_tokens == 20_000:
        assert first_pass == case.num_distinct_tokens
        # A prompt that ends where no row ended before needs its last hidden state again.
        assert engine.usage.recomputed_tokens <= len(rows)

    computed = first_pass + engine.usage.recomputed_tokens
    submit(rows)
    again = harness.drain(engine)
    check_all(i3, harness, case, {row_of[key]: c for key, c in again.items()})
    if kv_tokens == 20_000:  # all of it was found, hidden states included
        assert engine.usage.computed_tokens + engine.usage.recomputed_tokens == computed
    engine.close()


def partings(prompts: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    """Two rows that part deep inside the first one, and where; the first is long."""
    found = []
    order = sorted(range(len(prompts)), key=lambda row: tuple(prompts[row]))
    for first, second in pairwise(order):
        pairs = enumerate(zip(prompts[first], prompts[second], strict=False))
        depth = next((i for i, (a, b) in pairs if a != b), 0)
        if depth >= 60 and len(prompts[first]) >= depth + 12:
            found.append((first, second, depth))
    return found


@pytest.mark.parametrize("prefill_tokens", [9, 50])
@pytest.mark.parametrize("retain", [True, False])
def test_a_job_may_part_from_a_prompt_that_is_still_being_prefilled(
    harness: ModuleType, i3: ModuleType, case: Case, retain: bool, prefill_tokens: int
) -> None:
    settings = harness.engine_settings(prefill_tokens=prefill_tokens, kv_tokens=2000)
    engine = harness.make_engine(case.checkpoint, settings, poison=True)
    pairs = partings(case.prompts)[:6]
    assert len(pairs) == 6
    for first, second, depth in pairs:
        for num_steps in range(depth // prefill_tokens + 3):
            pair = {}
            done = {}
            for row in (first, second):
                job = harness.make_job([case.prompts[row]], [case.max_tokens[row]], retain=retain)
                pair[engine.submit(job)] = row
                for _ in range(num_steps if row == first else 0):
                    done |= {(c.job_id, c.row): c for c in engine.step()}
            done |= harness.drain(engine)
            assert {job_id for job_id, _ in done} == pair.keys()
            answered = [(pair[job_id], completion) for (job_id, _), completion in done.items()]
            assert not compare(i3, harness, case, answered).failures
            engine.scheduler.cache.evict(2000, lambda node: None)  # a cold cache again
            assert engine.scheduler.pool.num_used == 0
    engine.close()


@settings(deadline=None, max_examples=50)
@pytest.mark.parametrize("case", ["llama"], indirect=True)
@given(data=st.data())
def test_jobs_of_any_shape_in_any_room_get_the_same_answers(
    harness: ModuleType, i3: ModuleType, case: Case, data: st.DataObject
) -> None:
    engine = harness.make_engine(
        case.checkpoint,
        harness.engine_settings(
            kv_tokens=case.smallest_pool + data.draw(st.integers(0, 400)),
            batch_size=data.draw(st.integers(1, 20)),
            prefill_tokens=data.draw(st.integers(1, 80)),
            prefix_cache=data.draw(st.sampled_from([True, True, True, False])),
        ),
        poison=True,
    )
    row_of: dict[tuple[int, int], int] = {}
    done: dict[tuple[int, int], Completion] = {}
    for _ in range(data.draw(st.integers(1, 4))):
        rows = data.draw(st.lists(st.integers(0, len(case.oracle) - 1), max_size=40))
        job = harness.make_job(
            [case.prompts[row] for row in rows],
            [case.max_tokens[row] for row in rows],
            retain=data.draw(st.booleans()),
        )
        job_id = engine.submit(job)
        row_of.update({(job_id, place): row for place, row in enumerate(rows)})
        for _ in range(data.draw(st.integers(0, 30))):
            engine.check()
            for completion in engine.step():
                assert (completion.job_id, completion.row) not in done
                done[completion.job_id, completion.row] = completion
    done |= harness.drain(engine)
    assert done.keys() == row_of.keys()
    result = compare(i3, harness, case, [(row_of[key], done[key]) for key in done])
    assert not result.failures
    engine.close()


class Recorded:
    """An engine that remembers its completions by row."""

    def __init__(self, engine: Engine, completions: dict[int, Completion]) -> None:
        self._engine = engine
        self._completions = completions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> list[Completion]:
        completions = self._engine.step()
        for completion in completions:
            assert completion.row not in self._completions
            self._completions[completion.row] = completion
        return completions


@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cache", "no cache"])
def test_a_run_over_a_table_gives_every_row_its_answer(
    harness: ModuleType, i3: ModuleType, case: Case, prefix_cache: bool
) -> None:
    completions: dict[int, Completion] = {}
    engines: list[Engine] = []

    def factory(checkpoint: Checkpoint, schema: Any) -> Any:
        class Recording(pipeline.RadixEngines):
            def __call__(self, settings: EngineSettings) -> Any:
                engines.append(super().__call__(settings))
                return Recorded(engines[-1], completions)

        return Recording(checkpoint, schema)

    texts, limits = case.texts, case.max_tokens
    outcome = pipeline.run(
        RunConfig(
            input=[
                {"id": f"r{i}", "prompt": text, "max_tokens": limit}
                for i, (text, limit) in enumerate(zip(texts, limits, strict=True))
            ],
            model=str(case.checkpoint.path),
            engine=EngineOptions(dtype="float32", num_threads=1, prefix_cache=prefix_cache),
        ),
        engines=factory,
    )
    table = outcome.table
    assert table is not None
    assert table["id"].to_pylist() == [f"r{i}" for i in range(len(texts))]
    assert set(table["status"].to_pylist()) == {"ok"}
    assert table["prompt_tokens"].to_pylist() == [len(text.encode()) for text in texts]

    # Duplicates run once: each takes the answer of its leader.
    leaders: dict[tuple[str, int], int] = {}
    for row, key in enumerate(zip(texts, limits, strict=True)):
        leaders.setdefault(key, row)
    leader_of = [leaders[key] for key in zip(texts, limits, strict=True)]
    assert completions.keys() == set(leader_of)
    answered = {row: completions[leader] for row, leader in enumerate(leader_of)}
    check_all(i3, harness, case, answered)
    assert table["text"].to_pylist() == [answered[row].text for row in range(len(texts))]

    summary = outcome.summary
    assert summary.distinct_tokens == case.num_distinct_tokens
    assert summary.prompt_tokens == case.num_prompt_tokens
    expected = sum(len(case.prompts[row]) for row in completions)
    if prefix_cache:
        expected = case.num_distinct_tokens
    assert summary.usage.computed_tokens == expected
    assert summary.usage.recomputed_tokens == 0
    engines[0].check()  # type: ignore[attr-defined]


def test_an_llm_answers_lists_of_prompts_from_a_warm_cache(
    i3: ModuleType, tiny_model_folder: Any, case: Case
) -> None:
    if case.checkpoint.config.tie_embeddings:
        pytest.skip("answers of this model are not ASCII, so ids cannot be told from text")
    answers = {}
    with LLM(
        str(case.checkpoint.path), engine=EngineOptions(dtype="float32", num_threads=1)
    ) as llm:
        for max_tokens in MAX_TOKENS:
            rows = [row for row, limit in enumerate(case.max_tokens) if limit == max_tokens]
            results = llm.generate(
                [case.texts[row] for row in rows], sampling=SamplingOptions(max_tokens=max_tokens)
            )
            for row, result in zip(rows, results, strict=True):
                assert result.text is not None
                answers[row] = i3.Answer.of(result, ids=result.text.encode())
    i3.compare(case.oracle, answers, case.checkpoint.tokenizer.eos_ids, case.alone).check()
