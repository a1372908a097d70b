"""``batchradix run``: a table of prompts in, a table of typed answers out."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from batchradix.cli import options as shared
from batchradix.config import EngineOptions, OutputOptions, RunConfig, SamplingOptions
from batchradix.errors import OptionError

if TYPE_CHECKING:
    from batchradix.report.summary import Summary


def run(
    input: shared.Input,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The table to write: .arrow .parquet .jsonl .csv."),
    ] = None,
    model: shared.Model = None,
    schema: shared.Schema = None,
    template: shared.Template = None,
    chat: shared.Chat = False,
    instruction: shared.Instruction = None,
    column: shared.Column = None,
    system: shared.System = None,
    null: shared.Null = None,
    id_column: shared.IdColumn = None,
    keep: Annotated[
        str | None,
        typer.Option("--keep", help="Input columns to carry over: a,b,c or all."),
    ] = None,
    limit: shared.Limit = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Most tokens of an answer; the rest of the context up to 1024."),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling; 1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Only the k likeliest tokens; 0 is off.")] = 0,
    min_p: Annotated[float, typer.Option(help="Least share of the likeliest; 0 is off.")] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Over prompt and answer; 1 is off.")
    ] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Over the answer; 0 is off.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="Over the answer; 0 is off.")] = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="For temperature above 0; 0 if not given.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="Ends an answer; may be given again.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    attention: Annotated[str, typer.Option(help="auto or torch.")] = "auto",
    batch_size: Annotated[
        int | None, typer.Option(help="Most rows that decode together; 64.")
    ] = None,
    prefill_tokens: Annotated[
        int | None, typer.Option(help="Most prompt tokens of one step; 512.")
    ] = None,
    kv_tokens: Annotated[
        int | None, typer.Option(help="Tokens whose keys and values are kept at once.")
    ] = None,
    kv_memory: Annotated[str | None, typer.Option(help="The same as memory, such as 4GiB.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; all cores.")] = None,
    no_prefix_cache: Annotated[
        bool, typer.Option("--no-prefix-cache", help="Compute every prompt alone.")
    ] = False,
    no_forced_text: Annotated[
        bool,
        typer.Option("--no-forced-text", help="Sample what the schema forces too; slower."),
    ] = False,
    speculate: Annotated[
        str,
        typer.Option(
            help="Guess answer tokens that copy earlier text: off, auto or how many a step."
        ),
    ] = "off",
    unnest: Annotated[
        bool, typer.Option("--unnest", help="One column a field instead of `value`.")
    ] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Throw away what an earlier run committed.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an earlier run (the default).")
    ] = False,
    allow_failures: Annotated[
        str, typer.Option(help="Share of failed rows that still exits 0, such as 0.1%.")
    ] = "0",
    json_summary: Annotated[
        bool, typer.Option("--json", help="End with one JSON object on standard output.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only errors and the end.")] = False,
) -> None:
    """Run every row of INPUT through the model and write one table of answers.

    Rows with a `prompt` column are raw prompts, with a `messages` column chats; else give
    --template, or --instruction with --column. Columns named as the sampling options
    (max_tokens, temperature, seed, stop, ...) override them for their row. Exit codes: 0 all
    ok, 1 finished with failed rows, 2 refused before the model loads, 3 failed, 4 the output
    is held by another run, 130 or 143 stopped by a signal.
    """
    if restart and resume:
        raise OptionError("--restart and --resume exclude each other")
    config = RunConfig(
        input=input,
        model=shared.named_model(model),
        schema=schema,
        id_column=id_column,
        limit=limit,
        prompt=shared.prompt_options(template, chat, instruction, column, system, null),
        sampling=SamplingOptions(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            seed=seed,
            stop=tuple(stop or ()),
        ),
        engine=EngineOptions(
            dtype=dtype,  # type: ignore[arg-type]  # checked by EngineOptions
            device=device,
            attention=attention,
            batch_size=batch_size,
            prefill_tokens=prefill_tokens,
            kv_tokens=kv_tokens,
            kv_memory_bytes=shared.parse_size(kv_memory, "--kv-memory"),
            prefix_cache=not no_prefix_cache,
            forced_text=not no_forced_text,
            speculate=shared.parse_speculate(speculate),
            num_threads=threads,
        ),
        output=OutputOptions(
            path=output or _default_output(input),
            keep="all" if keep == "all" else tuple(c for c in (keep or "").split(",") if c),
            unnest=unnest,
            restart=restart,
            allow_failures=shared.parse_share(allow_failures, "--allow-failures"),
        ),
    )
    raise typer.Exit(_run(config, model is None, json_summary, quiet))


def _default_output(input: str) -> Path:
    """``answers.arrow`` beside nothing in particular: jobs.parquet → jobs.answers.arrow."""
    if input == "-" or any(mark in input for mark in "*?["):
        return Path("answers.arrow")
    path = Path(input)
    return Path(f"{path.name.split('.')[0] or path.name}.answers.arrow")


@contextmanager
def _stop_signals() -> Iterator[Callable[[], int | None]]:
    """SIGINT and SIGTERM end the run after the step; a second one ends it at once.

    The first one ends it at once too while rows are still being read and weights loaded: until
    what it yields has been asked, no answer could be lost. Ends with code 130 or 143.
    """
    received: list[int] = []
    is_asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        received.append(number)
        if not is_asked or len(received) > 1:
            raise KeyboardInterrupt

    def stop_requested() -> int | None:
        nonlocal is_asked
        is_asked = True
        return received[0] if received else None

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop_requested
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(128 + (received[0] if received else signal.SIGINT)) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(config: RunConfig, is_default_model: bool, json_summary: bool, quiet: bool) -> int:
    # Read by OpenMP when torch loads: threads that spin while they wait stall on busy cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from batchradix import pipeline
    from batchradix.report.progress import choose_progress

    progress = choose_progress(quiet=quiet)
    if is_default_model:
        progress.warn(
            f"no --model given: {config.model} is a small demonstration model, its answers "
            "are often wrong"
        )
    with _stop_signals() as stop_requested:
        outcome = pipeline.run(
            config,
            progress=progress,
            stop_requested=stop_requested,
            warnings=["demonstration model: none was named"] if is_default_model else [],
        )
    with suppress(BrokenPipeError):  # a reader such as head has left; the table is complete
        print_summary(outcome.summary, json_summary)
    return outcome.summary.exit_code(config.output.allow_failures)


def print_summary(summary: Summary, json_summary: bool) -> None:
    """The end of a run on standard output: one JSON object, or lines for a person."""
    if json_summary:
        typer.echo(json.dumps(summary.to_json(), ensure_ascii=False))
        return
    for name, text in summary.table():
        typer.echo(f"{name:>9}  {text}")
    typer.echo(summary.last_line())
