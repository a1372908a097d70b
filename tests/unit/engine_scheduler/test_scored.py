"""Answers out of a few with the probability of each, against a plain model looked at by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchradix.checkpoint.checkpoint import Checkpoint
from batchradix.engine import candidates
from batchradix.engine.core import RadixEngine
from batchradix.engine.grammar.compiler import GrammarCompiler
from batchradix.engine.rng import uniforms
from batchradix.errors import RowErrorCode
from batchradix.prompts.detokenise import IncrementalDetokenizer
from batchradix.settings import EngineSettings
from batchradix.types import (
    I64,
    Completion,
    EngineJob,
    FinishReason,
    GrammarSpec,
    RequestTable,
    RowSettings,
)

Make = Callable[..., RadixEngine]
PROMPTS = ([1, 2, 3], [1, 2, 4], [1, 2, 3, 7], [9], [1, 2, 3])
LETTERS = "abcde"


def logits_after(sim: ModuleType, prefix: Sequence[int], vocab_size: int) -> Any:
    """float32[vocab_size]: what the plain model says after a prefix."""
    seed = sim.prefix_hash(prefix) & 0xFFFFFFFF
    return np.random.default_rng(seed).normal(0, 2, vocab_size).astype(np.float32)


@dataclass
class Expected:
    probabilities: list[float]
    text: str
    joint: str
    num_tokens: int


def by_hand(
    sim: ModuleType,
    checkpoint: Checkpoint,
    prompt: Sequence[int],
    choices: Sequence[str],
    *,
    temperature: float = 0.0,
    rng_key: int = 0,
) -> Expected:
    """Each choice's product of softmaxes, and the way that a walk takes; bytes are the tokens."""
    spelt = [list(choice.encode()) for choice in choices]
    eos_ids = set(checkpoint.tokenizer.eos_ids)

    def options(begun: list[int]) -> list[int]:
        n = len(begun)
        following = {s[n] for s in spelt if s[:n] == begun and len(s) > n}
        return sorted(following | (eos_ids if begun in spelt and following else set()))

    def weights(begun: list[int]) -> Any:
        x = logits_after(sim, [*prompt, *begun], checkpoint.config.vocab_size)
        return x[options(begun)].astype(np.float64)

    probabilities = []
    for one in spelt:
        product = 1.0
        for n in range(len(one) + 1):
            allowed = options(one[:n])
            if len(allowed) > 1:
                shares = np.exp(weights(one[:n]))
                chosen = [t in eos_ids if n == len(one) else t == one[n] for t in allowed]
                product *= float(shares[chosen].sum() / shares.sum())
        probabilities.append(product)
    begun: list[int] = []
    while options(begun):
        allowed, values = options(begun), weights(begun)
        token = allowed[int(values.argmax())]
        if temperature and len(allowed) > 1:
            u = uniforms(np.array([rng_key], np.uint64), np.array([len(begun)]))[0]
            sums = np.exp((values - values.max()) / temperature).cumsum()
            token = allowed[int(np.searchsorted(sums, u * sums[-1], side="right"))]
        if token in eos_ids:
            break
        begun.append(token)
    return Expected(
        probabilities=probabilities,
        text=bytes(begun).decode(),
        joint=choices[int(np.argmax(probabilities))],
        num_tokens=len(begun) + bool(options(begun)),
    )


@pytest.fixture(scope="module")
def grammars(checkpoint: Checkpoint) -> GrammarCompiler:
    tokenizer = checkpoint.tokenizer
    return GrammarCompiler(tokenizer, checkpoint.config.vocab_size, tokenizer.eos_ids)


