"""``batchradix plan``: what a job shares, before anything is computed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchradix.cli import options as shared
from batchradix.cli.job_file import fill_dates
from batchradix.config import MAX_SHARDS, RunConfig, SamplingOptions

if TYPE_CHECKING:
    from batchradix.pipeline import DrawnPlan
    from batchradix.plan.cached import MemorySummary, PlanSummary


def plan(
    input: shared.Input,
    model: shared.Model = None,
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
    max_tokens: shared.MaxTokens = None,
    chat_template: shared.ChatTemplate = None,
    chat_template_kwargs: shared.ChatTemplateKwargs = None,
    thinking: shared.Think = "auto",
    thinking_tokens: shared.ThinkingTokens = None,
    id_column: shared.IdColumn = None,
    date: shared.Date = None,
    limit: shared.Limit = None,
    shards: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_SHARDS, help="Show how the job parts for so many workers."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", help="An HTML page to draw the plan on, which needs no network."),
    ] = None,
    json_summary: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Tokenise INPUT, plan its prefixes and print what they share; needs no weights."""
    from batchradix import pipeline
    from batchradix.cli.report import check_page_name, write_page
    from batchradix.report.plan_page import plan_page
    from batchradix.report.progress import choose_progress

    if report is not None:
        check_page_name("report", report)

    config = RunConfig(
        input=fill_dates(input, date),
        model=shared.named_model(model),
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
        id_column=id_column,
        limit=limit,
        prompt=shared.prompt_options(
            template, chat, instruction, column, system, null, reorder_columns, sort_passages
        ),
        sampling=SamplingOptions(max_tokens=max_tokens),
        questions=shared.questions_of(questions),
        long_rows=shared.long_rows(overflow, chunk_tokens, chunk_overlap, None),
        chats=shared.chat_options(chat_template, chat_template_kwargs, thinking, thinking_tokens),
    )
    progress = choose_progress(quiet=json_summary)
    if json_summary and report is None:
        summary = pipeline.plan(config, num_shards=shards, progress=progress)
        typer.echo(json.dumps(summary.to_json()))
        return
    drawn = pipeline.draw_plan(config, num_shards=shards, progress=progress)
    summary = drawn.summary
    lines = [*_totals(summary), *_advice(summary)]
    if report is not None:
        title = os.fsencode(drawn.name).decode(errors="backslashreplace")
        page = plan_page(f"The plan of {title}", summary, drawn.picture, lines, drawn.template)
        write_page(report, page)
    if json_summary:
        typer.echo(json.dumps(summary.to_json()))
        return
    for name, text in [*lines, *([("page", str(report))] if report is not None else [])]:
        typer.echo(f"{name:>9}  {text}")
    _draw(drawn)


def _draw(drawn: DrawnPlan) -> None:
    from rich.console import Console

    from batchradix.report.terminal_plan import draw_plan

    typer.echo("")
    draw_plan(drawn.picture, Console(highlight=False, soft_wrap=True))


def _totals(summary: PlanSummary) -> list[tuple[str, str]]:
    from batchradix.report.summary import planned_tokens

    return [
        ("rows", f"{summary.rows:,} ({summary.planned_rows:,} to run, "
                 f"{summary.duplicates:,} duplicates)"),
        ("over-long", f"{summary.over_long:,} rows whose prompt does not fit the context"),
        ("prompts", planned_tokens(summary.prompt_tokens, summary.opening_tokens)),
        ("distinct", f"{summary.distinct_tokens:,} tokens in {summary.num_nodes:,} tree nodes"),
        ("shared", f"{summary.shared_share:.1%} of these tokens need no computing"),
        ("lengths", f"min {summary.length_min:,}, median {summary.length_p50:,}, "
                    f"90 % {summary.length_p90:,}, 99 % {summary.length_p99:,}, "
                    f"max {summary.length_max:,} tokens"),
    ]  # fmt: skip


def _advice(summary: PlanSummary) -> Iterator[tuple[str, str]]:
    memory = summary.memory
    if memory is not None:
        yield (
            "memory",
            f"{memory.needed_tokens:,} KV tokens ({_size(memory.needed_tokens, memory)}) kept "
            f"beside the rows that run share all of it; {memory.batch_size:,} rows at once take "
            f"{memory.demand_tokens:,} ({_size(memory.demand_tokens, memory)}) at most",
        )
        shown = ", ".join(f"{tokens:,}: {share:.1%}" for tokens, share in memory.curve[-6:])
        if shown:
            yield "curve", f"shared by KV tokens kept: {shown}"
    for found in summary.lint:
        yield "lint", found.in_words()
    for number, shard in enumerate(summary.shards, 1):
        yield (
            f"{number}/{len(summary.shards)}",
            f"{shard.rows:,} rows, {shard.cost_share:.1%} of the work: "
            f"{shard.prompt_tokens:,} prompt tokens, {shard.distinct_tokens:,} distinct, "
            f"{shard.duplicated_tokens:,} of them another shard's too",
        )


def _size(num_tokens: int, memory: MemorySummary) -> str:
    return f"{num_tokens * memory.token_bytes / 2**20:,.0f} MiB"
