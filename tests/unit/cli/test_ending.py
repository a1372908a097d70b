"""What follows a run: the ledger, metrics, a command; deadlines and logs as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from batchradix.cli.options import parse_duration
from batchradix.errors import OptionError

MakeTinyModel = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def job(
    tmp_path: Path, tiny_model_folder: MakeTinyModel, monkeypatch: pytest.MonkeyPatch
) -> list[object]:
    monkeypatch.setenv("BATCHRADIX_HISTORY", str(tmp_path / "history.parquet"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"t": "aa"}\n{"t": "ab"}\n')
    model = tiny_model_folder("markov")
    words = ["run", rows, "--model", model, "--template", "Say {{ t }}", "--max-tokens", 3]
    return [*words, "-o", tmp_path / "out.arrow"]


def test_every_run_is_in_the_history_refused_ones_too(
    job: list[object], batchradix: Run, tmp_path: Path
) -> None:
    assert batchradix("history") == (0, "no runs yet\n", "")
    assert batchradix(*job)[0] == 0
    assert batchradix(*job, "--max-tokens", "4")[0] == 2
    runs = pl.read_parquet(tmp_path / "history.parquet")
    assert runs["exit_code"].to_list() == [0, 2]
    assert runs["rows"].to_list() == [2, 0]
    assert "max_tokens: 3 → 4" in runs["error"][1]
    code, output, _ = batchradix("history", "--limit", "1")
    assert (code, output.count("\n")) == (0, 1)
    assert "exit   2" in output
    code, output, _ = batchradix("history", "--json")
    assert [json.loads(line)["rows"] for line in output.splitlines()] == [2, 0]


def test_a_command_and_a_metrics_file_learn_how_the_run_ended(
    job: list[object], batchradix: Run, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    command = f'echo "$BATCHRADIX_EXIT_CODE $BATCHRADIX_SUMMARY" > {told}; exit 7'
    metrics = tmp_path / "m.prom"
    code, _, error = batchradix(*job, "--on-finish", command, "--metrics", metrics)
    assert code == 0
    assert "--on-finish ended with code 7" in error
    exit_code, _, summary = told.read_text().partition(" ")
    assert exit_code == "0"
    assert json.loads(summary)["ok"] == 2
    assert 'batchradix_rows{job="out.arrow",status="ok"} 2' in metrics.read_text()


def test_a_run_without_a_place_for_its_history_still_ends_well(
    job: list[object], batchradix: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHRADIX_HISTORY", "/proc/history.parquet")
    code, _, error = batchradix(*job, "--metrics", "/proc/m.prom")
    assert code == 0
    assert "the run cannot be noted" in error
    assert "the metrics cannot be written" in error


def test_a_deadline_stops_a_run_that_goes_on_later(
    job: list[object], batchradix: Run, tmp_path: Path
) -> None:
    code, output, _ = batchradix(*job, "--deadline", "0")
    assert code == 143
    assert "left=2" in output
    assert not (tmp_path / "out.arrow").exists()
    assert batchradix(*job, "--deadline", "1h")[0] == 0
    assert pl.read_parquet(tmp_path / "history.parquet")["exit_code"].to_list() == [143, 0]


def test_logs_can_be_json_lines(job: list[object], batchradix: Run) -> None:
    code, _, error = batchradix(*job, "--log-format", "json")
    assert code == 0
    lines = [json.loads(line) for line in error.splitlines()]
    assert {"time", "level", "event"} <= lines[0].keys()
    assert {"message", "started"} <= {line["event"] for line in lines}
    code, _, error = batchradix(*job, "--log-format", "xml")
    assert (code, error) == (2, "error: --log-format must be text or json, not 'xml'\n")


def test_durations_have_units() -> None:
    assert parse_duration("1h30m", "--deadline") == 5400
    assert parse_duration("90", "--deadline") == 90
    assert parse_duration("1.5 min", "--deadline") == 90
    for text in ("", "h", "2 weeks", "-1h", "1h -5m"):
        with pytest.raises(OptionError, match="must be a time"):
            parse_duration(text, "--deadline")
