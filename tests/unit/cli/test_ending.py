"""What follows a run: the ledger, metrics, a command; deadlines and logs as JSON lines."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from datetime import datetime, tzinfo
from pathlib import Path

import polars as pl
import pytest

from batchradix.cli.options import parse_duration
from batchradix.errors import OptionError
from batchradix.sink.folder import acquire

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


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_what_fails_after_a_quiet_run_is_told_all_the_same(
    job: list[object], batchradix: Run, log_format: str
) -> None:
    options = ["--metrics", "/proc/m.prom", "--on-finish", "kill -9 $$", "--log-format", log_format]
    code, _, error = batchradix(*job, "--quiet", *options)
    assert code == 0
    lines = error.splitlines()
    if log_format == "json":
        events = [json.loads(line) for line in lines]
        assert [event["event"] for event in events] == ["warning", "warning"]
        lines = [event["text"] for event in events]
    else:
        assert all(line.startswith("warning: ") for line in lines)
    assert len(lines) == 2
    assert "the metrics cannot be written to /proc/m.prom" in lines[0]
    assert "--on-finish was ended by signal 9 (Killed)" in lines[1]


def test_metrics_are_written_over_nothing_else(
    job: list[object], batchradix: Run, tmp_path: Path
) -> None:
    for name in (job[-1], job[1], tmp_path, "", "."):
        code, _, error = batchradix(*job, "--metrics", name)
        assert code == 2, name
        assert error.startswith("error: ")
        assert "folder" in error or "input or an output" in error


def test_the_metrics_file_may_have_a_date_in_its_name(
    job: list[object], batchradix: Run, tmp_path: Path
) -> None:
    code, _, _ = batchradix(
        *job, "--metrics", tmp_path / "{date-1:%Y%m%d}.prom", "--date", "2026-12-01"
    )
    assert code == 0
    assert (tmp_path / "20261130.prom").is_file()


def test_all_files_of_a_run_have_one_date_though_midnight_or_a_set_clock_comes_between(
    job: list[object], batchradix: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    days = iter(["2026-11-30", "2026-12-01", "2020-01-01", "2020-01-02", "2020-01-03"])
    monkeypatch.setattr("batchradix.cli.job_file.today", lambda: next(days))
    monkeypatch.setattr("batchradix.cli.run.today", lambda: next(days))
    (tmp_path / "rows.jsonl").rename(tmp_path / "2026-11-30.jsonl")
    job[1] = tmp_path / "{date}.jsonl"
    job[-1] = tmp_path / "{date}.arrow"
    code, _, error = batchradix(*job, "--metrics", tmp_path / "{date}.prom")
    assert code == 0, error
    assert {path.stem for path in tmp_path.glob("2*")} >= {"2026-11-30"}
    assert not list(tmp_path.glob("2020*"))
    assert not list(tmp_path.glob("2026-12*"))


@pytest.mark.parametrize("jump_s", [-10 * 365 * 86400.0, 10 * 365 * 86400.0])
def test_a_clock_that_jumps_changes_stamps_and_nothing_else(
    job: list[object],
    batchradix: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    jump_s: float,
) -> None:
    """The wall clock jumps with every look at it; deadline, lock, ledger and resume do not mind."""
    job += ["--deadline", "1h", "--row-timeout", "1h", "--log-format", "json"]
    job += ["--metrics", tmp_path / "m.prom"]
    real, looks = time.time, itertools.count()

    def jumping() -> float:
        return real() + jump_s * (next(looks) % 2)

    class JumpingDatetime(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> JumpingDatetime:
            return cls.fromtimestamp(jumping(), tz)

    monkeypatch.setattr(time, "time", jumping)
    for module in ("cli.ending", "cli.job_file", "report.json_log"):
        monkeypatch.setattr(f"batchradix.{module}.datetime", JumpingDatetime)
    with acquire(tmp_path / "out.arrow"):
        assert batchradix(*job)[0] == 4
    assert batchradix(*job, "--deadline", "0")[0] == 143
    code, output, _ = batchradix(*job, "--json")
    assert code == 0
    assert all(0 <= part < 60 for part in json.loads(output)["seconds"].values())
    assert batchradix(*job, "--json")[0] == 0
    assert next(looks) > 8
    runs = pl.read_parquet(tmp_path / "history.parquet")
    assert runs["exit_code"].to_list() == [4, 143, 0, 0]
    assert runs["seconds"].is_between(0, 60).all()
    assert batchradix("history")[1].count("\n") == 4


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
