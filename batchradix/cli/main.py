"""Registers the commands and turns errors into sentences and exit codes."""

from __future__ import annotations

import os
import sys

import typer

from batchradix._version import VERSION
from batchradix.cli import models, plan, preview, run
from batchradix.errors import BatchradixError

app = typer.Typer(
    name="batchradix",
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
app.command("plan")(plan.plan)
app.command("preview")(preview.preview)
app.command("models")(models.models)


def _silence_closed_stdout() -> None:
    """Keeps the interpreter from complaining when it flushes a closed standard output."""
    try:
        sys.stdout.flush()
    except (BrokenPipeError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def main() -> None:
    """Entry point of the ``batchradix`` command."""
    code = 0
    try:
        app(standalone_mode=True)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1 if stop.code else 0
    except BatchradixError as error:
        typer.echo(f"error: {error}", err=True)
        code = error.exit_code
    except BrokenPipeError:
        code = 0
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        code = 130
    except MemoryError:
        typer.echo(
            "error: memory ran out; lower --batch-size or --kv-tokens, or use a smaller model",
            err=True,
        )
        code = 3
    _silence_closed_stdout()
    sys.exit(code)
