"""Summaries and progress: what they count, print and never print."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from batchradix.report.machine import free_memory_bytes, machine, peak_rss_bytes
from batchradix.report.progress import PlainProgress, describe
from batchradix.report.summary import Summary
from batchradix.types import Status, Usage


def summary_of(ok: int, truncated: int, errors: int) -> Summary:
    summary = Summary()
    for status, count in zip(Status, (ok, truncated, errors), strict=True):
        for _ in range(count):
            summary.count(status, "bad_line" if status is Status.ERROR else None)
    return summary


@pytest.mark.parametrize(
    ("counts", "allowed", "code"),
    [
        ((0, 0, 0), 0, 0),
        ((3, 0, 0), 0, 0),
        ((2, 1, 0), 0, 1),
        ((2, 0, 1), 0, 1),
        ((999, 0, 1), 0.001, 0),
        ((998, 1, 1), 0.001, 1),
        ((0, 2, 0), 1, 3),
        ((0, 0, 2), 0, 3),
    ],
)
def test_exit_codes_follow_the_rows(
    counts: tuple[int, int, int], allowed: float, code: int
) -> None:
    assert summary_of(*counts).exit_code(allowed) == code


def test_a_signal_decides_the_exit_code() -> None:
    summary = summary_of(1, 0, 0)
    summary.stopped_by = 15
    assert summary.exit_code() == 143


def test_the_json_object_has_the_documented_keys() -> None:
    found = json.loads(json.dumps(summary_of(1, 2, 3).to_json()))
    wanted = {
        "rows": 6,
        "ok": 1,
        "truncated": 2,
        "errors": 3,
        "error_codes": {"bad_line": 3},
        "prompt_tokens": 0,
        "distinct_tokens": 0,
        "computed_tokens": 0,
        "recomputed_tokens": 0,
        "completion_tokens": 0,
        "forced_tokens": 0,
        "decode_steps": 0,
        "drafted_tokens": 0,
        "accepted_tokens": 0,
        "forward_steps": 0,
        "peak_kv_tokens": 0,
        "peak_rss_bytes": 0,
        "seconds": {"load": 0, "plan": 0, "run": 0},
    }
    assert {key: found[key] for key in wanted} == wanted


def test_the_prompts_are_shown_with_the_beginnings_of_answers_that_are_shared_too() -> None:
    summary = summary_of(2, 0, 0)
    summary.prompt_tokens, summary.distinct_tokens = 4, 3
    assert dict(summary.table())["prompts"] == "4 tokens, 3 distinct (25.0% shared)"
    summary.opening_tokens, summary.distinct_tokens = 22, 13
    shown = "4 tokens and 22 that answers begin with, 13 distinct (50.0% shared)"
    assert dict(summary.table())["prompts"] == shown


def test_a_resumed_run_takes_no_credit_for_the_answers_of_an_earlier_one() -> None:
    summary = summary_of(2, 0, 0)
    summary.completion_tokens, summary.run_s = 100, 1.0
    summary.usage.decode_steps = summary.usage.forward_steps = 5
    fresh = dict(summary.table())
    assert "100 answer tokens in 5 steps" in fresh["computed"]
    assert "speed" in fresh
    summary.resumed_rows = 1
    resumed = dict(summary.table())
    assert "in 5 steps; 100 answer tokens in the table" in resumed["computed"]
    assert "speed" not in resumed


def test_the_last_line_can_be_split_by_a_script() -> None:
    words = summary_of(1, 2, 3).last_line().split()
    assert words[0] == "summary"
    fields = dict(word.split("=") for word in words[1:])
    assert fields == {"rows": "6", "ok": "1", "failed": "3", "truncated": "2", "seconds": "0.00"}


def test_progress_says_speed_share_and_time_left() -> None:
    usage = Usage(computed_tokens=100, cached_tokens=300, completion_tokens=100)
    text = describe(usage, elapsed_s=10, num_done=30, num_rows=60, num_before=10)
    assert text == "50 tokens/s, 75% of prompts shared, 0:15 left"


def test_plain_progress_has_no_control_codes_and_few_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    monkeypatch.setattr("batchradix.report.progress.time.monotonic", lambda: now_s)
    stream = io.StringIO()
    progress = PlainProgress(stream)
    progress.start(10**6, 0)
    for i in range(100_000):
        now_s += 1.0
        progress.update(i, Usage(computed_tokens=i + 1))
    text = stream.getvalue()
    assert 5 < len(text.splitlines()) < 40
    assert "\x1b" not in text
    assert "\r" not in text


def test_the_machine_is_measured_plausibly() -> None:
    found = machine()
    assert found.num_threads >= 1
    assert 2**24 < found.free_memory_bytes == pytest.approx(free_memory_bytes(), rel=0.5)
    assert peak_rss_bytes() > 2**24


def test_a_stopped_run_says_what_is_left_and_names_no_output(tmp_path: Path) -> None:
    summary = Summary(rows=3, ok=3, rows_left=4, stopped_by=15, output=tmp_path / "o.arrow")
    lines = dict(summary.table())
    assert lines["stopped"] == "by SIGTERM with 4 rows left; the same command goes on"
    assert "output" not in lines
    assert " left=4 " in summary.last_line()
    assert summary.to_json()["rows_left"] == 4
    summary.stopped_by, summary.rows_left = None, 0
    assert "stopped" not in dict(summary.table())
    assert "left=" not in summary.last_line()


def test_progress_goes_on_when_its_stream_is_full_or_gone() -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    progress = PlainProgress(Full())
    progress.message("nobody can read this")
    progress.warn("nor this")
