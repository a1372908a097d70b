"""``batchradix preview``: the exact prompt of one row, special tokens marked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from batchradix.cli import options as shared
from batchradix.cli.job_file import fill_dates
from batchradix.config import RunConfig
from batchradix.errors import OptionError
from batchradix.visible import one_line

if TYPE_CHECKING:
    from batchradix.pipeline import Previewed


def preview(
    input: shared.Input,
    row: Annotated[
        str | None, typer.Option("--row", help="The id (or number) of the row; the first.")
    ] = None,
    id: Annotated[
        str | None, typer.Option("--id", help="The id of the row, where it looks like a number.")
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
    schema_column: shared.SchemaColumn = None,
    template: shared.Template = None,
    chat: shared.Chat = False,
    instruction: shared.Instruction = None,
    column: shared.Column = None,
    system: shared.System = None,
    null: shared.Null = None,
    reorder_columns: shared.ReorderColumns = False,
    sort_passages: shared.SortPassages = None,
    chat_template: shared.ChatTemplate = None,
    chat_template_kwargs: shared.ChatTemplateKwargs = None,
    thinking: shared.Think = "auto",
    thinking_tokens: shared.ThinkingTokens = None,
    id_column: shared.IdColumn = None,
    date: shared.Date = None,
    show_ids: Annotated[bool, typer.Option("--ids", help="Print the token ids too.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Print the prompt that a row of INPUT becomes, with its special tokens marked.

    Standard error has its tokens, how its answer is forced to begin, and what it shares with the
    row beside it in the plan (of the first 10,000 rows).
    """
    from batchradix import pipeline
    from batchradix.report.progress import choose_progress
    from batchradix.report.show import to_json

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
        prompt=shared.prompt_options(
            template, chat, instruction, column, system, null, reorder_columns, sort_passages
        ),
        chats=shared.chat_options(chat_template, chat_template_kwargs, thinking, thinking_tokens),
    )
    if row is not None and id is not None:
        raise OptionError("--row and --id exclude each other; give one of them")
    shown = pipeline.preview(config, row, id=id, progress=choose_progress(quiet=as_json))
    if as_json:
        typer.echo(to_json(shown.to_json()))
        return
    typer.echo(shown.view.marked())
    for text in _about(shown):
        typer.echo(text, err=True)
    if show_ids:
        typer.echo(" ".join(str(token) for token in shown.view.ids))


def _about(shown: Previewed) -> Iterator[str]:
    num_tokens = len(shown.view.ids)
    yield f"{num_tokens:,} tokens, row {shown.row}, id {one_line(str(shown.id), 60)}"
    if shown.opening:
        yield f"answers begin with {len(shown.opening):,} tokens: {one_line(shown.opening_text)}"
    beside = shown.neighbour
    if beside is None:
        yield "no other row has a prompt"
        return
    who = f"row {beside.row} (id {one_line(str(beside.id), 60)})"
    if beside.shared_tokens == num_tokens:
        yield f"all of them begin the prompt of {who} too"
    else:
        ends = one_line(beside.shared_text[-40:])
        yield f"{beside.shared_tokens:,} of them begin the prompt of {who} too, up to: {ends}"
