"""``batchradix diff``: two tables of results, row by row and field by field."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchradix.cli.show import terminal_width
from batchradix.errors import OptionError

if TYPE_CHECKING:
    from batchradix.report.diff import TableDiff


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A result file of any format.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another, of any format.")],
    columns: Annotated[
        str | None, typer.Option("--columns", help="Compare only these: status,total,kind.")
    ] = None,
    ignore: Annotated[
        str | None, typer.Option("--ignore", help="Compare all but these: text,completion_tokens.")
    ] = None,
    tolerance: Annotated[
        str, typer.Option("--tolerance", help="How far two numbers may be apart, such as 0.001.")
    ] = "0",
    limit: Annotated[
        int, typer.Option("--limit", "-n", help="Show the first N rows that differ.")
    ] = 10,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Compare two tables of results by id, field by field.

    The tables may have different formats and orders. Compared are all columns but `row` and
    `cached_tokens`, which say where a row stands. Exit codes: 0 they are equal, 1 they differ, 2
    one cannot be read.
    """
    from batchradix import pipeline
    from batchradix.report.show import to_json

    if limit < 0:
        raise OptionError(f"--limit must be 0 or more, not {limit}")
    table = pipeline.diff(
        a,
        b,
        columns=_names(columns),
        ignore=_names(ignore),
        tolerance=_tolerance(tolerance),
        most_shown=limit,
    )
    if as_json:
        typer.echo(to_json(table.to_json()))
    else:
        _print(table)
    raise typer.Exit(0 if table.is_equal else 1)


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(one.strip() for one in (text or "").split(",") if one.strip())


def _tolerance(text: str) -> Decimal:
    try:
        found = Decimal(text)
    except InvalidOperation:
        found = Decimal(-1)
    if not (found.is_finite() and found >= 0):
        raise OptionError(f"--tolerance must be a number of at least 0, not {text!r}")
    return found


def _print(table: TableDiff) -> None:
    from batchradix.report.show import Layout, print_layout
    from batchradix.visible import one_line

    width, is_terminal = terminal_width()
    for name, text in table.lines():
        typer.echo(f"{name:>9}  {one_line(text)}")
    differing = {name: one for name, one in table.fields.items() if one.different}
    if differing:
        typer.echo()
        fields = [
            {
                "field": name,
                "equal": one.equal,
                "different": one.different,
                "largest difference": one.largest,
            }
            for name, one in differing.items()
        ]
        print_layout(Layout(tuple(fields[0]), tuple(fields)), width=width, is_terminal=is_terminal)
    if table.first:
        typer.echo()
        rows = [
            {"id": row.id, "field": name, "A": a, "B": b}
            for row in table.first
            for name, (a, b) in row.fields.items()
        ]
        print_layout(Layout(tuple(rows[0]), tuple(rows)), width=width, is_terminal=is_terminal)