@pytest.fixture(scope="module")
def make_engine(
    sim: ModuleType, checkpoint: Checkpoint, grammars: GrammarCompiler
) -> Iterator[Make]:
    class PlainRunner(sim.HashRunner):  # type: ignore[misc, name-defined]
        """Checks reads as a `FakeRunner` does; logits are a function of the prefix."""

        nothing_after: tuple[int, ...] | None = None

        def collect(self, rows: I64 | None = None) -> torch.Tensor:
            values = self._values if rows is None else [self._values[int(r)] for r in rows]
            out = np.empty((len(values), self.vocab_size), dtype=np.float32)
            broken = None if self.nothing_after is None else sim.prefix_hash(self.nothing_after)
            for row, value in enumerate(values):
                rng = np.random.default_rng(value & 0xFFFFFFFF)
                out[row] = rng.normal(0, 2, self.vocab_size).astype(np.float32)
                if value == broken:
                    out[row] = np.nan
            return torch.from_numpy(out)

    made: list[RadixEngine] = []

    def make(*, nothing_after: Sequence[int] | None = None, **changes: Any) -> RadixEngine:
        values: dict[str, Any] = {
            "dtype": "float32",
            "device": "cpu",
            "attention": "torch",
            "batch_size": 8,
            "prefill_tokens": 64,
            "kv_tokens": 400,
            "prefix_cache": True,
            "num_threads": 1,
        }
        options = EngineSettings(**(values | changes))
        runner = PlainRunner(options.kv_tokens, checkpoint.config.vocab_size, 0)
        runner.nothing_after = None if nothing_after is None else tuple(nothing_after)
        detokenizer = IncrementalDetokenizer(checkpoint.tokenizer.token_bytes)
        engine = RadixEngine(checkpoint, options, detokenizer, runner=runner, grammars=grammars)
        scheduler = engine.scheduler
        runner.used = lambda: [
            *(e for node in scheduler.cache.nodes() for e in node.extents),
            *(e for row in scheduler.running for e in row.tail),
        ]
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


def job_of(
    sim: ModuleType,
    grammars: GrammarCompiler,
    choices: Sequence[str],
    *,
    opened: bool = True,
    max_tokens: int = 12,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    **how: Any,
) -> EngineJob:
    spec = GrammarSpec(kind="choices", source=json.dumps(list(choices)))
    opening = list(grammars.opening(spec))[:max_tokens] if opened else []
    job: EngineJob = sim.make_job(
        [[*prompt, *opening] for prompt in prompts],
        [max_tokens] * len(prompts),
        settings=[RowSettings(grammar=spec, **how)],
    )
    num_forced = np.full(len(prompts), len(opening), dtype=np.int32)
    requests: RequestTable = replace(job.requests, num_forced=num_forced)
    return replace(job, requests=requests)


def drain(engine: RadixEngine, job: EngineJob) -> list[Completion]:
    engine.submit(job)
    done: dict[int, Completion] = {}
    while engine.has_work:
        for completion in engine.step():
            assert completion.row not in done
            done[completion.row] = completion
        engine.scheduler.check()
    engine.check()
    return [done[row] for row in range(len(job.tokens))]


