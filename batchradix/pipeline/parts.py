"""What a job is made of, opened and checked before weights load."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from batchradix._version import VERSION
from batchradix.checkpoint.checkpoint import Checkpoint, open_checkpoint, with_chat_template
from batchradix.config import PromptOptions, RunConfig
from batchradix.errors import InputError, OptionError, SchemaError
from batchradix.jobs.base import JobSource
from batchradix.jobs.detect import open_job
from batchradix.jobs.listing import is_below
from batchradix.pipeline.expansion import Expansion
from batchradix.pipeline.folding import folds_of
from batchradix.pipeline.intake import Intake
from batchradix.pipeline.passages import sort_passages
from batchradix.pipeline.reordering import reorder
from batchradix.pipeline.several import check_expansion, expansion_identity
from batchradix.prompts.build import PromptBuilder
from batchradix.prompts.instruction import SCHEMA_LINE
from batchradix.prompts.questions import Prompts, QuestionPrompts
from batchradix.report.machine import has_bf16
from batchradix.report.progress import Progress
from batchradix.schema.answer_format import AnswerFormat, ValueColumn, load_format
from batchradix.schema.listing import MAX_BYTES, MAX_TEXTS
from batchradix.schema.questions import QuestionFormats
from batchradix.schema.request_formats import RequestFormats
from batchradix.schema.row_formats import RESPONSE_FORMAT, JsonTexts, RowFormats
from batchradix.schema.tool_styles import STYLES
from batchradix.schema.tools import ToolSet
from batchradix.settings import resolve_dtype
from batchradix.sink.fold import Fold
from batchradix.types import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A job whose files, model, schema and prompts have been found good; no weights yet."""

    config: RunConfig
    source: JobSource
    checkpoint: Checkpoint
    schema: AnswerFormat | None
    row_formats: RowFormats | QuestionFormats | None
    prompts: Prompts
    warnings: tuple[str, ...]

    @property
    def values(self) -> ValueColumn | None:
        """The ``value`` column, None for a job without one. That of requests is JSON text, so
        that it is the same beside samples as in them; that of questions has a field for each."""
        if isinstance(self.row_formats, QuestionFormats):
            return self.row_formats
        has_own = self.source.is_requests and self.schema is not None
        return JsonTexts() if has_own or self.row_formats is not None else self.schema

    @property
    def expansion(self) -> Expansion:
        """What makes several rows of the table of one of the input."""
        config = self.config
        return Expansion(
            self.checkpoint.tokenizer,
            config.questions,
            config.long_rows,
            config.chats.thinking_tokens,
        )

    def folds(self, rows: Intake | None) -> tuple[Fold, ...]:
        """What makes one row of several results; without ``rows`` for a table without any."""
        return folds_of(self.source, self.values, self.config.long_rows, rows)


