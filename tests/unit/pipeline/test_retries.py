"""Rows with an invalid answer run again, and end alike whatever ran beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchradix import pipeline
from batchradix.config import EngineOptions, OutputOptions, RunConfig, SamplingOptions
from batchradix.errors import OptionError, OutputMismatchError
from batchradix.pipeline.retries import plan_of, raised
from batchradix.plan.order import make_plan
from batchradix.sink.formats import read_table
from batchradix.types import RowSettings, TokenTable

MakeTinyModel = Callable[..., Path]
_DIGIT = {"type": "integer", "minimum": 1, "maximum": 5}
UNIQUE = {
    "type": "array",
    "prefixItems": [{"type": "string", "maxLength": 2}, _DIGIT, _DIGIT],
    "items": False,
    "minItems": 3,
    "uniqueItems": True,  # which decoding does not enforce
}
ROWS = [{"id": str(i), "prompt": f"a shared beginning, then {i * 7919}"} for i in range(12)]


@pytest.fixture(scope="module")
def model(tiny_model_folder: MakeTinyModel) -> str:
    return str(tiny_model_folder("random", family="llama", seed=7))


def config(model: str, rows: Any = ROWS, **changes: Any) -> RunConfig:
    options: dict[str, Any] = {
        "engine": EngineOptions(dtype="float32", num_threads=1),
        "sampling": SamplingOptions(max_tokens=24),
        "schema": UNIQUE,
    }
    return RunConfig(input=rows, model=model, **options | changes)


def run(job: RunConfig) -> tuple[list[tuple[str, Any, str]], Any]:
    outcome = pipeline.run(job)
    assert outcome.table is not None
    rows = outcome.table.to_pylist()
    return [(row["status"], row["value"], row["text"]) for row in rows], outcome.summary


@pytest.fixture(scope="module")
def once(model: str) -> list[tuple[str, Any, str]]:
    answers = run(config(model))[0]
    assert {status for status, _, _ in answers} == {"ok", "error"}, "the model is no test of this"
    return answers


@pytest.fixture(scope="module")
def mended(model: str) -> list[tuple[str, Any, str]]:
    return run(config(model, retries=4))[0]


def test_only_rows_with_an_invalid_answer_run_again(
    model: str, once: list[Any], mended: list[Any]
) -> None:
    answers, summary = run(config(model, retries=4))
    assert answers == mended
    invalid = [i for i, (status, _, _) in enumerate(once) if status == "error"]
    assert summary.retried_rows == len(invalid)
    assert [mended[i] for i in range(len(ROWS)) if i not in invalid] == [
        once[i] for i in range(len(ROWS)) if i not in invalid
    ]
    assert sum(mended[i][0] == "ok" for i in invalid) > 0


def test_tokens_of_failed_attempts_are_counted_apart(model: str, once: list[Any]) -> None:
    _, summary = run(config(model, retries=1))
    assert summary.discarded_tokens > 0
    assert summary.usage.completion_tokens == summary.completion_tokens + summary.discarded_tokens
    assert summary.to_json()["retried_rows"] == summary.retried_rows
    assert "tried again" in dict(summary.table())["result"]


@pytest.mark.parametrize(
    "engine",
    [
        {"batch_size": 1},
        {"batch_size": 3, "prefill_tokens": 16},
        {"prefix_cache": False},
        {"kv_tokens": 128},
    ],
    ids=str,
)
def test_a_row_ends_alike_whatever_ran_beside_it(
    model: str, mended: list[Any], engine: dict[str, Any]
) -> None:
    options = EngineOptions(dtype="float32", num_threads=1, **engine)
    assert run(config(model, retries=4, engine=options))[0] == mended


def test_a_row_ends_alike_when_it_runs_alone(model: str, mended: list[Any]) -> None:
    for row, expected in list(zip(ROWS, mended, strict=True))[:4]:
        assert run(config(model, [row], retries=4))[0] == [expected]


def test_a_stopped_run_goes_on_to_the_same_answers(
    model: str, mended: list[Any], tmp_path: Path
) -> None:
    output = OutputOptions(path=tmp_path / "out.arrow")
    engine = EngineOptions(dtype="float32", num_threads=1, batch_size=2)
    job = config(model, retries=4, output=output, engine=engine)
    steps = iter(range(1000))
    first = pipeline.run(job, stop_requested=lambda: 15 if next(steps) >= 30 else None)
    assert 0 < first.summary.rows < len(ROWS)
    pipeline.run(job)
    rows = read_table(tmp_path / "out.arrow").to_pylist()
    assert [(row["status"], row["value"], row["text"]) for row in rows] == mended


def test_duplicates_take_the_last_answer_of_the_row_they_follow(
    model: str, once: list[Any], mended: list[Any]
) -> None:
    chosen = next(i for i, (status, _, _) in enumerate(once) if status == "error")
    # Greedy rows have one answer whatever their seeds are, and so run again alike.
    rows = [{**ROWS[chosen], "seed": seed} for seed in (1, 2, 3)]
    answers, summary = run(config(model, rows, retries=4))
    assert answers == [mended[chosen]] * 3
    assert summary.retried_rows == 3
    assert summary.duplicate_rows == 2


def test_a_row_that_was_cut_short_is_not_tried_again(model: str) -> None:
    rows = [{"prompt": "x"}]
    job = config(model, rows, retries=3, sampling=SamplingOptions(max_tokens=8))
    answers, summary = run(job)
    assert answers[0][0] == "truncated"
    assert summary.retried_rows == 0


def test_a_run_with_other_retries_is_another_job(model: str, tmp_path: Path) -> None:
    output = OutputOptions(path=tmp_path / "out.arrow")
    pipeline.run(config(model, ROWS[:1], output=output))
    with pytest.raises(OutputMismatchError, match="retries"):
        pipeline.run(config(model, ROWS[:1], output=output, retries=1))


def test_each_attempt_is_warmer_up_to_one() -> None:
    def temperatures(start: float) -> list[float]:
        settings = RowSettings(temperature=start)
        return [round(raised(settings, attempt).temperature, 6) for attempt in range(1, 6)]

    assert temperatures(0.0) == [0.5, 0.7, 0.9, 1.0, 1.0]
    assert temperatures(0.8) == [0.8, 1.0, 1.0, 1.0, 1.0]
    assert temperatures(1.5) == [1.5] * 5


def test_the_plan_of_some_rows_shares_what_their_prompts_share() -> None:
    prompts = ["abcd", "abx", "abcq", "b", "abcd", "ba"]
    tokens = TokenTable.from_rows([list(map(ord, text)) for text in prompts])
    whole = make_plan(tokens, np.arange(len(prompts)))
    for rows in ([0], [0, 3], [1, 2, 4], [5, 4, 0, 2], [3, 5]):
        part = plan_of(whole, np.flatnonzero(np.isin(whole.order, rows))[::-1])
        expected = make_plan(tokens, np.array(sorted(rows)))
        assert part.order.tolist() == expected.order.tolist()
        assert part.lcp.tolist() == expected.lcp.tolist()


@pytest.mark.parametrize("value", [-1, 101, True, "2"])
def test_bad_numbers_of_retries_are_refused(value: Any) -> None:
    with pytest.raises(OptionError, match="retries must be an integer from 0 to 100"):
        RunConfig(input=[], retries=value)