KINDS = ("ab", "abc", "abd", "b", "bcde", "c")
WAYS: dict[str, dict[str, Any]] = {
    "all at once": {},
    "one by one": {"batch_size": 1},
    "two tokens a step": {"prefill_tokens": 2},
    "no cache": {"prefix_cache": False},
    "all sampled": {"forced_text": False},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_probabilities_is_answered_as_one_without(
    way: str,
    temperature: float,
    sim: ModuleType,
    checkpoint: Checkpoint,
    grammars: GrammarCompiler,
    make_engine: Make,
) -> None:
    for opened in (True, False):
        jobs = [
            job_of(
                sim,
                grammars,
                [f"say {kind}" for kind in KINDS],
                opened=opened,
                temperature=temperature,
                probabilities=probabilities,
                max_tokens=10,
            )
            for probabilities in (False, True)
        ]
        engines = [make_engine(**WAYS[way]) for _ in jobs]
        plain, scored = (drain(e, job) for e, job in zip(engines, jobs, strict=True))
        for row, (one, other) in enumerate(zip(plain, scored, strict=True)):
            expected = by_hand(
                sim,
                checkpoint,
                PROMPTS[row],
                [f"say {kind}" for kind in KINDS],
                temperature=temperature,
                rng_key=row,
            )
            assert one.text == other.text == expected.text
            assert one.finish_reason is other.finish_reason is FinishReason.STOP
            assert one.token_ids == other.token_ids
            assert one.completion_tokens == other.completion_tokens == expected.num_tokens
            assert one.choice_logprobs is None
            assert other.choice_logprobs is not None
            found = np.exp(other.choice_logprobs)
            assert np.allclose(found, expected.probabilities, rtol=1e-9)
            assert math.isclose(found.sum(), 1)
        usages = [engine.usage for engine in engines]
        assert usages[0].completion_tokens == usages[1].completion_tokens
        assert usages[1].recomputed_tokens == 0
        num_branches = 3
        if opened and way != "all sampled":
            assert usages[1].decode_steps == (num_branches - 1) * len(PROMPTS)
            assert usages[1].forced_tokens == usages[0].forced_tokens


def test_rows_that_make_room_for_others_on_the_way_go_on_where_they_were(
    sim: ModuleType, checkpoint: Checkpoint, grammars: GrammarCompiler, make_engine: Make
) -> None:
    choices = [f"{a}bcdeabcde{b}" for a in "abc" for b in "xyz"]
    for probabilities in (True, False):
        engine = make_engine(kv_tokens=24, batch_size=5, prefill_tokens=8)
        job = job_of(sim, grammars, choices, probabilities=probabilities)
        for prompt, completion in zip(PROMPTS, drain(engine, job), strict=True):
            expected = by_hand(sim, checkpoint, prompt, choices)
            assert completion.text == expected.text
            if probabilities:
                found = np.exp(completion.choice_logprobs or ())
                assert np.allclose(found, expected.probabilities, rtol=1e-9)
        assert engine.usage.preemptions > 0
        assert engine.usage.decode_steps == (3 if probabilities else 1) * len(PROMPTS)


choice_sets = st.lists(
    st.text(LETTERS, min_size=1, max_size=5), min_size=1, max_size=9, unique=True
)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(choices=choice_sets, data=st.data())
def test_any_choices_have_the_probabilities_of_the_plain_product(
    choices: list[str],
    data: st.DataObject,
    sim: ModuleType,
    checkpoint: Checkpoint,
    grammars: GrammarCompiler,
    make_engine: Make,
) -> None:
    joint = data.draw(st.booleans())
    job = job_of(
        sim,
        grammars,
        choices,
        opened=data.draw(st.booleans()),
        max_tokens=data.draw(st.integers(6, 9)),
        probabilities=True,
        choose="joint" if joint else "walk",
    )
    engine = make_engine(
        kv_tokens=data.draw(st.integers(15, 40)),
        batch_size=data.draw(st.integers(1, 5)),
        prefill_tokens=data.draw(st.integers(1, 9)),
    )
    for row, completion in enumerate(drain(engine, job)):
        expected = by_hand(sim, checkpoint, PROMPTS[row], choices)
        assert completion.choice_logprobs is not None
        found = np.exp(completion.choice_logprobs)
        assert np.allclose(found, expected.probabilities, rtol=1e-9)
        assert math.isclose(found.sum(), 1)
        assert completion.text == (expected.joint if joint else expected.text)
        assert completion.finish_reason is FinishReason.STOP


def test_the_likeliest_whole_choice_need_not_be_the_one_that_is_walked_to(
    sim: ModuleType, checkpoint: Checkpoint, grammars: GrammarCompiler, make_engine: Make
) -> None:
    prompts = [[n] for n in range(1, 31)]
    choices = ["aa", "ab", "ac", "ad", "b"]
    texts = {}
    for choose in ("walk", "joint"):
        job = job_of(sim, grammars, choices, prompts=prompts, choose=choose)
        done = drain(make_engine(), job)
        assert all(c.choice_logprobs is None for c in done)  # not asked for
        texts[choose] = [c.text for c in done]
    expected = [by_hand(sim, checkpoint, prompt, choices) for prompt in prompts]
    assert texts["walk"] == [e.text for e in expected]
    assert texts["joint"] == [e.joint for e in expected]
    assert texts["walk"] != texts["joint"]


def test_one_choice_alone_is_certain_and_needs_no_decode_step(
    sim: ModuleType, grammars: GrammarCompiler, make_engine: Make
) -> None:
    for opened in (True, False):
        engine = make_engine()
        job = job_of(sim, grammars, ["abc"], opened=opened, probabilities=True)
        for completion in drain(engine, job):
            assert completion.text == "abc"
            assert completion.choice_logprobs == (0.0,)
        assert engine.usage.decode_steps == 0


def test_penalties_change_what_is_walked_to_and_no_probability(
    sim: ModuleType, grammars: GrammarCompiler, make_engine: Make
) -> None:
    prompts = [[*b"aaabbb", n] for n in range(100, 130)]
    found = []
    for penalty in (1.0, 20.0):
        runs = [
            drain(
                make_engine(),
                job_of(
                    sim,
                    grammars,
                    ["ab", "cb", "ca", "da"],
                    prompts=prompts,
                    repetition_penalty=penalty,
                    probabilities=probabilities,
                ),
            )
            for probabilities in (False, True)
        ]
        assert [c.text for c in runs[0]] == [c.text for c in runs[1]]
        found.append(runs[1])
    assert [c.text for c in found[0]] != [c.text for c in found[1]]
    assert [c.choice_logprobs for c in found[0]] == [c.choice_logprobs for c in found[1]]


def test_a_stop_string_cuts_a_scored_answer_too(
    sim: ModuleType, grammars: GrammarCompiler, make_engine: Make
) -> None:
    job = job_of(sim, grammars, ["abx", "cbx"], probabilities=True, stop=("b",))
    for completion in drain(make_engine(), job):
        assert completion.text in ("a", "c")
        assert completion.finish_reason is FinishReason.STOP
        assert completion.choice_logprobs is not None


def test_a_stop_string_in_what_all_choices_begin_with_leaves_nothing_to_score(
    sim: ModuleType, grammars: GrammarCompiler, make_engine: Make
) -> None:
    job = job_of(sim, grammars, ["say a", "say b"], probabilities=True, stop=("ay",))
    for completion in drain(make_engine(), job):
        assert completion.text == "s"
        assert completion.finish_reason is FinishReason.STOP
        assert completion.choice_logprobs is None


def test_a_budget_below_the_longest_choice_is_an_error_of_the_row(
    sim: ModuleType, grammars: GrammarCompiler, make_engine: Make
) -> None:
    choices = ["xxa", "xxab"]
    for max_tokens in (1, 2, 3):
        job = job_of(sim, grammars, choices, max_tokens=max_tokens, probabilities=True)
        for completion in drain(make_engine(), job):
            assert completion.error is not None
            assert completion.error.code is RowErrorCode.BAD_SETTING
            assert "the longest choice has 4 tokens" in completion.error.message
    job = job_of(sim, grammars, choices, max_tokens=4, probabilities=True)
    assert all(c.error is None for c in drain(make_engine(), job))


def test_a_row_whose_logits_break_on_the_way_is_an_error_and_the_others_are_not(
    sim: ModuleType, grammars: GrammarCompiler, make_engine: Make
) -> None:
    engine = make_engine(nothing_after=[9, *b"ab"])
    job = job_of(sim, grammars, ["aba", "abb", "c"], probabilities=True)
    done = drain(engine, job)
    assert [c.error and c.error.code for c in done] == [
        None, None, None, RowErrorCode.NON_FINITE_LOGITS, None,
    ]  # fmt: skip


def test_more_choices_than_few_logits_are_scored_from_all_of_them(
    sim: ModuleType,
    checkpoint: Checkpoint,
    grammars: GrammarCompiler,
    make_engine: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(candidates, "MAX_CANDIDATES", 0)
    done = drain(make_engine(), job_of(sim, grammars, KINDS, probabilities=True))
    for prompt, completion in zip(PROMPTS, done, strict=True):
        assert completion.choice_logprobs is not None
        expected = by_hand(sim, checkpoint, prompt, KINDS)
        assert np.allclose(np.exp(completion.choice_logprobs), expected.probabilities)


def test_a_grammar_without_choices_has_no_probabilities(sim: ModuleType, make_engine: Make) -> None:
    spec = GrammarSpec(kind="regex", source="[ab]")
    settings = [RowSettings(grammar=spec, probabilities=True)]
    done = drain(make_engine(), sim.make_job([[1], [2]], [3, 3], settings=settings))
    assert all(c.error is not None and "out of a few" in c.error.message for c in done)