def open_parts(
    config: RunConfig, *, progress: Progress, checkpoint: Checkpoint | None = None
) -> Parts:
    """Opens input, model and schema and checks them against each other; reads no weights.

    ``checkpoint`` is a model that is open already. Raises the `UsageError` of whatever is
    wrong.
    """
    tools = config.schema if isinstance(config.schema, ToolSet) else None
    schema = None
    if tools is None:
        schema = None if config.schema is None else load_format(config.schema)
        _check_choices(config, schema)
        _check_stop(schema, config.sampling.stop)
    with ExitStack() as stack:
        source = open_job(config.input, id_column=config.id_column, limit=config.limit)
        stack.callback(source.close)
        _check_output(config, source)
        checkpoint = checkpoint or open_checkpoint(
            config.model, lora=config.lora, notify=progress.message
        )
        checkpoint = with_chat_template(checkpoint, config.chats.chat_template)
        if tools is not None:
            schema = tools.format_for(checkpoint.name, checkpoint.chat_template)
            _check_choices(config, schema)
        source.scan()
        _check_requests(config, source)
        check_expansion(config, source)
        row_formats = _row_formats(config, source, checkpoint, schema)
        prompts = _prompts(
            config,
            checkpoint,
            source.columns if source.num_rows else None,
            row_formats if isinstance(row_formats, QuestionFormats) else None,
            schema_text=None if schema is None else schema.text,
            schema_line=SCHEMA_LINE if schema is None else schema.prompt_line,
            tools=None if tools is None else tools.json,
            are_requests=source.is_requests,
            is_bound=partial(_is_bound, schema, row_formats),
            bound=_bound(schema, row_formats),
        )
        if isinstance(prompts, PromptBuilder):
            if config.prompt.sort_passages is not None:
                progress.message(sort_passages(source, prompts, config.prompt.sort_passages))
            if config.prompt.reorder_columns:
                progress.message(reorder(source, prompts))
        if prompts.may_think:
            _check_thinking(config)
        if config.output.keep:
            source.keep_schema(config.output.keep)
        stack.pop_all()
    warnings = [*source.notices, *prompts.warnings, *(() if schema is None else schema.notices)]
    if isinstance(row_formats, QuestionFormats):
        notices = [text for found in row_formats.formats if found for text in found.notices]
        warnings += [text for text in dict.fromkeys(notices) if text not in warnings]
    elif row_formats is not None and prompts.shows_schema:
        warnings.append(
            f"prompts show the run's schema to every row, also to those with another one in the "
            f"column {row_formats.column}; {{{{ {row_formats.column} }}}} shows a row its own"
        )
    warnings += _other_model(config, source)
    if source.num_duplicate_ids:
        warnings.append(f"{source.num_duplicate_ids:,} rows have an id that an earlier row has")
    for text in warnings:
        progress.warn(text)
    return Parts(
        config=config,
        source=source,
        checkpoint=checkpoint,
        schema=schema,
        row_formats=row_formats,
        prompts=prompts,
        warnings=tuple(warnings),
    )


def may_think(
    config: RunConfig,
    checkpoint: Checkpoint,
    columns: Sequence[str],
    schema: AnswerFormat | None,
) -> bool:
    """Whether a job over rows with these columns has a column of thinking; for jobs in memory.

    Raises the `UsageError` of prompts that cannot be made.
    """
    questions = QuestionFormats(config.questions, schema) if config.questions else None
    has_own = config.schema_column is not None or RESPONSE_FORMAT in columns
    prompts = _prompts(
        config,
        with_chat_template(checkpoint, config.chats.chat_template),
        columns,
        questions,
        bound={True, False} if has_own and questions is None else _bound(schema, questions),
    )
    return prompts.may_think


def _prompts(
    config: RunConfig,
    checkpoint: Checkpoint,
    columns: Sequence[str] | None,
    questions: QuestionFormats | None,
    *,
    schema_text: str | None = None,
    **options: Any,
) -> Prompts:
    """What makes a job's prompts; ``options`` are those of `PromptBuilder`."""

    def make(asked: PromptOptions, text: str | None) -> PromptBuilder:
        return PromptBuilder(
            checkpoint,
            asked,
            columns=columns,
            schema_text=text,
            chats=config.chats,
            **options,
        )

    if questions is None:
        return make(config.prompt, schema_text)
    return QuestionPrompts(config.questions, questions, config.prompt, make)


def _bound(
    schema: AnswerFormat | None, row_formats: RowFormats | QuestionFormats | None
) -> set[bool]:
    """Whether answers have to match something: what may be of the rows of a job."""
    if isinstance(row_formats, QuestionFormats):
        return {found is not None for found in row_formats.formats}
    return {schema is not None} if row_formats is None else {True, False}


def _check_choices(config: RunConfig, schema: AnswerFormat | None) -> None:
    """Refuses probabilities, and choosing by them, where there are no choices to list."""
    sampling = config.sampling
    if not sampling.probabilities and sampling.choose == "walk":
        return
    what = "`probabilities`" if sampling.probabilities else "`choose` joint"
    if schema is None:
        raise OptionError(f"{what} needs answers out of a few; give a schema such as an enum")
    if schema.choices is None:
        raise OptionError(
            f"{what} needs a schema that at most {MAX_TEXTS:,} texts ({MAX_BYTES // 1024} KiB) "
            f"match: enum, const, boolean, a small range of integers, and objects or short arrays "
            f"of these; this one is more open"
        )


