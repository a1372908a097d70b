"""``batchradix run``: a table of prompts in, a table of typed answers out."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchradix.cli import options as shared
from batchradix.cli.ending import Ending
from batchradix.cli.job_file import fill_dates, today
from batchradix.cli.signals import Interrupted, stop_signals
from batchradix.config import (
    DEFAULT_GRAMMAR_TIMEOUT_S,
    EngineOptions,
    OutputOptions,
    RunConfig,
    SamplingOptions,
    Shard,
)
from batchradix.errors import BatchradixError, OptionError
from batchradix.fleet_options import FleetOptions
from batchradix.report.progress import Progress, choose_progress
from batchradix.trial import TrialOptions

if TYPE_CHECKING:
    from batchradix.report.summary import Summary


def run(
    input: shared.Input,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="The table to write: .arrow .parquet .jsonl .csv; INPUT.answers.arrow in the "
            "current folder.",
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="openai: answer an OpenAI batch file as its API does, failures beside OUTPUT.",
        ),
    ] = None,
    model: shared.Model = None,
    lora: shared.Lora = None,
    schema: shared.Schema = None,
    fields: shared.Fields = None,
    regex: shared.Regex = None,
    grammar: shared.Grammar = None,
    choices: shared.Choices = None,
    tools: shared.Tools = None,
    tool_choice: shared.ToolChoice = None,
    no_parallel_tool_calls: shared.NoParallelToolCalls = False,
    tool_format: shared.ToolFormat = None,
    schema_column: shared.SchemaColumn = None,
    template: shared.Template = None,
    chat: shared.Chat = False,
    instruction: shared.Instruction = None,
    column: shared.Column = None,
    system: shared.System = None,
    null: shared.Null = None,
    reorder_columns: shared.ReorderColumns = False,
    sort_passages: shared.SortPassages = None,
    questions: shared.Questions = None,
    overflow: shared.Overflow = "error",
    chunk_tokens: shared.ChunkTokens = None,
    chunk_overlap: shared.ChunkOverlap = 0,
    combine: shared.Combine = None,
    chat_template: shared.ChatTemplate = None,
    chat_template_kwargs: shared.ChatTemplateKwargs = None,
    thinking: shared.Think = "auto",
    thinking_tokens: shared.ThinkingTokens = None,
    id_column: shared.IdColumn = None,
    date: shared.Date = None,
    shard: Annotated[
        str | None,
        typer.Option(
            help="Run the 2nd of 4 parts with 2/4, into OUTPUT.2-of-4.arrow; `batchradix merge` "
            "joins them."
        ),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option("--keep", help="Input columns to carry over: a,b,c or all."),
    ] = None,
    limit: shared.Limit = None,
    sample: Annotated[
        int | None,
        typer.Option(help="Run N rows chosen over the whole input, and estimate the whole job."),
    ] = None,
    sample_seed: Annotated[
        int | None, typer.Option(help="Chooses the sample; --seed, or 0, if not given.")
    ] = None,
    price_per_hour: Annotated[
        float | None, typer.Option(help="What an hour costs here, for a sample's estimate.")
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(help="Share the job among so many engines on Ray; auto: one a GPU."),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(help="Of a Ray cluster for them, or auto; else Ray starts for this run."),
    ] = None,
    worker_timeout: Annotated[
        str | None,
        typer.Option(help="Replace a worker that takes no step for so long, such as 5m; 15m."),
    ] = None,
    gold: Annotated[
        str | None,
        typer.Option(help="The input column of right answers, to count what is right by field."),
    ] = None,
    max_tokens: shared.MaxTokens = None,
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
    probabilities: Annotated[
        bool,
        typer.Option("--probabilities", help="A column of every choice's probability."),
    ] = False,
    choose: Annotated[
        str,
        typer.Option(help="Among choices: walk (token by token) or joint (the likeliest whole)."),
    ] = "walk",
    retries: Annotated[
        int, typer.Option(help="How often a row with an invalid answer runs again, warmer.")
    ] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    quantize: Annotated[
        str,
        typer.Option(
            help="off; int8: linear layers in 8 bits, less exact; keep: quantised weights as held."
        ),
    ] = "off",
    kv_dtype: Annotated[
        str,
        typer.Option(help="auto, or fp8: keys and values in 8 bits, half the memory, less exact."),
    ] = "auto",
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic", help="Let a row's answer depend, to the last bit, on it alone."
        ),
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    attention: Annotated[
        str, typer.Option(help="auto, torch, cpu (C kernels), triton or flashinfer (GPUs).")
    ] = "auto",
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
    kv_store: Annotated[
        Path | None,
        typer.Option(
            "--kv-store", help="A folder that keeps shared beginnings of prompts for later runs."
        ),
    ] = None,
    kv_store_size: Annotated[
        str | None, typer.Option(help="The most that it may take on disk; 1GiB.")
    ] = None,
    kv_disk: Annotated[
        str, typer.Option(help="Disk for keys and values that the pool is too small for, or off.")
    ] = "off",
    kv_host_memory: Annotated[
        str, typer.Option(help="Beside a GPU: host memory for them instead, or off.")
    ] = "off",
    plan_memory: Annotated[
        str | None, typer.Option(help="Memory that sorting the prompts may take; 256MiB.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; all cores.")] = None,
    no_prefix_cache: Annotated[
        bool, typer.Option("--no-prefix-cache", help="Compute every prompt alone.")
    ] = False,
    no_forced_text: Annotated[
        bool,
        typer.Option("--no-forced-text", help="Sample what the schema forces too; slower."),
    ] = False,
    no_repetition_guard: Annotated[
        bool,
        typer.Option(
            "--no-repetition-guard",
            help="Let answers under a schema go round in circles up to max_tokens.",
        ),
    ] = False,
    keep_truncated: Annotated[
        bool,
        typer.Option(
            "--keep-truncated", help="Keep what truncated answers were closed to; adds `cut`."
        ),
    ] = False,
    grammar_timeout: Annotated[
        float, typer.Option(help="Seconds that compiling a schema's grammar may take.")
    ] = DEFAULT_GRAMMAR_TIMEOUT_S,
    grammar_memory: Annotated[
        str | None,
        typer.Option(help="Memory that it may take; a quarter of the machine's, 4GiB at most."),
    ] = None,
    speculate: Annotated[
        str,
        typer.Option(
            help="Guess answer tokens that copy earlier text: off, auto or how many a step."
        ),
    ] = "off",
    overlap: Annotated[
        str, typer.Option(help="Prepare a step while the device runs the last: auto, on or off.")
    ] = "auto",
    cuda_graphs: Annotated[
        str, typer.Option(help="Replay small steps as CUDA graphs: auto, on or off.")
    ] = "auto",
    unnest: Annotated[
        bool, typer.Option("--unnest", help="One column a field instead of `value`.")
    ] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Throw away what an earlier run committed.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an earlier run (the default).")
    ] = False,
    reuse: Annotated[
        bool,
        typer.Option("--reuse", help="Of a changed job keep rows whose prompt and settings stay."),
    ] = False,
    retry: Annotated[
        str, typer.Option(help="Run an earlier run's failed rows again: error, truncated or both.")
    ] = "",
    errors: Annotated[
        Path | None,
        typer.Option("--errors", help="Write the input rows that failed here, to run them again."),
    ] = None,
    row_timeout: Annotated[
        str | None,
        typer.Option(
            help="Most time for one answer from its first token on: 30s, 5m or 1h30m (s, m, h, d; "
            "seconds without a unit; up to 1e6 s). A row that takes longer is an error row."
        ),
    ] = None,
    abort_after_failures: Annotated[
        int | None, typer.Option(help="Give up after so many error rows; exit code 3.")
    ] = None,
    allow_failures: Annotated[
        str, typer.Option(help="Share of failed rows that still exits 0, such as 0.1%.")
    ] = "0",
    json_summary: Annotated[
        bool, typer.Option("--json", help="End with one JSON object on standard output.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only errors and the end.")] = False,
    log_format: Annotated[
        str, typer.Option(help="Of what is printed while it runs: text or json (lines).")
    ] = "text",
    deadline: Annotated[
        str | None,
        typer.Option(help="Stop cleanly after this time, such as 2h or 90m; code 143."),
    ] = None,
    metrics: Annotated[
        Path | None, typer.Option(help="Write the end of the run as a Prometheus text file.")
    ] = None,
    trace: Annotated[
        bool,
        typer.Option("--trace", help="Write down every step, for `batchradix report`."),
    ] = False,
    on_finish: Annotated[
        str | None,
        typer.Option(help="A shell command for the end; BATCHRADIX_EXIT_CODE tells it which."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, load no weights, write nothing.")
    ] = False,
) -> None:
    """Run every row of INPUT through the model and write one table of answers.

    Rows with a `prompt` column are raw prompts, with a `messages` column chats, requests of an
    OpenAI batch file what they say; else give --template, or --instruction with --column.
    Columns named as the sampling options (max_tokens, temperature, seed, stop, ...) override
    them for their row.

    Exit codes: 0 all ok, 1 finished with failed rows, 2 refused before the model loads, 3 failed,
    4 the output is held by another run, 130, 143 or 129 stopped by a signal.
    """
    from batchradix.sink.formats import output_format

    if restart and resume:
        raise OptionError("--restart and --resume exclude each other")
    date = date or today()  # once: neither midnight nor a set clock parts the files of a run
    table = _dated(output, date) or _default_output(fill_dates(input, date))
    errors, metrics = _dated(errors, date), _dated(metrics, date)
    part = None if shard is None else Shard.parse(shard)
    if part is not None:
        output_format(table)  # of the whole, which is joined later
        table = part.part_of(table, format)
        errors, metrics = (path and part.beside(path) for path in (errors, metrics))
    config = RunConfig(
        input=fill_dates(input, date),
        model=shared.named_model(model),
        lora=lora,
        schema=shared.answers(
            schema,
            fields,
            regex,
            grammar,
            choices,
            tools,
            tool_choice,
            no_parallel_tool_calls,
            tool_format,
        ),
        schema_column=schema_column,
        tool_format=tool_format,
        retries=retries,
        id_column=id_column,
        limit=limit,
        shard=part,
        prompt=shared.prompt_options(
            template, chat, instruction, column, system, null, reorder_columns, sort_passages
        ),
        questions=shared.questions_of(questions),
        long_rows=shared.long_rows(overflow, chunk_tokens, chunk_overlap, combine),
        chats=shared.chat_options(chat_template, chat_template_kwargs, thinking, thinking_tokens),
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
            probabilities=probabilities,
            choose=choose,  # type: ignore[arg-type]  # checked by SamplingOptions
        ),
        engine=EngineOptions(
            dtype=dtype,  # type: ignore[arg-type]  # checked by EngineOptions
            quantize=quantize,  # type: ignore[arg-type]  # checked by EngineOptions
            kv_dtype=kv_dtype,  # type: ignore[arg-type]  # checked by EngineOptions
            deterministic=deterministic,
            device=device,
            attention=attention,
            batch_size=batch_size,
            prefill_tokens=prefill_tokens,
            kv_tokens=kv_tokens,
            kv_memory_bytes=shared.parse_size(kv_memory, "--kv-memory"),
            prefix_cache=not no_prefix_cache,
            forced_text=not no_forced_text,
            repetition_guard=not no_repetition_guard,
            speculate=shared.parse_speculate(speculate),
            overlap=overlap,  # type: ignore[arg-type]  # checked by EngineOptions
            cuda_graphs=cuda_graphs,  # type: ignore[arg-type]  # checked by EngineOptions
            num_threads=threads,
            grammar_timeout_s=grammar_timeout,
            grammar_memory_bytes=shared.parse_size(grammar_memory, "--grammar-memory"),
            row_timeout_s=shared.parse_duration(row_timeout, "--row-timeout"),
            kv_disk_bytes=shared.parse_size_or_off(kv_disk, "--kv-disk"),
            kv_host_memory_bytes=shared.parse_size_or_off(kv_host_memory, "--kv-host-memory"),
            kv_store=kv_store,
            kv_store_bytes=shared.parse_size(kv_store_size, "--kv-store-size"),
            plan_memory_bytes=shared.parse_size(plan_memory, "--plan-memory"),
        ),
        output=OutputOptions(
            path=table,
            format=format,
            keep="all" if keep == "all" else tuple(c for c in (keep or "").split(",") if c),
            unnest=unnest,
            keep_truncated=keep_truncated,
            restart=restart,
            reuse=reuse,
            retry=tuple(one.strip() for one in retry.split(",") if one.strip()),
            failed_rows=errors,
            abort_after_failures=abort_after_failures,
            trace=trace,
            allow_failures=shared.parse_share(allow_failures, "--allow-failures"),
        ),
        fleet=FleetOptions.parse(
            workers, ray_address, shared.parse_duration(worker_timeout, "--worker-timeout")
        ),
        trial=TrialOptions(
            sample=sample, sample_seed=sample_seed, price_per_hour=price_per_hour, gold=gold
        ),
    )
    if log_format not in ("text", "json"):
        raise OptionError(f"--log-format must be text or json, not {log_format!r}")
    as_json = log_format == "json"
    progress = choose_progress(quiet=quiet, as_json=as_json)
    deadline_s = shared.parse_duration(deadline, "--deadline")
    if dry_run:
        raise typer.Exit(_check(config, progress, json_summary))
    if model is None:
        progress.warn(
            f"no --model given: {config.model} is a small demonstration model, its answers "
            "are often wrong"
        )
    from batchradix.report.history import history_file

    ending = Ending(
        config=config,
        # --quiet is about what goes well: what nobody is told here nobody would know.
        warn=choose_progress(quiet=False, as_json=as_json).warn if quiet else progress.warn,
        metrics=metrics,
        command=on_finish,
        history=history_file(),
    )
    raise typer.Exit(_run(config, progress, ending, deadline_s, model is None, json_summary))


def _dated(path: Path | None, date: str) -> Path | None:
    if path is not None and not path.name:
        raise OptionError(f"{path} is a folder; give the name of a file in it")
    return None if path is None else Path(fill_dates(str(path), date))


def _default_output(input: str) -> Path:
    """``answers.arrow`` beside nothing in particular: jobs.parquet → jobs.answers.arrow."""
    if input == "-" or any(mark in input for mark in "*?["):
        return Path("answers.arrow")
    path = Path(input)
    return Path(f"{path.name.split('.')[0] or path.name}.answers.arrow")


def _run(
    config: RunConfig,
    progress: Progress,
    ending: Ending,
    deadline_s: float | None,
    is_default_model: bool,
    json_summary: bool,
) -> int:
    # Read by OpenMP when torch loads: threads that spin while they wait stall on busy cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from batchradix import fleet, pipeline

    try:
        engines = fleet.engines_for(config)
        # Ray prints what it finds wrong; standard output is for the summary alone.
        quiet = nullcontext() if engines is None else redirect_stdout(sys.stderr)
        with stop_signals(deadline_s) as stop_requested, quiet:
            outcome = pipeline.run(
                config,
                progress=progress,
                stop_requested=stop_requested,
                warnings=["demonstration model: none was named"] if is_default_model else [],
                engines=engines,
            )
    except BatchradixError as error:
        ending.close(error.exit_code, None, error.spelt(shared.flag))
        raise
    except Interrupted as stop:
        ending.close(128 + stop.number, None, "stopped")
        typer.echo("stopped", err=True)
        return 128 + stop.number
    except Exception as failure:
        ending.close(3, None, f"{type(failure).__name__}: {failure}")
        raise
    if deadline_s is not None and outcome.summary.stopped_by == signal.SIGTERM:
        progress.message(f"the deadline of {deadline_s:,.0f} s is over")
    code = outcome.summary.exit_code(config.output.allow_failures)
    try:
        print_summary(outcome.summary, json_summary)
    except BrokenPipeError:  # a reader such as head has left; the table is complete
        pass
    except OSError as error:
        progress.warn(
            f"the rows are done, but standard output did not take the summary: "
            f"{error.strerror or error}"
        )
    ending.close(code, outcome.summary)
    return code


def _check(config: RunConfig, progress: Progress, as_json: bool) -> int:
    from batchradix import fleet, pipeline

    checked = pipeline.check(config, progress=progress, engines=fleet.engines_for(config))
    if as_json:
        typer.echo(json.dumps(checked.to_json(), ensure_ascii=False))
        return 1 if checked.num_error_rows else 0
    width = max(len(name) for name, _ in checked.lines)
    for name, text in checked.lines:
        typer.echo(f"{name:>{width}}  {text}")
    return 1 if checked.num_error_rows else 0


def print_summary(summary: Summary, json_summary: bool) -> None:
    """The end of a run on standard output: one JSON object, or lines for a person."""
    if json_summary:
        typer.echo(json.dumps(summary.to_json(), ensure_ascii=False))
        return
    for name, text in summary.table():
        typer.echo(f"{name:>9}  {text}")
    typer.echo(summary.last_line())
