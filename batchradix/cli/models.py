"""``batchradix models``: which models there are, what they need, and where they lie."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchradix.config import EngineOptions

if TYPE_CHECKING:
    from batchradix.pipeline.models import ListedEntry, ModelCheck, Needs

Name = Annotated[
    str, typer.Argument(metavar="MODEL", help="As --model takes it.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

models = typer.Typer(
    help="List, fetch, find and check models; alone, list them.", pretty_exceptions_enable=False
)


@models.callback(invoke_without_command=True)
def _all(context: typer.Context, json_list: AsJson = False) -> None:
    if context.invoked_subcommand is None:
        list_models(json_list)


@models.command("list")
def list_models(json_list: AsJson = False) -> None:
    """List models by name, what they need, and whether this machine has the memory for them."""
    from batchradix.pipeline import models as known

    entries = known.list_models()
    if json_list:
        typer.echo(json.dumps([entry.to_json() for entry in entries]))
        return
    titles = {
        "listed": "By a short name",
        "cache": "In the cache of the Hugging Face hub",
        "hub": "On the hub; others of these families run too",
    }
    for place, title in titles.items():
        some = [entry for entry in entries if entry.place == place]
        if some:
            typer.echo(f"{title}:")
        for entry in some:
            typer.echo("".join(f"  {line}\n" for line in _entry_lines(entry)), nl=False)
    typer.echo("Also: a folder, a .gguf file, owner/repo[@revision], owner/repo:Q4_K_M")


def _entry_lines(entry: ListedEntry) -> Iterator[str]:
    if entry.needs is None:
        yield entry.name
        yield f"    cannot be run: {entry.problem}"
        return
    terms = [entry.license] if entry.license else []
    terms += ["terms to accept"] if entry.is_gated else []
    terms += ["fetched"] if entry.path is not None else []
    yield f"{entry.name:<38} {_fit(entry.needs):<65} {', '.join(terms)}".rstrip()
    if entry.description:
        yield f"    {entry.description}"


def _fit(needs: Needs) -> str:
    size = f"{_parameters(needs)}, {_gib(needs.weight_bytes)} in {needs.dtype}"
    if not needs.fits:
        return f"{size}: too large here"
    return f"{size}: room for {_short(needs.kv_tokens)} KV tokens"


@models.command("pull")
def pull(name: Name) -> None:
    """Fetch a model, and print where it lies.

    Exit codes: 0 it is here, 2 it cannot be had.
    """
    from batchradix.checkpoint.checkpoint import open_checkpoint

    typer.echo(open_checkpoint(name, notify=_tell).path)


@models.command("path")
def path(name: Name) -> None:
    """Print where a model lies on this machine; nothing is fetched.

    Exit codes: 0 it is here, 2 it is not.
    """
    from batchradix.checkpoint.resolve import locate

    typer.echo(locate(name, revision=None, notify=_tell, local_only=True).path)


@models.command("check")
def check(
    name: Name,
    dtype: Annotated[
        str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")
    ] = "auto",
    kv_dtype: Annotated[
        str, typer.Option("--kv-dtype", help="auto, or fp8: keys and values in 8 bits.")
    ] = "auto",
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Say what a model is and needs, and what of it would not run, without its weights.

    Exit codes: 0 it runs here, 1 something is amiss, 2 it cannot be had or run.
    """
    from batchradix.pipeline.models import check_model

    chosen: dict[str, Any] = {"dtype": dtype, "kv_dtype": kv_dtype, "device": device}
    found = check_model(name, EngineOptions(**chosen), notify=_tell)
    if as_json:
        typer.echo(json.dumps(found.to_json()))
    else:
        for title, text in _check_lines(found):
            typer.echo(f"{title:<14}{text}")
    if found.problems:
        raise typer.Exit(1)


def _check_lines(found: ModelCheck) -> Iterator[tuple[str, str]]:
    checkpoint, needs = found.checkpoint, found.needs
    config = checkpoint.config
    yield "model", checkpoint.name + (f" at {checkpoint.revision}" if checkpoint.revision else "")
    yield (
        "files",
        (
            f"{checkpoint.path}, {_gib(found.stored_bytes)} of {checkpoint.format}"
            + ("" if found.is_fetched else " on the hub, not fetched yet")
        ),
    )
    yield (
        "architecture",
        (
            f"{config.architecture}, {_parameters(needs)} in {config.num_layers} layers, "
            f"a vocabulary of {config.vocab_size:,}"
        ),
    )
    yield "context", f"{config.context_length:,} tokens"
    yield (
        "memory",
        (
            f"{_gib(needs.weight_bytes)} of weights in {needs.dtype}, {needs.kv_token_bytes:,} "
            f"bytes of keys and values a token; room for {needs.kv_tokens:,} tokens here"
        ),
    )
    style = found.tool_style
    has = checkpoint.chat_template is not None
    yield (
        "chat template",
        (("yes" + (f", calls of functions as {style}" if style else "")) if has else "none"),
    )
    yield (
        "tokens",
        (
            f"text begins with {checkpoint.bos_token or 'nothing'}, "
            f"ends with {checkpoint.eos_token or 'nothing'}"
        ),
    )
    for problem in found.problems:
        yield "problem", problem


def _tell(line: str) -> None:
    typer.echo(line, err=True)


def _parameters(needs: Needs) -> str:
    return f"{_short(needs.num_parameters)} parameters"


def _short(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return (
                f"{number / size:.3g}{unit}"
                if number < 1000 * size
                else f"{number / size:,.0f}{unit}"
            )
    return str(number)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:,.1f} GiB"