def _check_thinking(config: RunConfig) -> None:
    sampling = config.sampling
    if sampling.probabilities or sampling.choose == "joint":
        what = "`probabilities`" if sampling.probabilities else "`choose` joint"
        raise OptionError(
            f"{what} looks at every choice where the prompt ends, and rows that think choose only "
            f"behind their thinking; give `thinking` off, or leave {what} out"
        )


def _is_bound(
    schema: AnswerFormat | None, row_formats: RowFormats | QuestionFormats | None, row: Row
) -> bool:
    """Whether a row's answer has to match something."""
    cell = None if row_formats is None else row_formats.cell(row.values)
    if row_formats is None or cell is None:
        return schema is not None
    with suppress(SchemaError):  # else the row is an error anyway
        return row_formats.read(cell) is not None
    return True


def _check_stop(schema: AnswerFormat | None, stop: tuple[str, ...]) -> None:
    if stop and schema is not None and not schema.takes_stop:
        raise OptionError(
            "`stop` and `grammar` exclude each other: a stop string could cut an answer that does "
            "not match the grammar yet; let the grammar end the answer"
        )


def _check_requests(config: RunConfig, source: JobSource) -> None:
    """Refuses options that an OpenAI batch file leaves no room for, and those that are only for
    one."""
    prompt = config.prompt
    if not source.is_requests:
        if config.output.format is not None:
            raise OptionError(
                f"`format` openai answers requests, and {source.name} is no OpenAI batch file; "
                f"leave it out"
            )
        if config.tool_format is not None and not isinstance(config.schema, ToolSet):
            raise OptionError("`tool_format` needs `tools`; give some functions to call")
        return
    given = {
        "template": prompt.template,
        "instruction": prompt.instruction,
        "tools": config.schema if isinstance(config.schema, ToolSet) else None,
        "schema_column": config.schema_column,
        "probabilities": config.sampling.probabilities or None,
    }
    name = next((name for name, value in given.items() if value is not None), None)
    if name is not None:
        raise OptionError(
            f"`{name}` is for tables of rows, and {source.name} is an OpenAI batch file, whose "
            f"requests say themselves what they want; leave it out"
        )
    if config.tool_format is not None and config.tool_format not in STYLES:
        known = ", ".join(STYLES)
        raise OptionError(f"`tool_format` must be one of {known}, not {config.tool_format!r}")


def _other_model(config: RunConfig, source: JobSource) -> Iterator[str]:
    """A warning where requests name another model than the one that answers them."""
    asked, name = source.requested_model, config.model
    if asked is not None and asked not in (name, name.split("@")[0], os.path.basename(name)):
        yield (
            f"the requests of {source.name} name the model {asked!r}, and {name} answers them; "
            f"the results say so"
        )


def _row_formats(
    config: RunConfig, source: JobSource, checkpoint: Checkpoint, own: AnswerFormat | None
) -> RowFormats | QuestionFormats | None:
    """What reads the schemas that rows or questions bring along, None where there are none."""
    if config.questions:
        return QuestionFormats(config.questions, own)
    columns = source.columns or ()
    column = config.schema_column
    if column is None:
        brought = (RESPONSE_FORMAT, "tools") if source.is_requests else (RESPONSE_FORMAT,)
        column = next((name for name in brought if name in columns), None)
    if column is None:
        return None
    if config.sampling.probabilities or config.sampling.choose == "joint":
        raise OptionError(
            f"`probabilities` and `choose` joint need the same choices for every row, and rows "
            f"have schemas of their own in the column {column}; leave one or the other out"
        )
    if columns and column not in columns:
        raise InputError(
            f"{source.name} has no column {column!r} to read schemas from; its columns are: "
            f"{', '.join(columns)}"
        )
    if source.is_requests:
        return RequestFormats(
            model=checkpoint.name,
            chat_template=checkpoint.chat_template,
            style=config.tool_format,
        )
    return RowFormats(column, drops_nulls=source.typed)


