"""``batchradix history``: the runs of this user, from the ledger."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from batchradix.errors import InputError, OptionError


def history(
    limit: Annotated[int, typer.Option("--limit", "-n", help="The last N runs; 0 for all.")] = 20,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a run, with all columns.")
    ] = False,
) -> None:
    """List the last runs, the newest last.

    They are rows of one Parquet file: `BATCHRADIX_HISTORY`, or
    `~/.local/state/batchradix/history.parquet`. `BATCHRADIX_HISTORY=off` keeps none.
    """
    import pyarrow as pa

    from batchradix.report.history import history_file, read_runs

    if limit < 0:
        raise OptionError(f"--limit must be 0 or more, not {limit}")
    path = history_file()
    if path is None:
        raise OptionError("no history is kept here: BATCHRADIX_HISTORY is off, or there is no HOME")
    try:
        runs = read_runs(path) if path.exists() else None
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"the history {path} cannot be read: {error}") from None
    rows = [] if runs is None else runs.slice(max(0, len(runs) - limit) if limit else 0).to_pylist()
    for run in rows:
        started = run["started"].astimezone()
        if as_json:
            typer.echo(json.dumps({**run, "started": started.isoformat()}, ensure_ascii=False))
            continue
        left = f", {run['rows_left']:,} left" if run["rows_left"] else ""
        typer.echo(
            f"{started:%Y-%m-%d %H:%M}  exit {run['exit_code']:>3}  {run['seconds']:>8,.1f} s  "
            f"{run['rows']:,} rows: {run['ok']:,} ok, {run['errors']:,} errors, "
            f"{run['truncated']:,} truncated{left}  {run['output'] or ''}"
            + (f"  {run['error']}" if run["error"] else "")
        )
    if not rows and not as_json:
        typer.echo("no runs yet")
