"""The engine as the pipeline sees it: one completion a row, errors as completions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from batchradix.checkpoint.checkpoint import Checkpoint
from batchradix.engine.core import RadixEngine
from batchradix.errors import RowErrorCode
from batchradix.prompts.detokenise import IncrementalDetokenizer
from batchradix.settings import EngineSettings
from batchradix.types import Completion, FinishReason, GrammarSpec, RowSettings, StepStats


def engine_settings(**changes: Any) -> EngineSettings:
    values: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "attention": "torch",
        "batch_size": 4,
        "prefill_tokens": 16,
        "kv_tokens": 300,
        "prefix_cache": True,
        "num_threads": 1,
    }
    return EngineSettings(**(values | changes))


MakeEngine = Callable[..., tuple[RadixEngine, Any]]


@pytest.fixture
def make_engine(sim: ModuleType, checkpoint: Checkpoint) -> Iterator[MakeEngine]:
    """Engines over a runner that checks reads and whose steps take a second; each is checked for
    lost slots at the end."""
    made: list[RadixEngine] = []

    def make(num_choices: int = 200, **changes: Any) -> tuple[RadixEngine, Any]:
        settings = engine_settings(**changes)
        runner = sim.HashRunner(settings.kv_tokens, checkpoint.config.vocab_size, num_choices)
        detokenizer = IncrementalDetokenizer(checkpoint.tokenizer.token_bytes)
        engine = RadixEngine(
            checkpoint,
            settings,
            detokenizer,
            runner=runner,
            clock=lambda: float(engine.usage.forward_steps),
        )
        cache, running = engine.scheduler.cache, engine.scheduler
        runner.used = lambda: [
            *(e for node in cache.nodes() for e in node.extents),
            *(e for row in running.running for e in row.tail),
        ]
        made.append(engine)
        return engine, runner

    yield make
    for engine in made:
        engine.check()
        engine.close()


def drain(engine: RadixEngine) -> list[Completion]:
    completions = []
    while engine.has_work:
        completions += engine.step()
    engine.check()
    return completions


def test_every_row_gets_one_completion_with_its_tokens_text_and_reason(
    sim: ModuleType, make_engine: MakeEngine
) -> None:
    engine, _ = make_engine()
    rows = [[65, 66, 67, i % 7] for i in range(20)]
    job_id = engine.submit(sim.make_job(rows, [9] * 20))
    completions = drain(engine)
    assert Counter((c.job_id, c.row) for c in completions) == Counter(
        (job_id, i) for i in range(20)
    )
    eos_ids = set(sim.EOS_IDS)
    for c in completions:
        assert c.error is None
        expected: list[int] = []
        while len(expected) < 9:
            token = sim.next_token(sim.prefix_hash([*rows[c.row], *expected]), 200)
            if token in eos_ids:
                assert c.finish_reason is FinishReason.STOP
                assert c.completion_tokens == len(expected) + 1
                break
            expected.append(token)
        else:
            assert c.finish_reason is FinishReason.LENGTH
            assert c.completion_tokens == 9
        assert c.token_ids == tuple(expected)
        assert c.text == bytes(expected).decode("utf-8", "replace")
    assert engine.usage.completion_tokens == sum(c.completion_tokens for c in completions)
    # The first token of a row comes from its prompt.
    assert engine.usage.decode_steps == engine.usage.completion_tokens - 20
    assert engine.usage.forced_tokens == 0
    assert engine.usage.computed_tokens == 3 + 7


def test_a_row_with_nan_logits_fails_alone(sim: ModuleType, make_engine: MakeEngine) -> None:
    engine, runner = make_engine()
    rows = [[65, i] for i in range(12)]
    first = {i: sim.next_token(sim.prefix_hash(row), 200) for i, row in enumerate(rows)}
    runner.broken = {first[3]}
    engine.submit(sim.make_job(rows, [1] * 12))
    completions = {c.row: c for c in drain(engine)}
    assert len(completions) == 12
    for row, c in completions.items():
        if first[row] == first[3]:
            assert c.finish_reason is FinishReason.ERROR
            assert c.error is not None
            assert c.error.code is RowErrorCode.NON_FINITE_LOGITS
        else:
            assert c.error is None


def test_a_row_that_takes_longer_than_one_may_fails_alone_and_frees_its_slots(
    sim: ModuleType, make_engine: MakeEngine
) -> None:
    """An answer of n tokens takes n - 1 seconds from its first one on."""
    plain, _ = make_engine()
    rows = [[65, 66, i] for i in range(16)]
    budgets = [3 if i % 3 else 40 for i in range(16)]
    plain.submit(sim.make_job(rows, budgets))
    alone = {c.row: c for c in drain(plain)}
    assert 0 < sum(c.completion_tokens > 6 for c in alone.values()) < 16
    engine, _ = make_engine(row_timeout_s=5)
    engine.submit(sim.make_job(rows, budgets))
    done = {}
    while engine.has_work:
        done |= {c.row: c for c in engine.step()}
        engine.check()
    assert done.keys() == alone.keys()
    for row, c in done.items():
        if alone[row].completion_tokens <= 6:
            assert c == alone[row]
            continue
        assert c.finish_reason is FinishReason.ERROR
        assert c.error is not None
        assert c.error.code is RowErrorCode.ROW_TIMEOUT
        assert "--row-timeout" in c.error.message
        assert c.token_ids == alone[row].token_ids[:7]


@pytest.mark.parametrize("changes", [{}, {"kv_tokens": 60}, {"prefix_cache": False}])
def test_answers_are_the_same_when_tokens_are_read_a_step_late(
    sim: ModuleType, make_engine: MakeEngine, changes: dict[str, Any]
) -> None:
    """With prompts in one step and in several, answers of every length, forced and broken ones."""
    spec = GrammarSpec(kind="json_schema", source='{"enum": ["yes", "no", "yellow"]}')
    choices = GrammarSpec(kind="choices", source='["yes", "yellow", "no", "none"]')
    settings = [
        RowSettings(),
        RowSettings(grammar=spec),
        RowSettings(grammar=choices, probabilities=True),
    ]
    rows = [[65 + i // 6, *range(70, 70 + i % 23), i] for i in range(60)]
    done, usages = [], []
    for overlap in (False, True):
        engine, runner = make_engine(overlap=overlap, **changes)
        runner.broken = {sim.next_token(sim.prefix_hash(rows[30]), 200)}
        settings_id = [i % 7 % 3 for i in range(60)]
        job = sim.make_job(
            rows, [i % 31 + 1 for i in range(60)], settings=settings, settings_id=settings_id
        )
        engine.submit(job)
        completions = []
        while engine.has_work:
            completions += engine.step()
            assert len({c.row for c in completions}) == len(completions)
            engine.scheduler.check()
        engine.check()
        done.append({c.row: c for c in completions})
        usages.append(engine.usage)
    assert done[0] == done[1]
    assert len(done[0]) == 60
    assert any(c.error is not None for c in done[0].values())
    plain, late = usages
    assert late.decode_steps == plain.decode_steps
    assert late.completion_tokens == plain.completion_tokens
    if not plain.preemptions:
        assert late.computed_tokens == plain.computed_tokens
    assert (plain.preemptions > 0) == ("kv_tokens" in changes)


def test_rows_that_time_out_while_a_token_is_chosen_leave_nothing_behind(
    sim: ModuleType, make_engine: MakeEngine
) -> None:
    engine, _ = make_engine(row_timeout_s=5, overlap=True)
    engine.submit(sim.make_job([[65, 66, i] for i in range(16)], [40] * 16))
    done = {}
    while engine.has_work:
        done |= {c.row: c for c in engine.step()}
        engine.check()
    codes = {None if c.error is None else c.error.code for c in done.values()}
    assert codes == {None, RowErrorCode.ROW_TIMEOUT}
    assert len(done) == 16


def test_waiting_for_a_place_a_prompt_or_slots_is_no_time_of_a_row(
    sim: ModuleType, make_engine: MakeEngine
) -> None:
    """Prompts of many steps, a batch of two and a pool in which rows are preempted."""
    rows = [[i, *range(70, 110)] for i in range(1, 9)]
    for changes in ({"batch_size": 2}, {"batch_size": 8, "kv_tokens": 150}):
        engine, _ = make_engine(row_timeout_s=19.5, **changes)
        engine.submit(sim.make_job(rows, [20] * 8))
        assert [c.error for c in drain(engine)] == [None] * 8
        assert engine.usage.forward_steps > 40
    assert engine.usage.preemptions > 0


def test_rows_that_time_out_while_they_guess_or_score_leave_nothing_behind(
    sim: ModuleType, make_engine: MakeEngine
) -> None:
    spec = GrammarSpec(kind="choices", source='["yes", "yellow", "no", "none", "nobody"]')
    settings = [RowSettings(), RowSettings(grammar=spec, probabilities=True)]
    engine, _ = make_engine(num_choices=3, row_timeout_s=0.5, speculate=4)
    rows = [[65, 66, 65, 66, i] for i in range(10)]
    job = sim.make_job(rows, [30] * 10, settings=settings, settings_id=[i % 2 for i in range(10)])
    engine.submit(job)
    errors = {c.row: c.error for c in drain(engine) if c.error is not None}
    assert {error.code for error in errors.values()} == {RowErrorCode.ROW_TIMEOUT}
    assert {row % 2 for row in errors} == {0, 1}


def test_grammars_hold_for_their_rows_only(sim: ModuleType, make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    spec = GrammarSpec(kind="json_schema", source='{"enum": ["yes", "no"]}')
    rows = [[65, i] for i in range(10)]
    job = sim.make_job(
        rows,
        [12] * 10,
        settings=[RowSettings(), RowSettings(grammar=spec)],
        settings_id=[i % 2 for i in range(10)],
    )
    engine.submit(job)
    for c in drain(engine):
        assert (c.text in ('"yes"', '"no"')) == (c.row % 2 == 1)


def test_a_grammar_that_cannot_be_compiled_is_the_error_of_its_rows(
    sim: ModuleType, make_engine: MakeEngine
) -> None:
    engine, _ = make_engine()
    spec = GrammarSpec(kind="json_schema", source='{"type": "no such type"}')
    job = sim.make_job(
        [[1, 2], [1, 2, 3]],
        [3, 3],
        settings=[RowSettings(), RowSettings(grammar=spec)],
        settings_id=[0, 1],
    )
    engine.submit(job)
    completions = {c.row: c for c in drain(engine)}
    assert completions[0].error is None
    error = completions[1].error
    assert error is not None
    assert error.code is RowErrorCode.ENGINE_FAILED


def test_a_row_that_never_fits_is_refused_with_the_remedy(
    sim: ModuleType, make_engine: MakeEngine
) -> None:
    engine, _ = make_engine(kv_tokens=20)
    engine.submit(sim.make_job([[1, 2, 3], list(range(1, 30))], [4, 4]))
    completions = {c.row: c for c in drain(engine)}
    assert completions[0].error is None
    error = completions[1].error
    assert error is not None
    assert error.code is RowErrorCode.KV_POOL_TOO_SMALL
    assert completions[1].completion_tokens == 0


def test_jobs_queue_and_share_the_cache(sim: ModuleType, make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    rows = [[1, 2, 3, 4, 5, i] for i in range(6)]
    first = engine.submit(sim.make_job(rows, [2] * 6, retain=True))
    second = engine.submit(sim.make_job(rows, [2] * 6, retain=True))
    completions = drain(engine)
    answers = {(c.job_id, c.row): c.token_ids for c in completions}
    assert len(completions) == 12
    assert all(answers[first, i] == answers[second, i] for i in range(6))
    assert engine.usage.computed_tokens == 11
    assert engine.usage.cached_tokens == 72 - 11


def test_sampled_answers_do_not_depend_on_pool_or_batch(
    sim: ModuleType, make_engine: MakeEngine
) -> None:
    rows = [[1, 2, i] for i in range(10)]
    hot = RowSettings(temperature=3.0)
    answers = []
    for changes in ({}, {"kv_tokens": 44, "batch_size": 9}, {"prefix_cache": False}):
        engine, _ = make_engine(**changes)
        engine.submit(sim.make_job(rows, [40] * 10, settings=[hot]))
        answers.append({c.row: c.token_ids for c in drain(engine)})
    assert len(set(answers[0].values())) == 10
    assert answers[0] == answers[1] == answers[2]


def test_an_empty_job_gives_no_work(sim: ModuleType, make_engine: MakeEngine) -> None:
    engine, runner = make_engine()
    engine.submit(sim.make_job([], []))
    assert not engine.has_work
    assert engine.step() == []
    assert runner.fake.steps == []


def test_close_may_be_called_twice_and_ends_all_work(
    sim: ModuleType, make_engine: MakeEngine
) -> None:
    engine, runner = make_engine()
    drain(engine)
    engine.close()
    engine.close()
    assert runner.num_closed == 1
    assert not engine.has_work


@pytest.mark.parametrize("speculate", [1, 4, "auto"])
def test_answers_are_the_same_when_rows_guess_ahead(
    sim: ModuleType, make_engine: MakeEngine, speculate: Any
) -> None:
    """With two tokens to choose from, much of an answer stood there before."""
    rows = [[1, 2, 1, i % 3, 2, 1] for i in range(12)]
    taken = []
    for changes in ({}, {"speculate": speculate}, {"speculate": speculate, "kv_tokens": 60}):
        engine, _ = make_engine(num_choices=3, **changes)
        engine.submit(
            sim.make_job(
                rows,
                [30] * 12,
                settings=[RowSettings(), RowSettings(temperature=2.0)],
                settings_id=[i % 2 for i in range(12)],
            )
        )
        answers = {c.row: (c.token_ids, c.finish_reason, c.text) for c in drain(engine)}
        taken.append((answers, engine.usage.completion_tokens))
        assert engine.usage.accepted_tokens <= engine.usage.drafted_tokens
        assert bool(engine.usage.drafted_tokens) == bool(changes)
    assert taken[0] == taken[1] == taken[2]


def test_nan_behind_a_guess_fails_the_row_there_and_no_other(
    sim: ModuleType, make_engine: MakeEngine
) -> None:
    rows = [[1, 2, 1, 2, i] for i in range(3, 9)]
    found = []
    for speculate in ("off", 4):
        engine, runner = make_engine(num_choices=6, speculate=speculate)
        runner.broken = {5}
        engine.submit(sim.make_job(rows, [40] * 6))
        found.append({c.row: (c.token_ids, c.error) for c in drain(engine)})
    assert found[0] == found[1]
    assert any(error is not None for _, error in found[0].values())


@pytest.mark.parametrize("kv_tokens", [300, 60])
def test_an_observer_sees_every_step_and_its_sums_are_the_counters(
    sim: ModuleType, make_engine: MakeEngine, kv_tokens: int
) -> None:
    engine, runner = make_engine(kv_tokens=kv_tokens)
    seen: list[StepStats] = []
    engine.observe(seen.append)
    engine.submit(
        sim.make_job([[65 + i // 4, *range(70, 80), i] for i in range(20)], [12] * 20, retain=True)
    )
    num_steps, completions = 0, []
    while engine.has_work:
        completions += engine.step()
        num_steps += 1
    assert len(seen) == num_steps
    usage = engine.usage
    assert seen[-1].usage == usage
    assert seen[-1].usage is not usage, "a live counter is no picture of one step"
    assert (usage.preemptions > 0, usage.evicted_tokens > 0) == (kv_tokens == 60, kv_tokens == 60)
    assert sum(s.finished_rows for s in seen) == len(completions) == 20
    assert [s.model_tokens for s in seen if s.model_tokens] == [
        s.num_tokens for s in runner.fake.steps if s.num_tokens
    ]
    # Nothing is guessed or forced here: a token is the prompt's, goes again, or is decoded.
    assert sum(s.model_tokens for s in seen) == (
        usage.computed_tokens + usage.recomputed_tokens + usage.decode_steps
    )
    assert max(s.kv_tokens for s in seen) <= usage.peak_kv_tokens <= kv_tokens
    assert seen[0].running_rows + seen[0].waiting_rows == 20
    assert (seen[-1].running_rows, seen[-1].waiting_rows) == (seen[-1].finished_rows, 0)


def test_the_parts_of_a_step_follow_each_other_and_fill_it(
    sim: ModuleType, make_engine: MakeEngine
) -> None:
    engine, _ = make_engine()
    seen: list[StepStats] = []
    engine.submit(sim.make_job([[65, 66]], [3]))
    engine.step()
    engine.observe(seen.append)
    before_s = time.perf_counter()
    engine.step()
    after_s = time.perf_counter()
    engine.observe(None)
    drain(engine)
    [step] = seen
    parts = (step.schedule_s, step.forward_s, step.mask_s, step.sample_s, step.collect_s)
    assert all(seconds > 0 for seconds in parts)
    assert before_s <= step.started_s
    assert step.started_s + sum(parts) <= after_s
