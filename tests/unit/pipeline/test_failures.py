"""Rows that fail: tried again, collected in a file, counted until enough is enough."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from instant_engine import InstantEngine

from batchradix import pipeline
from batchradix.config import EngineOptions, OutputOptions, RunConfig, SamplingOptions
from batchradix.errors import (
    OptionError,
    RowError,
    RowErrorCode,
    TooManyFailuresError,
)
from batchradix.types import Completion, FinishReason

MakeTinyModel = Callable[..., Path]
ROWS = [{"id": f"r{i}", "prompt": f"p {i}", "extra": i} for i in range(4)]


@pytest.fixture(scope="module")
def markov(tiny_model_folder: MakeTinyModel) -> str:
    return str(tiny_model_folder("markov"))


class Flaky(InstantEngine):
    """Its answers to the rows in ``failing`` are errors of that code."""

    def __init__(self, failing: dict[int, RowErrorCode], *, text: str = "1") -> None:
        super().__init__()
        self._failing = failing
        self._text = text

    def text(self, row: int) -> str:
        return "" if row in self._failing else self._text

    def completion(self, row: int, **changes: Any) -> Completion:
        code = self._failing.get(row)
        if code is not None:
            error = RowError(code, "it failed")
            changes |= {"finish_reason": FinishReason.ERROR, "error": error}
        return super().completion(row, **changes)


def run(model: str, path: Path, engine: Flaky, rows: Any = ROWS, **output: Any) -> Any:
    config = RunConfig(
        input=rows,
        model=model,
        sampling=SamplingOptions(max_tokens=4),
        engine=EngineOptions(dtype="float32", num_threads=1),
        output=OutputOptions(path=path, **output),
    )
    return pipeline.run(config, engines=engine).summary


def texts(path: Path) -> list[str | None]:
    return pl.read_ipc(path)["text"].to_list()


@pytest.mark.parametrize("code", ["kv_pool_too_small", "non_finite_logits", "engine_failed"])
def test_what_failed_by_no_fault_of_the_row_is_tried_again_by_the_next_run(
    markov: str, tmp_path: Path, code: str
) -> None:
    path = tmp_path / "out.arrow"
    assert run(markov, path, Flaky({1: RowErrorCode(code)})).errors == 1
    again = Flaky({})
    summary = run(markov, path, again)
    assert again.submitted == [1]
    assert (summary.ok, summary.errors, summary.resumed_rows) == (4, 0, 3)
    assert texts(path) == ["1"] * 4


def test_other_failures_stay_until_they_are_to_be_tried_again(markov: str, tmp_path: Path) -> None:
    path = tmp_path / "out.arrow"
    run(markov, path, Flaky({2: RowErrorCode.SCHEMA_MISMATCH}))
    before = path.read_bytes()
    again = Flaky({})
    run(markov, path, again, retry=("truncated",))
    assert again.submitted == []
    assert path.read_bytes() == before
    summary = run(markov, path, again, retry=("error", "truncated"))
    assert again.submitted == [2]
    assert (summary.ok, summary.errors) == (4, 0)
    assert texts(path) == ["1"] * 4
    finished = Flaky({})
    run(markov, path, finished, retry=("error",))
    assert finished.submitted == []


def test_a_run_gives_up_after_enough_failures_and_keeps_what_was_done(
    markov: str, tmp_path: Path
) -> None:
    path = tmp_path / "out.arrow"
    failing = dict.fromkeys((0, 1, 2), RowErrorCode.SCHEMA_MISMATCH)
    with pytest.raises(TooManyFailuresError, match="given up after 2 error rows"):
        run(markov, path, Flaky(failing), abort_after_failures=2)
    assert not path.exists()
    again = Flaky({})
    summary = run(markov, path, again, abort_after_failures=2)
    assert again.submitted == [2, 3]
    assert (summary.ok, summary.errors) == (2, 2)


def test_rows_that_no_prompt_can_be_made_of_count_as_failures_too(
    markov: str, tmp_path: Path
) -> None:
    rows = [{"prompt": None}, {"prompt": None}, {"prompt": "a"}]
    engine = Flaky({})
    with pytest.raises(TooManyFailuresError):
        run(markov, tmp_path / "out.arrow", engine, rows, abort_after_failures=2)
    assert engine.submitted == []


@pytest.mark.parametrize("extension", ["jsonl", "parquet", "arrow"])
def test_failed_rows_are_collected_with_all_their_columns(
    markov: str, tmp_path: Path, extension: str
) -> None:
    path, failed = tmp_path / "out.arrow", tmp_path / f"failed.{extension}"
    engine = Flaky(dict.fromkeys((1, 3), RowErrorCode.SCHEMA_MISMATCH))
    assert run(markov, path, engine, failed_rows=failed).failed_rows == 2
    read = {"jsonl": pl.read_ndjson, "parquet": pl.read_parquet, "arrow": pl.read_ipc}[extension]
    assert read(failed).to_dicts() == [ROWS[1], ROWS[3]]
    again = tmp_path / "again.arrow"
    assert run(markov, again, Flaky({}), failed).ok == 2
    assert run(markov, path, Flaky({}), retry=("error",), failed_rows=failed).failed_rows == 0
    assert not failed.exists()


def test_lines_that_are_no_json_are_left_out_of_the_failed_rows(
    markov: str, tmp_path: Path
) -> None:
    source, failed = tmp_path / "rows.jsonl", tmp_path / "failed.jsonl"
    source.write_text('{"prompt": "a", "n": 1.5}\nno json\n{"prompt": null, "n": "é"}\n')
    summary = run(markov, tmp_path / "o.arrow", Flaky({}), str(source), failed_rows=failed)
    assert (summary.errors, summary.failed_rows) == (2, 1)
    assert f"1 of the failed rows are not in {failed}: " in summary.warnings[-1]
    assert [json.loads(line) for line in failed.read_text().splitlines()] == [
        {"prompt": None, "n": "é"}
    ]


@pytest.mark.parametrize("name", ["out.arrow", "nowhere/f.jsonl", "failed.csv"])
def test_a_place_where_failed_rows_cannot_go_is_refused(
    markov: str, tmp_path: Path, name: str
) -> None:
    engine = Flaky({})
    with pytest.raises(OptionError, match="the file of failed rows"):
        run(markov, tmp_path / "out.arrow", engine, failed_rows=tmp_path / name)
    assert engine.submitted == []


def test_wrong_options_are_refused() -> None:
    for options in (
        {"retry": ("ok",)},
        {"retry": ("error",), "restart": True},
        {"abort_after_failures": 0},
    ):
        with pytest.raises(OptionError):
            OutputOptions(**options)
