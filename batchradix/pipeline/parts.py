"""What a job is made of, opened and checked before weights load."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from batchradix._version import VERSION
from batchradix.checkpoint.checkpoint import Checkpoint, open_checkpoint
from batchradix.config import RunConfig, resolve_dtype
from batchradix.errors import InputError, OptionError
from batchradix.jobs.base import JobSource
from batchradix.jobs.detect import open_job
from batchradix.prompts.build import PromptBuilder
from batchradix.prompts.instruction import SCHEMA_LINE
from batchradix.report.machine import has_bf16
from batchradix.report.progress import Progress
from batchradix.schema.answer_format import AnswerFormat, ValueColumn, load_format
from batchradix.schema.listing import MAX_BYTES, MAX_TEXTS
from batchradix.schema.row_formats import RESPONSE_FORMAT, JsonTexts, RowFormats
from batchradix.schema.tools import ToolSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A job whose files, model, schema and prompts have been found good; no weights yet."""

    config: RunConfig
    source: JobSource
    checkpoint: Checkpoint
    schema: AnswerFormat | None
    row_formats: RowFormats | None
    prompts: PromptBuilder
    warnings: tuple[str, ...]

    @property
    def values(self) -> ValueColumn | None:
        """The ``value`` column, None for a job without one."""
        return self.schema if self.row_formats is None else JsonTexts()


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
        checkpoint = checkpoint or open_checkpoint(config.model, notify=progress.message)
        if tools is not None:
            schema = tools.format_for(checkpoint.name, checkpoint.chat_template)
            _check_choices(config, schema)
        source.scan()
        row_formats = _row_formats(config, source)
        prompts = PromptBuilder(
            checkpoint,
            config.prompt,
            columns=source.columns if source.num_rows else None,
            schema_text=None if schema is None else schema.text,
            schema_line=SCHEMA_LINE if schema is None else schema.prompt_line,
            tools=None if tools is None else tools.json,
        )
        if config.output.keep:
            source.keep_schema(config.output.keep)
        stack.pop_all()
    warnings = [*prompts.warnings, *(() if schema is None else schema.notices)]
    if row_formats is not None and prompts.shows_schema:
        warnings.append(
            f"prompts show the run's schema to every row, also to those with another one in the "
            f"column {row_formats.column}; {{{{ {row_formats.column} }}}} shows a row its own"
        )
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


def _check_stop(schema: AnswerFormat | None, stop: tuple[str, ...]) -> None:
    if stop and schema is not None and not schema.takes_stop:
        raise OptionError(
            "`stop` and `grammar` exclude each other: a stop string could cut an answer that does "
            "not match the grammar yet; let the grammar end the answer"
        )


def _row_formats(config: RunConfig, source: JobSource) -> RowFormats | None:
    """What reads the schemas that rows bring along, None where no column holds any."""
    columns = source.columns or ()
    column = config.schema_column
    if column is None and RESPONSE_FORMAT in columns:
        column = RESPONSE_FORMAT
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
    return RowFormats(column, drops_nulls=source.typed)


def _check_output(config: RunConfig, source: JobSource) -> None:
    """Refuses to write over the input, whatever links or patterns it was named by."""
    if config.output.path is None:
        return
    output = os.path.realpath(config.output.path)
    if any(os.path.realpath(path) == output for path in source.paths):
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
    return identity | {"id_type": str(parts.source.id_type)}


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
        **asdict(config.sampling),
        "schema": None if schema is None else schema.text,
        "answers": "text" if schema is None else schema.kind,
        "schema_column": schema_column,
        "retries": config.retries,
        "dtype": dtype,
        "quantize": config.engine.quantize,
        "kv_dtype": config.engine.kv_dtype,
        "deterministic": config.engine.deterministic,
        "forced_text": config.engine.forced_text,
        "repetition_guard": config.engine.repetition_guard,
    }


def names_in_words(parts: Parts) -> dict[str, str]:
    """What those entries of the `fingerprint` are called that are digests."""
    checkpoint = parts.checkpoint
    revision = f" at revision {checkpoint.revision[:12]}" if checkpoint.revision else ""
    return {"model": f"{checkpoint.name}{revision}"}


def file_metadata(parts: Parts, identity: Mapping[str, Any]) -> dict[str, str]:
    """What the finished file says about itself."""
    checkpoint = parts.checkpoint
    facts = {**identity, "model": checkpoint.name, "model_hash": identity["model"]}
    facts["revision"] = checkpoint.revision
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
