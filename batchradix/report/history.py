"""The ledger of runs: one Parquet file with a row for each run of this user, whatever its end."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

MAX_RUNS = 10_000  # the oldest leave

SCHEMA = pa.schema(
    [
        ("started", pa.timestamp("us", tz="UTC")),
        ("seconds", pa.float64()),
        ("exit_code", pa.int32()),
        ("error", pa.string()),
        ("input", pa.string()),
        ("output", pa.string()),
        ("model", pa.string()),
        ("rows", pa.int64()),
        ("ok", pa.int64()),
        ("truncated", pa.int64()),
        ("errors", pa.int64()),
        ("rows_left", pa.int64()),
        ("resumed_rows", pa.int64()),
        ("prompt_tokens", pa.int64()),
        ("distinct_tokens", pa.int64()),
        ("computed_tokens", pa.int64()),
        ("completion_tokens", pa.int64()),
        ("decode_steps", pa.int64()),
        ("forward_steps", pa.int64()),
        ("peak_kv_tokens", pa.int64()),
        ("peak_rss_bytes", pa.int64()),
        ("run_s", pa.float64()),
        ("answer_tokens", pa.float64()),
        ("predicted_computed_tokens", pa.int64()),
        ("predicted_recomputed_tokens", pa.int64()),
        ("predicted_decode_steps", pa.int64()),
        ("predicted_forward_steps", pa.int64()),
        ("predicted_peak_kv_tokens", pa.int64()),
        ("predicted_seconds", pa.float64()),
        ("predicted_answer_tokens", pa.float64()),
        ("version", pa.string()),
        ("host", pa.string()),
        ("pid", pa.int64()),
    ]
)


def history_file(environ: Mapping[str, str] | None = None) -> Path | None:
    """Where the ledger is; None where none is kept.

    ``BATCHRADIX_HISTORY`` (``off`` for none), else ``XDG_STATE_HOME/batchradix``, else
    ``~/.local/state/batchradix``; none without a home folder.
    """
    environ = os.environ if environ is None else environ  # datasets puts another object there
    chosen = environ.get("BATCHRADIX_HISTORY")
    if chosen:
        return None if chosen == "off" else Path(chosen).expanduser().absolute()
    if state := environ.get("XDG_STATE_HOME"):
        return Path(state).absolute() / "batchradix" / "history.parquet"
    home = environ.get("HOME")
    if home and Path(home).is_dir():
        return Path(home) / ".local" / "state" / "batchradix" / "history.parquet"
    return None


def add_run(path: Path, run: Mapping[str, Any]) -> None:
    """Appends one run; columns that ``run`` lacks are null, what is no column is left out.

    Runs that end at the same time wait for each other. A ledger that is no Parquet file is set
    aside. Raises `OSError` when it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    row = pa.Table.from_pylist([{name: run.get(name) for name in SCHEMA.names}], schema=SCHEMA)
    with _locked(path):
        table = row
        if path.exists():
            try:
                table = pa.concat_tables([read_runs(path), row])
            except (pa.ArrowException, OSError):
                os.replace(path, path.with_name(path.name + ".damaged"))
        table = table.slice(max(0, len(table) - MAX_RUNS))
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            pq.write_table(table, temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def read_runs(path: Path) -> pa.Table:
    """All runs of a ledger, oldest first, in the columns of `SCHEMA`.

    Raises `OSError` or `pa.ArrowException` when it cannot be read.
    """
    found = pq.read_table(path, partitioning=None)
    columns = [
        found.column(column.name).cast(column.type)
        if column.name in found.column_names
        else pa.nulls(len(found), column.type)
        for column in SCHEMA
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    fd = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
