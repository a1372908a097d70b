"""``batchradix report``: the trace of a run, drawn and in numbers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from batchradix.errors import InputError, OptionError


def report(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="The output of a run with --trace, or its work folder."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The page to write; RUN.report.html in the current folder."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; write a page only with -o.")
    ] = False,
) -> None:
    """Draw the trace of a run: one HTML file with timeline, hit share and the tree of prompts.

    `batchradix run --trace` writes it beside the output. A run that goes on, was killed or was
    resumed can be drawn too.
    """
    from batchradix.report.figures import figures
    from batchradix.report.page import lines, page
    from batchradix.report.trace import read_trace
    from batchradix.sink.folder import WORK_SUFFIX

    if output is not None:
        check_page_name("output", output)
    trace = _trace_of(run)
    runs = read_trace(trace)
    if not runs:
        raise InputError(f"the trace of {run} is empty: {_why_empty(trace)}")
    name = run.absolute().name.removesuffix(WORK_SUFFIX)
    if output is None and not as_json:
        output = Path(f"{Path(name).stem}.report.html")
    if output is not None:
        write_page(output, page(runs, name.encode(errors="backslashreplace").decode()))
    numbers = figures(runs)
    if as_json:
        typer.echo(json.dumps(numbers, ensure_ascii=False))
        return
    for key, text in [*lines(numbers), ("page", str(output))]:
        typer.echo(f"{key:>9}  {text}")


def _trace_of(run: Path) -> Path:
    """The folder with the trace of an output, or of a work folder; or that folder itself."""
    from batchradix.sink.folder import TRACE_FOLDER, WORK_SUFFIX

    path = Path(os.path.realpath(run))
    beside = path.with_name(path.name + WORK_SUFFIX)
    for folder in (beside / TRACE_FOLDER, path / TRACE_FOLDER):
        if folder.is_dir():
            return folder
    if path.is_dir() and path.name == TRACE_FOLDER:
        return path
    if path.exists() or beside.exists():
        raise InputError(f"{run} has no trace; run with --trace to have one")
    raise InputError(f"{run} does not exist; give the output of a run with --trace")


def _why_empty(trace: Path) -> str:
    from batchradix.sink.folder import came_to_its_end

    if came_to_its_end(trace.parent):
        return "its run had no row to compute"
    return "its run has yet to plan its rows, or was ended before; run the same command again"


def check_page_name(option: str, name: Path) -> None:
    """Raises `OptionError` for a page that is not named as one."""
    if name.suffix.lower() not in (".html", ".htm"):
        raise OptionError(f"`{option}` is an HTML page, so its name ends in .html, unlike {name}")


def write_page(output: Path, text: str) -> None:
    """Raises `OptionError` where it cannot be written."""
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{output} cannot be written: {error.strerror or error}") from None
