"""Options that several commands share, and how they become a `RunConfig`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from batchradix.chat_options import ChatOptions, read_kwargs
from batchradix.cli.job_file import read_job_file
from batchradix.config import DEFAULT_MODEL, PromptOptions, RunConfig
from batchradix.errors import InputError, OptionError
from batchradix.row_options import long_rows as long_rows

Input = Annotated[
    str,
    typer.Argument(
        metavar="INPUT",
        callback=read_job_file,
        is_eager=True,
        help="A .parquet, .jsonl, .csv or .arrow file, a folder, a glob, an address such as s3://, "
        "-, or a job file (.toml).",
    ),
]
Date = Annotated[
    str | None,
    typer.Option("--date", help="What {date} in file names stands for: 2026-11-30; today."),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="A listed name, a folder, a .gguf file, owner/repo\\[@revision] or owner/repo:Q4_K_M.",
    ),
]
Lora = Annotated[
    str | None,
    typer.Option("--lora", help="A folder with a LoRA adapter (PEFT) to merge into the model."),
]
Schema = Annotated[
    str | None,
    typer.Option("--schema", help="A JSON Schema file, JSON text, or module:PydanticModel."),
]
Fields = Annotated[
    str | None,
    typer.Option("--fields", help="A schema in short: 'vendor: str, total: float?, kind: a|b'."),
]
Regex = Annotated[
    str | None, typer.Option("--regex", help="A pattern that the whole answer matches.")
]
Grammar = Annotated[
    str | None, typer.Option("--grammar", help="A file of EBNF (GBNF) with the rule root.")
]
Choices = Annotated[
    str | None,
    typer.Option("--choices", help="The answers to choose from: a,b,c or a file, one a line."),
]
Tools = Annotated[
    str | None,
    typer.Option(
        "--tools", help="Functions that answers may call: OpenAI's list, as a file or JSON text."
    ),
]
ToolChoice = Annotated[
    str | None,
    typer.Option(
        "--tool-choice", help="auto (text or calls), required, or the name of a function; auto."
    ),
]
NoParallelToolCalls = Annotated[
    bool, typer.Option("--no-parallel-tool-calls", help="At most one call in an answer.")
]
ToolFormat = Annotated[
    str | None,
    typer.Option(
        "--tool-format",
        help="How calls are written: hermes, llama3, mistral or json; as the chat template does.",
    ),
]
SchemaColumn = Annotated[
    str | None,
    typer.Option(
        "--schema-column",
        help="The column of schemas for single rows; `response_format` when there is one.",
    ),
]
Template = Annotated[
    str | None,
    typer.Option("--template", help="Text with {{ column }} places, or a file of it."),
]
Chat = Annotated[bool, typer.Option("--chat", help="Send the template as a chat message.")]
Instruction = Annotated[
    str | None,
    typer.Option("--instruction", help="What to do with --column, as text or a file of it."),
]
Column = Annotated[
    str | None, typer.Option("--column", help="The column that --instruction or --questions read.")
]
System = Annotated[
    str | None, typer.Option("--system", help="A system message, as text or a file of it.")
]
Null = Annotated[
    str | None,
    typer.Option(
        "--null", help="What stands in for a null or missing field; else it is an error row."
    ),
]
ReorderColumns = Annotated[
    bool,
    typer.Option(
        "--reorder-columns",
        help="Put the fields that the template lists, one a line, in the order that shares most.",
    ),
]
SortPassages = Annotated[
    str | None,
    typer.Option(
        "--sort-passages",
        help="A column of lists: put each row's items in the order in which rows share most.",
    ),
]
Questions = Annotated[
    str | None,
    typer.Option(
        "--questions",
        help="A TOML or JSON file of several questions to every row, each with its own schema.",
    ),
]
Overflow = Annotated[
    str,
    typer.Option(
        "--overflow",
        help="Of rows too long for the context: error, truncate-left, truncate-middle or chunk.",
    ),
]
ChunkTokens = Annotated[
    int | None,
    typer.Option("--chunk-tokens", help="Most tokens of text in a part; as many as fit."),
]
ChunkOverlap = Annotated[
    int, typer.Option("--chunk-overlap", help="Tokens that a part shares with the one before.")
]
Combine = Annotated[
    str | None,
    typer.Option(
        "--combine",
        help="How answers to parts become one: first, union, vote or ask; of a field: tags=union.",
    ),
]
MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", help="Answer tokens a row; the context up to 1024.")
]
ChatTemplate = Annotated[
    str | None,
    typer.Option(
        "--chat-template",
        help="In place of the model's: Jinja text, a file of it, or the name of one it has.",
    ),
]
ChatTemplateKwargs = Annotated[
    str | None,
    typer.Option(
        "--chat-template-kwargs",
        help='Variables of the chat template, as JSON: \'{"reasoning_effort": "low"}\'.',
    ),
]
Think = Annotated[
    str,
    typer.Option(
        "--thinking",
        help="Let the model think first (column `reasoning`): auto (free text only), on or off.",
    ),
]
ThinkingTokens = Annotated[
    int | None,
    typer.Option(
        "--thinking-tokens",
        help="After so many the thinking is closed and the answer begins; 4096.",
    ),
]
IdColumn = Annotated[
    str | None, typer.Option("--id-column", help="The column of ids; `id` when there is one.")
]
Limit = Annotated[int | None, typer.Option("--limit", help="Only the first N rows.")]

_SIZE_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


_FLAGS = {
    "failed_rows": "errors",
    "forced_text": "no-forced-text",
    "grammar_memory_bytes": "grammar-memory",
    "grammar_timeout_s": "grammar-timeout",
    "kv_disk_bytes": "kv-disk",
    "kv_host_memory_bytes": "kv-host-memory",
    "kv_memory_bytes": "kv-memory",
    "kv_store_bytes": "kv-store-size",
    "null_text": "null",
    "num_threads": "threads",
    "parallel_tool_calls": "no-parallel-tool-calls",
    "path": "output",
    "plan_memory_bytes": "plan-memory",
    "prefix_cache": "no-prefix-cache",
    "repetition_guard": "no-repetition-guard",
    "row_timeout_s": "row-timeout",
}
"""Options that the command line calls otherwise than Python; the others differ in dashes alone."""


def flag(name: str) -> str:
    """The flag of an option by its name in Python."""
    return f"--{_FLAGS.get(name, name).replace('_', '-')}"


def parse_size(text: str | None, option: str) -> int | None:
    """Bytes from ``4GiB``, ``500M`` or a plain number; raises `OptionError`."""
    if text is None:
        return None
    cleaned = text.strip().lower().removesuffix("b")
    digits = cleaned.rstrip("kmgti")
    unit = cleaned[len(digits) :]
    factor = _SIZE_UNITS.get(unit) or _BINARY_UNITS.get(unit)
    try:
        value = float(digits)
    except ValueError:
        value = -1
    if factor is None or not 0 < value < 1e18:
        raise OptionError(f"{option} must be a size such as 4GiB or 500MB, not {text!r}")
    return int(value * factor)


def parse_size_or_off(text: str, option: str) -> int | None:
    """As `parse_size`; None for ``off``."""
    return parse_size(None if text.strip().lower() == "off" else text, option)


_DURATION_S = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str | None, option: str) -> float | None:
    """Seconds from ``2h``, ``1h30m``, ``90s`` or a plain number; raises `OptionError`."""
    if text is None:
        return None
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.strip().lower())
    spelt = re.fullmatch(r"(?:\d+(?:\.\d+)?\s*[a-z]*\s*)+", text.strip().lower())
    if not spelt or any(unit not in _DURATION_S for _, unit in parts):
        raise OptionError(f"{option} must be a time such as 2h, 1h30m or 90s, not {text!r}")
    return sum(float(number) * _DURATION_S[unit] for number, unit in parts)


def parse_share(text: str, option: str) -> float:
    """A share from ``0.1%`` or ``0.001``; raises `OptionError`."""
    try:
        if text.strip().endswith("%"):
            return float(text.strip()[:-1]) / 100
        return float(text)
    except ValueError:
        raise OptionError(f"{option} must be a share such as 0.1%, not {text!r}") from None


def text_or_file(text: str | None, option: str) -> str | None:
    """The option's text, or the content of the file it names.

    A value is a file when one of that name exists; a value that looks like a file name
    (one line, no spaces, an ending such as .txt, .md or .jinja) but does not exist is refused.
    """
    if text is None or "\n" in text or len(text) > 1024 or not text:
        return text
    path = Path(text)
    try:
        is_file = path.is_file()
    except (OSError, ValueError):
        return text
    if is_file:
        try:
            content = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{option}: {text} cannot be read as UTF-8 text: {error}") from None
        return content.removesuffix("\n")
    if " " not in text and path.suffix in (".txt", ".md", ".jinja", ".j2", ".tmpl", ".template"):
        raise InputError(f"{option}: there is no file {text}")
    return text


def prompt_options(
    template: str | None,
    chat: bool,
    instruction: str | None,
    column: str | None,
    system: str | None,
    null: str | None,
    reorder_columns: bool = False,
    sort_passages: str | None = None,
) -> PromptOptions:
    """`PromptOptions` with files read."""
    return PromptOptions(
        template=text_or_file(template, "--template"),
        chat=chat,
        instruction=text_or_file(instruction, "--instruction"),
        column=column,
        system=text_or_file(system, "--system"),
        null_text=null,
        reorder_columns=reorder_columns,
        sort_passages=sort_passages,
    )


def chat_options(
    chat_template: str | None, kwargs: str | None, thinking: str, thinking_tokens: int | None
) -> ChatOptions:
    """`ChatOptions` with files read."""
    given = None
    if kwargs is not None:
        try:
            given = read_kwargs(kwargs)
        except ValueError as error:
            raise OptionError(f"`chat_template_kwargs` {error}") from None
    return ChatOptions(
        chat_template=text_or_file(chat_template, "--chat-template"),
        chat_template_kwargs=given,
        thinking=thinking,  # type: ignore[arg-type]  # checked by ChatOptions
        thinking_tokens=thinking_tokens,
    )


def answers(
    schema: str | None,
    fields: str | None,
    regex: str | None,
    grammar: str | None,
    choices: str | None,
    tools: str | None = None,
    tool_choice: str | None = None,
    no_parallel_tool_calls: bool = False,
    tool_format: str | None = None,
) -> Any:
    """What answers may look like, read and checked; None for any text."""
    parallel = False if no_parallel_tool_calls else None
    if tools is None:
        tool_format = None  # that of an OpenAI batch file's requests
    given = (fields, regex, grammar, choices, tools, tool_choice, parallel, tool_format)
    if all(option is None for option in given):
        return schema  # read with the rest of the job
    from batchradix.schema.answer_format import answer_format

    return answer_format(
        schema=schema,
        fields=fields,
        regex=regex,
        grammar=grammar,
        choices=choices,
        tools=tools,
        tool_choice=tool_choice,
        parallel_tool_calls=parallel,
        tool_format=tool_format,
    )


def questions_of(file: str | None) -> Any:
    """The questions in a file, none without."""
    if file is None:
        return ()
    from batchradix.schema.questions import read_questions

    return read_questions(file)


def named_model(model: str | None) -> str:
    """The model asked for, or the demonstration model."""
    return DEFAULT_MODEL if model is None else model


def replace_config(config: RunConfig, **changes: Any) -> RunConfig:
    """A copy of the configuration with some fields changed."""
    from dataclasses import replace

    return replace(config, **changes)


def parse_speculate(text: str) -> Any:
    """``auto``, ``off`` or a number; `EngineOptions` refuses what is none of these."""
    return int(text) if text.isdecimal() else text
