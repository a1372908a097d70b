"""A sample of a job: which rows it has, what it says of the whole, and how the whole goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from instant_engine import InstantEngine

from batchradix import pipeline
from batchradix.config import EngineOptions, OutputOptions, RunConfig, SamplingOptions, Shard
from batchradix.errors import OptionError
from batchradix.pipeline.sample import choose_rows
from batchradix.report.estimate import Work, WorkTimes, guess_answers, guess_seconds
from batchradix.scratch import Scratch
from batchradix.sink.formats import read_table
from batchradix.trial import TrialOptions
from batchradix.types import Usage

MakeTinyModel = Callable[..., Path]


class Yes(InstantEngine):
    def text(self, row: int) -> str:
        return "yes"


@pytest.fixture(scope="module")
def markov(tiny_model_folder: MakeTinyModel) -> str:
    return str(tiny_model_folder("markov"))


def documents(num_rows: int) -> list[dict[str, Any]]:
    return [
        {"id": f"r{n}", "prompt": f"document {n % 5} asks {n % 17}", "size": n}
        for n in range(num_rows)
    ]


def job(model: str, rows: Any, path: Path | None, sample: int | None, **changes: Any) -> RunConfig:
    options: dict[str, Any] = {
        "engine": EngineOptions(dtype="float32", num_threads=1),
        "sampling": SamplingOptions(max_tokens=4),
        "output": OutputOptions(path=path, keep="all"),
        "trial": TrialOptions(sample=sample),
    }
    return RunConfig(input=rows, model=model, **options | changes)


def chosen(num_rows: int, size: int, seed: int = 0) -> list[int]:
    mask = choose_rows(num_rows, size, seed, Scratch(least_bytes=None))
    return np.flatnonzero(mask).tolist()


@given(
    num_rows=st.integers(0, 400),
    small=st.integers(1, 200),
    more=st.integers(0, 300),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_a_sample_has_its_size_and_is_in_every_larger_one(
    num_rows: int, small: int, more: int, seed: int
) -> None:
    first, second = (chosen(num_rows, size, seed) for size in (small, small + more))
    assert len(first) == min(small, num_rows)
    assert len(second) == min(small + more, num_rows)
    assert set(first) <= set(second)
    assert first == chosen(num_rows, small, seed)


def test_a_sample_is_spread_over_all_of_the_input() -> None:
    size, parts = 2_000, 10
    counts, _ = np.histogram(chosen(300_000, size), bins=parts, range=(0, 300_000))
    expected = size / parts
    # Chi-square with 9 degrees of freedom: above 33.7 once in 10,000 fair draws.
    assert ((counts - expected) ** 2 / expected).sum() < 33.7
    overlap = len(set(chosen(300_000, size, 1)) & set(chosen(300_000, size, 2)))
    assert overlap < 60  # 13 expected


@pytest.mark.parametrize("extension", [".arrow", ".parquet", ".jsonl", ".csv"])
def test_the_whole_run_goes_on_with_the_rows_of_a_sample(
    markov: str, tmp_path: Path, extension: str
) -> None:
    rows = documents(40)
    alone, output = tmp_path / f"alone{extension}", tmp_path / f"out{extension}"
    pipeline.run(job(markov, rows, alone, None))
    first = pipeline.run(job(markov, rows, output, 7)).summary
    assert (first.rows, first.ok, first.resumed_rows) == (7, 7, 0)
    table = read_table(output)
    assert table["row"].to_pylist() == chosen(40, 7)
    assert table["size"].to_pylist() == chosen(40, 7)
    larger = pipeline.run(job(markov, rows, output, 12)).summary
    assert (larger.rows, larger.resumed_rows) == (12, 7)
    assert read_table(output)["row"].to_pylist() == chosen(40, 12)
    engine = Yes()
    pipeline.run(job(markov, rows, output, 12), engines=lambda *_: engine)
    assert engine.submitted == []
    whole = pipeline.run(job(markov, rows, output, None)).summary
    assert (whole.rows, whole.estimate) == (40, None)
    assert whole.resumed_rows >= 12
    if extension == ".jsonl":  # other formats hold metadata or a header beside the rows
        assert output.read_bytes() == alone.read_bytes()
    assert read_table(output).equals(read_table(alone))


def test_no_row_is_computed_twice_and_equal_ones_take_their_answer(
    markov: str, tmp_path: Path
) -> None:
    rows = documents(170)  # 85 different prompts
    output = tmp_path / "out.arrow"
    first, second = Yes(), Yes()
    pipeline.run(job(markov, rows, output, 30), engines=lambda *_: first)
    pipeline.run(job(markov, rows, output, None), engines=lambda *_: second)
    prompts = [rows[row]["prompt"] for row in first.submitted + second.submitted]
    assert len(prompts) == len(set(prompts)) == 85


def test_a_sample_of_a_table_in_memory_comes_back_in_input_order(markov: str) -> None:
    outcome = pipeline.run(job(markov, documents(30), None, 9))
    assert outcome.table is not None
    assert outcome.table["row"].to_pylist() == chosen(30, 9)
    assert outcome.table["id"].to_pylist() == [f"r{n}" for n in chosen(30, 9)]


def test_the_seed_of_the_run_chooses_unless_the_sample_has_its_own(markov: str) -> None:
    def rows_of(**changes: Any) -> list[int]:
        table = pipeline.run(job(markov, documents(50), None, 5, **changes)).table
        assert table is not None
        return table["row"].to_pylist()

    seven = SamplingOptions(max_tokens=4, seed=7)
    assert rows_of(sampling=seven) == chosen(50, 5, 7)
    own = TrialOptions(sample=5, sample_seed=3)
    assert rows_of(sampling=seven, trial=own) == chosen(50, 5, 3)


def test_rows_that_cannot_run_are_in_a_sample_as_in_the_input(markov: str) -> None:
    rows = documents(40)
    for row in chosen(40, 10)[:3] + chosen(40, 40)[:1]:
        rows[row]["prompt"] = None
    outcome = pipeline.run(job(markov, rows, None, 10))
    assert outcome.table is not None
    statuses = dict(
        zip(*(outcome.table[name].to_pylist() for name in ("row", "status")), strict=True)
    )
    assert {row for row, status in statuses.items() if status == "error"} == {
        row for row in chosen(40, 10) if rows[row]["prompt"] is None
    }
    assert outcome.summary.errors == list(statuses.values()).count("error")


def test_a_request_for_several_answers_is_taken_with_all_of_them(
    markov: str, tmp_path: Path
) -> None:
    lines = [
        {
            "custom_id": f"r{n}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "m", "prompt": f"ask {n}", "max_tokens": 2, "n": 1 + n % 3},
        }
        for n in range(12)
    ]
    path = tmp_path / "batch.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    for keep in (OutputOptions(path=tmp_path / "a.arrow"), OutputOptions()):
        outcome = pipeline.run(job(markov, str(path), keep.path, 5, output=keep))
        table = outcome.table or read_table(tmp_path / "a.arrow")
        assert table["row"].to_pylist() == chosen(12, 5)
        assert table["id"].to_pylist() == [f"r{n}" for n in chosen(12, 5)]
        assert [len(s) for s in table["samples"].to_pylist()] == [1 + n % 3 for n in chosen(12, 5)]
        assert outcome.summary.rows == 5
        assert outcome.summary.estimate is not None
        assert outcome.summary.estimate.rows == 12
    openai = OutputOptions(path=tmp_path / "o.jsonl", format="openai")
    pipeline.run(job(markov, str(path), openai.path, 5, output=openai))
    answers = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert [one["custom_id"] for one in answers] == [f"r{n}" for n in chosen(12, 5)]
    whole = pipeline.run(
        job(markov, str(path), tmp_path / "a.arrow", None, output=keep_of(tmp_path))
    )
    assert whole.summary.resumed_rows >= 5


def keep_of(folder: Path) -> OutputOptions:
    return OutputOptions(path=folder / "a.arrow")


def test_the_estimate_has_the_whole_jobs_plan_and_the_samples_answers(markov: str) -> None:
    rows = documents(60)
    trial = TrialOptions(sample=20, price_per_hour=3.6)
    estimate = pipeline.run(job(markov, rows, None, None, trial=trial)).summary.estimate
    whole = pipeline.run(job(markov, rows, None, None)).summary
    assert estimate is not None
    assert (estimate.rows, estimate.sampled_rows) == (60, 20)
    assert estimate.prompt_tokens == whole.prompt_tokens
    assert estimate.distinct_tokens == estimate.computed_tokens == whole.usage.computed_tokens
    assert abs(estimate.completion_tokens - whole.completion_tokens) <= max(
        estimate.completion_tokens_error, 60
    )
    assert estimate.seconds is not None
    assert estimate.seconds > 0
    assert estimate.cost == pytest.approx(estimate.seconds / 1000, abs=1e-3)
    assert set(estimate.to_json()) >= {"seconds", "cost", "computed_tokens"}


def test_a_sample_that_computes_nothing_says_no_time(markov: str, tmp_path: Path) -> None:
    config = job(markov, documents(20), tmp_path / "out.arrow", 5)
    pipeline.run(config)
    estimate = pipeline.run(config).summary.estimate
    assert estimate is not None
    assert (estimate.seconds, estimate.cost) == (None, None)
    assert estimate.completion_tokens > 0


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 9), st.floats(0.001, 1.0)), min_size=1
    )
)
def test_a_sample_of_everything_is_taken_to_be_as_long_as_it_was(
    steps: list[tuple[int, int, float]],
) -> None:
    times, usage, now = WorkTimes(0.0), Usage(), 0.0
    for computed, decoded, seconds in steps:
        usage.computed_tokens += computed
        usage.decode_steps += decoded
        now += seconds
        times.after_step(usage, now)
    work = Work(rows=3, computed_tokens=usage.computed_tokens, decode_steps=usage.decode_steps)
    assert guess_seconds(work, work, times) == pytest.approx(now)


def test_prompts_and_answers_are_extrapolated_each_by_its_own_tokens() -> None:
    times, usage = WorkTimes(0.0), Usage()
    usage.computed_tokens = 100
    times.after_step(usage, 2.0)  # 100 prompt tokens in 2 s
    usage.decode_steps = 10
    times.after_step(usage, 3.0)  # 10 decode steps in 1 s
    sample = Work(rows=1, computed_tokens=100, decode_steps=10)
    whole = Work(rows=9, computed_tokens=300, decode_steps=90)
    assert guess_seconds(sample, whole, times) == pytest.approx(2 * 3 + 1 * 9)
    assert guess_answers((2, 20, 202), 10) == (100, round(1.96 * 10 * (2 / 2 * 0.8) ** 0.5))
    assert guess_answers((0, 0, 0), 10) == (0, 0)


def test_options_of_a_sample_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    for options in ({"sample": 0}, {"sample": True}, {"sample_seed": 1}, {"price_per_hour": 2.0}):
        with pytest.raises(OptionError):
            TrialOptions(**options)  # type: ignore[arg-type]
    config = job("m", [], tmp_path / "o.arrow", 3)
    with pytest.raises(OptionError, match="exclude each other"):
        replace(config, shard=Shard(1, 2))


def test_a_sample_says_what_it_is_a_sample_of(markov: str, tmp_path: Path) -> None:
    path = tmp_path / "out.arrow"
    pipeline.run(job(markov, documents(20), path, 5))
    with pa.memory_map(str(path)) as file:
        facts = pa.ipc.open_file(file).schema.metadata[b"batchradix.sample"]
    assert json.loads(facts) == {"size": 5, "seed": 0, "rows": 20}


def test_python_takes_a_sample_and_right_answers_too(markov: str) -> None:
    import batchradix

    rows = [{**row, "right": "bcde" if n % 2 else "no"} for n, row in enumerate(documents(20))]
    done = batchradix.run(
        rows,
        model=markov,
        template="{{ size }}a",
        sample=6,
        sample_seed=4,
        price_per_hour=1.0,
        gold="right",
        sampling=SamplingOptions(max_tokens=4),
        engine=EngineOptions(dtype="float32", num_threads=1),
    )
    assert done.to_arrow()["row"].to_pylist() == chosen(20, 6, 4)
    assert done.summary.gold is not None
    assert done.summary.gold.exact == sum(row % 2 for row in chosen(20, 6, 4))
    assert done.summary.estimate is not None
    assert done.summary.estimate.cost is not None


def test_a_sample_can_be_traced(markov: str, tmp_path: Path) -> None:
    output = OutputOptions(path=tmp_path / "out.arrow", trace=True)
    summary = pipeline.run(job(markov, documents(20), None, 5, output=output)).summary
    assert summary.estimate is not None
    assert summary.estimate.seconds is not None
    assert any((tmp_path / "out.arrow.batchradix" / "trace").iterdir())
