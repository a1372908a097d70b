"""``batchradix models``: the models that can be named without a path."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer


def models(
    json_list: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the models that --model knows by name."""
    from batchradix.checkpoint.listed import LISTED_MODELS

    listed = list(LISTED_MODELS.values())
    if json_list:
        typer.echo(json.dumps([asdict(model) for model in listed], default=str))
        return
    for model in listed:
        typer.echo(f"{model.name}  {model.size_bytes / 2**20:,.0f} MiB  {model.license}")
        typer.echo(f"    {model.description}")
    typer.echo("Also: a folder, a .gguf file, owner/repo[@revision], owner/repo:Q4_K_M")
