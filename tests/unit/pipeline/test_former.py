"""A job that has changed since its output was written: what may stay, and what runs again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from instant_engine import InstantEngine

from batchradix import pipeline
from batchradix.config import (
    EngineOptions,
    OutputOptions,
    PromptOptions,
    RunConfig,
    SamplingOptions,
)
from batchradix.errors import OptionError, OutputMismatchError
from batchradix.sink import takeover
from batchradix.types import Completion, FinishReason

MakeTinyModel = Callable[..., Path]
INTEGER = {"type": "integer"}
ROWS = [{"id": f"r{i}", "a": f"a{i}", "b": f"b{i}"} for i in range(4)]


@pytest.fixture(scope="module")
def markov(tiny_model_folder: MakeTinyModel) -> str:
    return str(tiny_model_folder("markov"))


class Counter(InstantEngine):
    """Answers each row with a number of its own, cut short where it is told."""

    def __init__(self, text: str, cut: tuple[int, ...] = ()) -> None:
        super().__init__()
        self._text, self._cut = text, cut

    def text(self, row: int) -> str:
        return self._text

    def completion(self, row: int, **changes: Any) -> Completion:
        reason = FinishReason.LENGTH if row in self._cut else FinishReason.STOP
        return super().completion(row, finish_reason=reason, **changes)


def config(model: str, path: Path, **changes: Any) -> RunConfig:
    output = OutputOptions(path=path)
    base = RunConfig(
        input=ROWS,
        model=model,
        schema=INTEGER,
        prompt=PromptOptions(template="{{ a }}"),
        sampling=SamplingOptions(max_tokens=4),
        engine=EngineOptions(dtype="float32", num_threads=1),
        output=output,
    )
    return replace(base, **changes)


def values(path: Path) -> list[int | None]:
    return pl.read_ipc(path)["value"].to_list()


def test_cut_rows_run_again_with_more_tokens_into_the_same_table(
    markov: str, tmp_path: Path
) -> None:
    path = tmp_path / "out.arrow"
    pipeline.run(config(markov, path), engines=Counter("1", cut=(1, 2)))
    assert values(path) == [1, None, None, 1]
    more = SamplingOptions(max_tokens=9, temperature=0.5, seed=3)
    retry = OutputOptions(path=path, retry=("truncated",))
    engine = Counter("2")
    summary = pipeline.run(
        config(markov, path, sampling=more, output=retry), engines=engine
    ).summary
    assert engine.submitted == [1, 2]
    assert (summary.ok, summary.truncated, summary.resumed_rows) == (4, 0, 2)
    assert values(path) == [1, 2, 2, 1]
    before = path.read_bytes()
    finished = Counter("3")
    pipeline.run(config(markov, path, sampling=more), engines=finished)
    assert finished.submitted == []
    assert path.read_bytes() == before


def test_other_settings_without_retry_are_refused(markov: str, tmp_path: Path) -> None:
    path = tmp_path / "out.arrow"
    pipeline.run(config(markov, path), engines=Counter("1"))
    job = config(markov, path, sampling=SamplingOptions(max_tokens=9))
    with pytest.raises(OutputMismatchError, match=r"max_tokens: 4 → 9.*--reuse"):
        pipeline.run(job, engines=Counter("2"))
    with pytest.raises(OutputMismatchError):
        pipeline.check(job, engines=Counter("2"))
    assert values(path) == [1] * 4


def test_rows_whose_prompt_stays_the_same_are_taken_over(markov: str, tmp_path: Path) -> None:
    path = tmp_path / "out.arrow"
    pipeline.run(config(markov, path), engines=Counter("1"))
    rows = [{**row, "b": row["a"]} if i % 2 else row for i, row in enumerate(ROWS)]
    changes: dict[str, Any] = {
        "input": rows,
        "prompt": PromptOptions(template="{{ b }}"),
        "output": OutputOptions(path=path, reuse=True),
    }
    engine = Counter("2")
    summary = pipeline.run(config(markov, path, **changes), engines=engine).summary
    assert engine.submitted == [0, 2]
    assert summary.resumed_rows == 2
    assert values(path) == [2, 1, 2, 1]


@pytest.mark.parametrize(
    ("changed", "changes"),
    [
        ("schema", {"schema": {"type": "integer", "minimum": 0}}),
        ("dtype", {"engine": EngineOptions(dtype="bfloat16", num_threads=1)}),
        ("seed", {"sampling": SamplingOptions(max_tokens=4, seed=7)}),
    ],
)
def test_what_changes_every_answer_is_not_taken_over(
    markov: str, tmp_path: Path, changed: str, changes: dict[str, Any]
) -> None:
    path = tmp_path / "out.arrow"
    pipeline.run(config(markov, path), engines=Counter("1"))
    job = config(markov, path, output=OutputOptions(path=path, reuse=True), **changes)
    for run in (pipeline.run, pipeline.check):
        with pytest.raises(OutputMismatchError, match=f"--reuse keeps no rows where {changed}"):
            run(job, engines=Counter("2"))


@pytest.mark.parametrize("at", ["shard", "adopt", "unlink"])
def test_a_kill_while_results_are_taken_over_loses_none(
    markov: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    path = tmp_path / "out.arrow"
    pipeline.run(config(markov, path), engines=Counter("1", cut=(1,)))
    job = config(
        markov,
        path,
        sampling=SamplingOptions(max_tokens=9),
        output=OutputOptions(path=path, retry=("truncated",)),
    )

    class Killed(BaseException):
        pass

    def kill(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        if at == "unlink":
            patched.setattr(Path, "unlink", kill)
        else:
            patched.setattr(takeover, {"shard": "write_shard", "adopt": "adopt"}[at], kill)
        with pytest.raises(Killed):
            pipeline.run(job, engines=Counter("2"))
    engine = Counter("2")
    summary = pipeline.run(job, engines=engine).summary
    assert engine.submitted == [1]
    assert summary.ok == 4
    assert values(path) == [1, 2, 1, 1]


def test_a_run_file_without_settings_is_said_to_be_of_no_use(markov: str, tmp_path: Path) -> None:
    path = tmp_path / "out.arrow"
    pipeline.run(config(markov, path), engines=Counter("1", cut=(1,)))
    run_file = tmp_path / "out.arrow.batchradix" / "run.json"
    state = json.loads(run_file.read_text())
    state["fingerprint"]["max_tokens"] = "many"
    run_file.write_text(json.dumps(state))
    job = config(markov, path, output=OutputOptions(path=path, retry=("truncated",)))
    with pytest.raises(OptionError, match="does not say which settings"):
        pipeline.run(job, engines=Counter("2"))