def _check_output(config: RunConfig, source: JobSource) -> None:
    """Refuses to write over the input, whatever links or patterns it was named by."""
    if config.output.path is None:
        return
    output = os.path.realpath(config.output.path)
    inputs = {os.path.realpath(path) for path in source.paths}
    errors = config.output.errors_path
    if errors is not None and os.path.realpath(errors) in inputs:
        raise OptionError(
            f"{errors}, where the requests that failed go, is one of the files that {source.name} "
            f"reads; give an output elsewhere"
        )
    folder = source.folder
    for written in (config.output.path, errors, config.output.failed_rows):
        if folder is not None and written is not None and is_below(folder, written):
            raise OptionError(
                f"the output {written} lies in the folder {source.name}, all of whose files are "
                f"read; give an output elsewhere"
            )
    if output in inputs:
        raise OptionError(
            f"the output {config.output.path} is one of the files that {source.name} reads; "
            f"give an output elsewhere"
        )


def fingerprint(parts: Parts) -> dict[str, Any]:
    """What makes results of two runs belong to one table, as a JSON object.

    An automatic dtype stands in it as what this machine makes of it: another one may make
    something else of it, which is another job.
    """
    from batchradix.engine.device import find_device

    config = parts.config
    device, _ = find_device(config.engine.device)
    identity = job_identity(
        config,
        parts.checkpoint,
        parts.schema,
        schema_column=None if parts.row_formats is None else parts.row_formats.column,
        dtype=resolve_dtype(config.engine.dtype, device=device, has_bf16=has_bf16()),
    )
    has_reasoning = parts.prompts.may_think  # which is a column
    return identity | {"id_type": str(parts.source.id_type), "reasoning": has_reasoning}


def job_identity(
    config: RunConfig,
    checkpoint: Checkpoint,
    schema: AnswerFormat | None,
    *,
    schema_column: str | None,
    dtype: str,
) -> dict[str, Any]:
    """What decides the answers of a job beside its rows, as a JSON object."""
    return {
        "version": VERSION,
        "model": checkpoint.content_hash,
        **asdict(config.prompt),
        **asdict(config.chats),
        **asdict(config.sampling),
        "schema": None if schema is None else schema.text,
        "answers": "text" if schema is None else schema.kind,
        "schema_column": schema_column,
        "retries": config.retries,
        "dtype": dtype,
        "quantize": _rounding(config, checkpoint),
        "kv_dtype": config.engine.kv_dtype,
        "deterministic": config.engine.deterministic,
        "forced_text": config.engine.forced_text,
        "repetition_guard": config.engine.repetition_guard,
        **expansion_identity(config, schema),
    }


def _rounding(config: RunConfig, checkpoint: Checkpoint) -> str:
    """What is kept is multiplied as it would be without, to the last bit; but for experts, which
    another kernel adds up."""
    quantize = config.engine.quantize
    is_same = quantize == "keep" and checkpoint.config.moe is None
    return "off" if is_same else quantize


def names_in_words(parts: Parts) -> dict[str, str]:
    """What those entries of the `fingerprint` are called that are digests."""
    checkpoint = parts.checkpoint
    revision = f" at revision {checkpoint.revision[:12]}" if checkpoint.revision else ""
    adapter = "" if checkpoint.adapter is None else f" with the adapter {checkpoint.adapter.path}"
    return {"model": f"{checkpoint.name}{revision}{adapter}"}


def file_metadata(parts: Parts, identity: Mapping[str, Any]) -> dict[str, str]:
    """What the finished file says about itself."""
    checkpoint = parts.checkpoint
    facts = {**identity, "model": checkpoint.name, "model_hash": identity["model"]}
    facts["revision"] = checkpoint.revision
    facts["lora"] = None if checkpoint.adapter is None else str(checkpoint.adapter.path)
    if isinstance(parts.row_formats, RequestFormats):
        facts["tool_style"] = parts.row_formats.style.name
    facts["input"] = parts.source.name
    if checkpoint.is_demonstration:
        facts["note"] = "answers of a small demonstration model"
    texts = {
        f"batchradix.{name}": fact if isinstance(fact, str) else json.dumps(fact)
        for name, fact in facts.items()
        if fact is not None
    }
    # The name of a file may hold bytes that are no UTF-8, which Python shows as surrogates.
    return {name: text.encode(errors="backslashreplace").decode() for name, text in texts.items()}
