"""``batchradix preview``: the exact prompt of one row, special tokens marked."""

from __future__ import annotations

from typing import Annotated

import typer

from batchradix.cli import options as shared
from batchradix.cli.job_file import fill_dates
from batchradix.config import RunConfig, SamplingOptions


def preview(
    input: shared.Input,
    row: Annotated[
        str | None, typer.Option("--row", help="The id (or number) of the row; the first.")
    ] = None,
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
    id_column: shared.IdColumn = None,
    date: shared.Date = None,
    show_ids: Annotated[bool, typer.Option("--ids", help="Print the token ids too.")] = False,
) -> None:
    """Print the prompt that a row of INPUT becomes, with its special tokens marked."""
    from batchradix import pipeline
    from batchradix.report.progress import choose_progress

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
        tool_format=tool_format,
        id_column=id_column,
        prompt=shared.prompt_options(
            template, chat, instruction, column, system, null, reorder_columns, sort_passages
        ),
        sampling=SamplingOptions(max_tokens=max_tokens),
        questions=shared.questions_of(questions),
        long_rows=shared.long_rows(overflow, chunk_tokens, chunk_overlap, None),
    )
    for view in pipeline.previews(config, row, progress=choose_progress(quiet=False)):
        typer.echo(view.marked())
        typer.echo(f"{len(view.ids):,} tokens", err=True)
        if show_ids:
            typer.echo(" ".join(str(int(token)) for token in view.ids))
