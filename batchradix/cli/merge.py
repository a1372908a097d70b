"""``batchradix merge``: the parts of a table that several workers wrote, joined."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from batchradix.cli import options as shared


def merge(
    output: Annotated[
        Path,
        typer.Argument(metavar="OUTPUT", help="The table to write: .arrow .parquet .jsonl .csv."),
    ],
    parts: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="PARTS", help="The parts, in any order; those that lie beside OUTPUT."
        ),
    ] = None,
    allow_failures: Annotated[
        str, typer.Option(help="Share of failed rows that still exits 0, such as 0.1%.")
    ] = "0",
    json_summary: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Join the parts that `batchradix run --shard` wrote into the table that one run writes.

    Parts are looked for as OUTPUT.1-of-4.arrow and so on; all have to be there. Exit codes: 0 all
    rows ok, 1 some failed, 2 parts are missing or not of one job, 3 no row is ok or the output
    cannot be written, 4 the output is held by another run.
    """
    from batchradix import pipeline

    share = shared.parse_share(allow_failures, "--allow-failures")
    merged = pipeline.merge(output, parts or ())
    if json_summary:
        typer.echo(json.dumps(merged.to_json(), ensure_ascii=False))
    else:
        rows = f"{merged.num_rows:,} rows of {merged.num_parts:,} parts"
        counts = ", ".join(
            f"{count:,} {status}"
            for status, count in merged.counts.items()
            if count or status == "ok"
        )
        typer.echo(f"{rows}: {counts}; {merged.output}")
    raise typer.Exit(merged.exit_code(share))
