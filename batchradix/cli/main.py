"""Registers the commands and turns errors into sentences and exit codes."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import Any

import typer
from typer.core import TyperGroup

from batchradix._version import VERSION
from batchradix.cli import (
    bench_attention,
    check,
    diff,
    history,
    merge,
    models,
    plan,
    preview,
    report,
    run,
    show,
)
from batchradix.cli.options import flag
from batchradix.errors import BatchradixError


class _Commands(TyperGroup):
    """Ends quietly when the reader of standard output, such as head, has had enough."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise typer.Exit from None


app = typer.Typer(
    name="batchradix",
    cls=_Commands,
    help="Run an LLM over a table: every shared prompt prefix is computed once, "
    "every answer is typed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"batchradix {VERSION}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    del version


app.command("run")(run.run)
app.command("merge")(merge.merge)
app.command("check")(check.check)
app.command("plan")(plan.plan)
app.command("preview")(preview.preview)
app.add_typer(models.models, name="models")
app.command("show")(show.show)
app.command("diff")(diff.diff)
app.command("bench-attention")(bench_attention.bench_attention)
app.command("history")(history.history)
app.command("report")(report.report)


def _open_missing_streams() -> None:
    """Gives a process that was started with closed standard streams null ones.

    Else the first files it opens, its lock among them, would take the numbers 0 to 2.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # file names need not be UTF-8
            stream.reconfigure(errors="backslashreplace")


def _silence_closed_streams() -> None:
    """Keeps the interpreter from failing when it flushes streams whose reader has gone."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def _say(text: str) -> None:
    with suppress(OSError, ValueError):
        typer.echo(text, err=True)


def main() -> None:
    """Entry point of the ``batchradix`` command."""
    _open_missing_streams()
    # Before torch is loaded. Threads that spin while they wait for each other starve where another
    # process wants the cores: that made runs ten times as long, and gains little where none does.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    code = 0
    try:
        app(standalone_mode=True)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1 if stop.code else 0
    except BatchradixError as error:
        _say(f"error: {error.spelt(flag)}")
        code = error.exit_code
    except OSError as error:
        where = "standard output" if error.filename is None else error.filename
        _say(f"error: {where} cannot be used: {error.strerror or error}")
        code = 3
    except KeyboardInterrupt:
        _say("stopped")
        code = 130
    except MemoryError:
        _say("error: memory ran out; lower --batch-size or --kv-tokens, or use a smaller model")
        code = 3
    _silence_closed_streams()
    sys.exit(code)
