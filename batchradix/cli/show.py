"""``batchradix show``: answers beside what they answer."""

from __future__ import annotations

import os
import shutil
import sys
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from batchradix.errors import OptionError

_WIDTH_WITHOUT_TERMINAL = 160


def show(
    results: Annotated[
        Path, typer.Argument(metavar="OUT", help="A result file, finished or not, of any format.")
    ],
    status: Annotated[
        str, typer.Option("--status", help="Only rows that are ok, truncated or error: a,b.")
    ] = "",
    id: Annotated[str | None, typer.Option("--id", help="Only the row of this id.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", help="The first N rows; 0 for all.")] = 20,
    columns: Annotated[
        str | None,
        typer.Option("--columns", help="Columns and fields to show: id,total,value.kind."),
    ] = None,
    wrong: Annotated[
        bool, typer.Option("--wrong", help="Only rows whose right answer is another one.")
    ] = False,
    gold: Annotated[
        str | None, typer.Option("--gold", help="The column of right answers; that of the run.")
    ] = None,
    input: Annotated[
        str | None,
        typer.Option("--input", help="The file of the rows, where it has moved since the run."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a row, with all columns.")
    ] = False,
) -> None:
    """Show answers beside the rows that they answer.

    Of a run that has not finished its table, the rows that it has committed are shown. Input
    columns come from the table where it kept them, else from the file that the run read.
    """
    from batchradix import pipeline
    from batchradix.report.show import arranged, lacks, print_layout, to_json

    if limit < 0:
        raise OptionError(f"--limit must be 0 or more, not {limit}")
    names = None if columns is None else [c.strip() for c in columns.split(",") if c.strip()]
    wanted = pipeline.Wanted(
        statuses=tuple(one.strip() for one in status.split(",") if one.strip()),
        id=id,
        wrong=wrong,
        gold=gold,
        input=input,
    )
    shown = pipeline.look(results, wanted, names)
    rows = islice(shown.rows, limit or None)
    missing, last = list(names or ()), None
    if as_json:
        for row in rows:
            missing, last = [name for name in missing if lacks(row, name)], row
            chosen = row if names is None else arranged([row], names).rows[0]
            order = chosen if names is None else names
            typer.echo(to_json({name: chosen.get(name) for name in order}))
    else:
        listed = list(rows)
        missing = [name for name in missing if all(lacks(row, name) for row in listed)]
        last = listed[-1] if listed else None
        if listed and not missing:
            width, is_terminal = terminal_width()
            print_layout(arranged(listed, names), width=width, is_terminal=is_terminal)
        elif not listed:
            typer.echo("no such rows")
    if shown.note:
        typer.echo(shown.note, err=True)
    if missing and last is not None:
        raise OptionError(
            f"--columns: there is no column or field {missing[0]!r}; there are "
            f"{', '.join(map(str, last))}, and fields of value"
        )


def terminal_width() -> tuple[int, bool]:
    """How many characters a line of standard output takes, and whether that is a terminal."""
    is_terminal = sys.stdout.isatty()
    if is_terminal or os.environ.get("COLUMNS", "").isdecimal():
        return max(20, shutil.get_terminal_size().columns), is_terminal
    return _WIDTH_WITHOUT_TERMINAL, False
