"""The ledger of runs and the metrics file."""

from __future__ import annotations

import re
import threading
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchradix.report import history
from batchradix.report.history import SCHEMA, add_run, history_file, read_runs
from batchradix.report.prometheus import metrics_text, write_metrics
from batchradix.report.summary import Summary

RUN = {"started": datetime(2026, 1, 2, tzinfo=UTC), "exit_code": 1, "rows": 3, "unknown": 4}


def test_runs_are_appended_in_the_ledgers_columns(tmp_path: Path) -> None:
    path = tmp_path / "new" / "history.parquet"
    add_run(path, RUN)
    add_run(path, {**RUN, "exit_code": 0})
    found = read_runs(path)
    assert found.schema == SCHEMA
    assert found["exit_code"].to_pylist() == [1, 0]
    assert found["model"].to_pylist() == [None, None]


def test_a_ledger_with_other_columns_is_read_in_these(tmp_path: Path) -> None:
    path = tmp_path / "history.parquet"
    pq.write_table(pa.table({"rows": pa.array([5], pa.int32()), "gone": ["x"]}), path)
    add_run(path, RUN)
    assert read_runs(path)["rows"].to_pylist() == [5, 3]


def test_a_damaged_ledger_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "history.parquet"
    path.write_bytes(b"no parquet")
    add_run(path, RUN)
    assert len(read_runs(path)) == 1
    assert (tmp_path / "history.parquet.damaged").read_bytes() == b"no parquet"


def test_the_oldest_runs_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_RUNS", 2)
    for rows in range(4):
        add_run(tmp_path / "h.parquet", {"rows": rows})
    assert read_runs(tmp_path / "h.parquet")["rows"].to_pylist() == [2, 3]


def test_runs_that_end_together_are_all_noted(tmp_path: Path) -> None:
    path = tmp_path / "h.parquet"
    threads = [threading.Thread(target=add_run, args=(path, {"rows": i})) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(read_runs(path)["rows"].to_pylist()) == list(range(8))


def test_where_the_ledger_is_depends_on_the_environment_alone(tmp_path: Path) -> None:
    assert history_file({"BATCHRADIX_HISTORY": "off", "HOME": str(tmp_path)}) is None
    assert history_file({"BATCHRADIX_HISTORY": "/x/h.parquet"}) == Path("/x/h.parquet")
    assert history_file({"XDG_STATE_HOME": "/s"}) == Path("/s/batchradix/history.parquet")
    home = history_file({"HOME": str(tmp_path)})
    assert home == tmp_path / ".local" / "state" / "batchradix" / "history.parquet"
    assert history_file({}) is None
    assert history_file({"HOME": "/nowhere/at/all"}) is None


def test_metrics_are_gauges_with_escaped_labels(tmp_path: Path) -> None:
    text = metrics_text(Summary(rows=3, ok=2, errors=1, run_s=1.5), 1, 12.5, 'a"b\\c\nd')
    sample = re.compile(r'batchradix_\w+\{job="a\\"b\\\\c\\nd"(,\w+="\w+")?\} [0-9.]+')
    lines = text.splitlines()
    assert all(line.startswith("# ") or sample.fullmatch(line) for line in lines)
    assert 'batchradix_rows{job="a\\"b\\\\c\\nd",status="ok"} 2' in lines
    assert 'batchradix_seconds{job="a\\"b\\\\c\\nd",part="run"} 1.5' in lines
    write_metrics(tmp_path / "m.prom", text)
    assert [path.name for path in tmp_path.iterdir()] == ["m.prom"]
