"""``--row-timeout``: an answer that takes too long is its own row's error."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from batchradix.engine.model_runner import ModelRunner

LAUNCH = ModelRunner.launch
Run = Callable[..., tuple[int, str, str]]
ROWS = [
    {"id": "short", "prompt": "a", "max_tokens": 2, "kept": 1},
    {"id": "long", "prompt": "b", "max_tokens": 60, "kept": 2},
    {"id": "again", "prompt": "c", "max_tokens": 2, "kept": 3},
]


@pytest.fixture
def job(
    tmp_path: Path,
    tiny_model_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A job file whose steps take a tenth of a second at least."""

    def slowly(runner: ModelRunner, *step: Any) -> None:
        time.sleep(0.1)
        LAUNCH(runner, *step)

    monkeypatch.setattr(ModelRunner, "launch", slowly)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    path = tmp_path / "job.toml"
    path.write_text(
        f'input = "rows.jsonl"\noutput = "out.arrow"\nmodel = "{tiny_model_folder("markov")}"\n'
        'row_timeout = "1.5s"\nerrors = "failed.jsonl"\njson = true\n'
    )
    return path


def test_a_late_row_is_an_error_row_that_can_be_run_again(
    job: Path, batchradix: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, output, _ = batchradix("run", job)
    assert code == 1
    summary = json.loads(output)
    assert summary["error_codes"] == {"row_timeout": 1}
    table = pl.read_ipc(job.with_name("out.arrow"))
    assert table["status"].to_list() == ["ok", "error", "ok"]
    assert table["text"].to_list()[::2] == ["bc", "de"]
    message = table["error"][1]["message"]
    assert "no end after 1.5 s" in message
    assert "--row-timeout" in message
    assert "--retry error" in message
    failed = job.with_name("failed.jsonl")
    assert [json.loads(line) for line in failed.read_text().splitlines()] == [ROWS[1]]

    assert json.loads(batchradix("run", job)[1])["forward_steps"] == 0  # it is not transient
    monkeypatch.setattr(ModelRunner, "launch", LAUNCH)
    code, output, _ = batchradix("run", job, "--retry", "error", "--row-timeout", "1h")
    assert code == 0
    assert json.loads(output)["resumed_rows"] == 2
    assert len(pl.read_ipc(job.with_name("out.arrow"))["text"][1]) == 60
    assert not failed.exists()


def test_the_time_is_a_duration_above_zero_and_below_twelve_days(
    job: Path, batchradix: Run
) -> None:
    for text, said in (
        ("soon", "--row-timeout must be a time such as 2h, 1h30m or 90s, not 'soon'"),
        ("0", "--row-timeout must be a number of seconds above 0 (at most 1e6), not 0.0"),
        ("12d", "--row-timeout must be a number of seconds above 0 (at most 1e6), not 1036800.0"),
    ):
        code, _, error = batchradix("run", job, "--row-timeout", text)
        assert (code, error) == (2, f"error: {said}\n")
