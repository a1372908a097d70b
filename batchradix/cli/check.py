"""``batchradix check``: would this job run, and what does it need?"""

from __future__ import annotations

import inspect
from typing import Any

from batchradix.cli.run import run


def check(**options: Any) -> None:
    """Check a job without weights: input, columns, template, schema, model, memory and disk.

    Takes the options of `batchradix run` and writes nothing. Exit codes: 0 the job would run,
    1 some rows would be error rows, 2 it would be refused.
    """
    run(**options, dry_run=True)


_parameters = [
    one
    for one in inspect.signature(run, eval_str=True).parameters.values()
    if one.name != "dry_run"
]
# What typer reads of a command.
check.__signature__ = inspect.Signature(_parameters)  # type: ignore[attr-defined]
check.__annotations__ = {one.name: one.annotation for one in _parameters}
