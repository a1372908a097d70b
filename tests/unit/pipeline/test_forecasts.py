"""What a run is expected to take is what it takes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchradix import pipeline
from batchradix.config import EngineOptions, RunConfig, SamplingOptions
from batchradix.pipeline import forecasts
from batchradix.report.summary import Summary

MakeTinyModel = Callable[..., Path]


@pytest.fixture(scope="module")
def model(tiny_model_folder: MakeTinyModel) -> str:
    return str(tiny_model_folder("markov", context_length=512))


def rows_of(num_rows: int) -> list[dict[str, Any]]:
    chance = random.Random(5)
    documents = ["".join(chance.choices("abcd", k=60)) for _ in range(5)]
    return [
        {
            "prompt": chance.choice(documents)[: chance.randint(20, 60)] + chance.choice("xyz") * 9,
            "max_tokens": chance.randint(1, 40),
        }
        for _ in range(num_rows)
    ]


def run(model: str, rows: list[dict[str, Any]], **engine: Any) -> Summary:
    options = EngineOptions(**({"dtype": "float32", "num_threads": 1} | engine))
    return pipeline.run(RunConfig(input=rows, model=model, engine=options)).summary


@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"batch_size": 7, "prefill_tokens": 33},
        {"kv_tokens": 300, "batch_size": 16},  # evicts, preempts and computes again
        {"prefix_cache": False, "batch_size": 9},
    ],
    ids=["roomy", "chunked", "evicting", "alone"],
)
def test_with_answers_as_long_as_said_every_count_is_exact(
    model: str, engine: dict[str, Any]
) -> None:
    summary = run(model, rows_of(80), **engine)
    expected, usage = summary.forecast, summary.usage
    assert expected is not None
    assert usage.computed_tokens >= summary.distinct_tokens
    if "kv_tokens" in engine:
        assert usage.recomputed_tokens > 0
    for name in (
        "computed_tokens", "recomputed_tokens", "decode_steps", "forward_steps", "peak_kv_tokens"
    ):  # fmt: skip
        assert getattr(expected, name) == getattr(usage, name), name
    assert expected.is_guess
    assert expected.answer_tokens == pytest.approx(summary.answer_tokens)


def test_of_many_rows_the_first_ones_are_scaled_up(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecasts, "MOST_ROWS", 100)
    summary = run(model, rows_of(600), batch_size=16)
    expected, usage = summary.forecast, summary.usage
    assert expected is not None
    assert expected.computed_tokens == usage.computed_tokens
    assert expected.decode_steps == usage.decode_steps
    assert expected.forward_steps == pytest.approx(usage.forward_steps, rel=0.25)


def test_the_last_run_of_an_input_says_how_long_answers_are(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from batchradix.report.history import add_run

    monkeypatch.setenv("BATCHRADIX_HISTORY", str(tmp_path / "history.parquet"))
    config = RunConfig(input="jobs.jsonl", model=model)
    assert forecasts.expected_answer_tokens(config) is None
    for name, length in (("jobs.jsonl", 7.5), ("jobs.jsonl", 4.25), ("other.jsonl", 99.0)):
        run = {"input": name, "model": model, "answer_tokens": length}
        add_run(tmp_path / "history.parquet", run)
    add_run(tmp_path / "history.parquet", {"input": "jobs.jsonl", "model": model})
    assert forecasts.expected_answer_tokens(config) == 4.25
    assert forecasts.expected_answer_tokens(replace(config, model="other")) is None
    assert forecasts.expected_answer_tokens(replace(config, input=[])) is None
    (tmp_path / "history.parquet").write_bytes(b"damaged")
    assert forecasts.expected_answer_tokens(config) is None


def test_expected_lengths_keep_their_mean_and_stay_below_max_tokens(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchradix.pipeline.job.expected_answer_tokens", lambda config: 3.25)
    sampling = SamplingOptions(max_tokens=8)
    rows = [{"prompt": f"{n} is"} for n in range(40)]
    summary = pipeline.run(RunConfig(input=rows, model=model, sampling=sampling)).summary
    assert summary.forecast is not None
    assert summary.forecast.answer_tokens == 3.25
    assert not summary.forecast.is_guess
    assert summary.forecast.decode_steps == 90
    assert "3.25 tokens chosen an answer" in summary.forecast.in_words()


def test_seconds_come_from_what_steps_took_before(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHRADIX_CACHE", str(tmp_path))
    rows = rows_of(120)
    first = run(model, rows, batch_size=8)
    assert first.forecast is not None
    assert first.forecast.seconds is None
    second = run(model, rows, batch_size=8)
    assert second.forecast is not None
    assert second.forecast.seconds is not None
    assert 0 < second.forecast.seconds < 100 * first.run_s
    other = run(model, rows, batch_size=8, attention="torch")
    assert other.forecast is not None
    assert other.forecast.seconds is None
