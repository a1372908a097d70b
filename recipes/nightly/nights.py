"""Plays three nights: the rows change by day, and each night runs what is new.

    python nights.py --rows 8

The job file runs as it is, on a copy of the recipe in a folder of its own.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
Rows = list[dict[str, str]]


def nights(rows: Sequence[Mapping[str, str]]) -> list[tuple[str, Rows]]:
    """What happened by day and the rows that the night finds, three times.

    Two rows are kept back for the second night, one for the third.
    """
    first = [dict(row) for row in rows[:-3]]
    second = [dict(row) for row in (*first[1:], *rows[-3:-1])]
    second[0]["text"] = second[0]["text"].replace("Copyright:", "Copyright (C)", 1) + "\n"
    third = [dict(row) for row in (*reversed(second[:-1]), rows[-1])]
    for row in third:
        if row["id"] == second[0]["id"]:
            row["text"] = first[1]["text"]
    return [
        (f"{len(first)} rows", first),
        ("1 removed, 1 edited, 2 added", second),
        ("1 removed, 1 added, the edit undone, the order reversed", third),
    ]


def run_night(folder: Path, rows: Rows, options: Sequence[str]) -> dict[str, Any]:
    """The summary of one run of the job file."""
    with open(folder / "notices.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    command = ["-m", "batchradix", "run", str(folder / "job.toml"), "--json", "--quiet", *options]
    ran = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    if ran.returncode not in (0, 1):
        sys.exit(f"the night ended with exit code {ran.returncode}")
    summary: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return summary


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Plays three nights of the job file.")
    parser.add_argument("--rows", type=int, default=12, help="of notices.jsonl; 5 or more")
    parser.add_argument("--model", help="instead of the job file's")
    options = parser.parse_args(arguments)
    lines = (HERE / "notices.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[: options.rows]]
    if len(rows) < 5:
        parser.error("--rows must be 5 or more")
    with tempfile.TemporaryDirectory() as name:
        for recipe in ("nightly", "debian_copyrights"):
            shutil.copytree(HERE.parent / recipe, Path(name) / recipe)
        more = ["--model", options.model] if options.model else []
        for number, (day, now) in enumerate(nights(rows), 1):
            found = run_night(Path(name) / "nightly", now, more)
            kept = found["resumed_rows"]
            print(
                f"night {number}: {day}: {found['rows'] - kept} generated, {kept} kept, "
                f"{found['completion_tokens']:,} answer tokens in the table"
            )


if __name__ == "__main__":
    main()
