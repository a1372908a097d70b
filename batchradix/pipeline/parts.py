"""What a job is made of, opened and checked before weights load."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from batchradix._version import VERSION
from batchradix.checkpoint.checkpoint import Checkpoint, open_checkpoint
from batchradix.config import (
    RunConfig,
)
from batchradix.errors import OptionError
from batchradix.jobs.base import JobSource
from batchradix.jobs.detect import open_job
from batchradix.prompts.build import PromptBuilder
from batchradix.report.progress import Progress
from batchradix.schema.listing import MAX_BYTES, MAX_TEXTS
from batchradix.schema.load import load_schema
from batchradix.schema.output_schema import OutputSchema


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A job whose files, model, schema and prompts have been found good; no weights yet."""

    config: RunConfig
    source: JobSource
    checkpoint: Checkpoint
    schema: OutputSchema | None
    prompts: PromptBuilder
    warnings: tuple[str, ...]


def open_parts(
    config: RunConfig, *, progress: Progress, checkpoint: Checkpoint | None = None
) -> Parts:
    """Opens input, model and schema and checks them against each other; reads no weights.

    ``checkpoint`` is a model that is open already. Raises the `UsageError` of whatever is
    wrong.
    """
    schema = None if config.schema is None else load_schema(config.schema)
    _check_choices(config, schema)
    with ExitStack() as stack:
        source = open_job(config.input, id_column=config.id_column, limit=config.limit)
        stack.callback(source.close)
        _check_output(config, source)
        checkpoint = checkpoint or open_checkpoint(config.model, notify=progress.message)
        source.scan()
        prompts = PromptBuilder(
            checkpoint,
            config.prompt,
            columns=source.columns if source.num_rows else None,
            schema_text=None if schema is None else schema.text,
        )
        if config.output.keep:
            source.keep_schema(config.output.keep)
        stack.pop_all()
    warnings = [*prompts.warnings, *_schema_notices(schema)]
    if source.num_duplicate_ids:
        warnings.append(f"{source.num_duplicate_ids:,} rows have an id that an earlier row has")
    for text in warnings:
        progress.warn(text)
    return Parts(
        config=config,
        source=source,
        checkpoint=checkpoint,
        schema=schema,
        prompts=prompts,
        warnings=tuple(warnings),
    )


def _check_choices(config: RunConfig, schema: OutputSchema | None) -> None:
    """Refuses probabilities, and choosing by them, where there are no choices to list."""
    sampling = config.sampling
    if not sampling.probabilities and sampling.choose == "walk":
        return
    what = "probabilities" if sampling.probabilities else "choose joint"
    if schema is None:
        raise OptionError(f"{what} needs answers out of a few; give a schema such as an enum")
    if schema.choices is None:
        raise OptionError(
            f"{what} needs a schema that at most {MAX_TEXTS:,} texts ({MAX_BYTES // 1024} KiB) "
            f"match: enum, const, boolean, a small range of integers, and objects or short arrays "
            f"of these; this one is more open"
        )


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


def _schema_notices(schema: OutputSchema | None) -> Iterator[str]:
    """What decoding does not enforce of a schema, in words."""
    if schema is not None and schema.choices is None and schema.validated_keywords:
        places = ", ".join(f"{word} at {place}" for place, word in schema.validated_keywords)
        yield (
            f"not enforced while decoding, but checked on every answer (a row that breaks it "
            f"becomes an error row): {places}"
        )
    if schema is not None and schema.ignored_keywords:
        places = ", ".join(f"{word} at {place}" for place, word in schema.ignored_keywords)
        yield f"JSON Schema gives these no meaning, so nothing checks them: {places}"


def fingerprint(parts: Parts) -> dict[str, Any]:
    """What makes results of two runs belong to one table, as a JSON object."""
    config = parts.config
    return {
        "version": VERSION,
        "model": parts.checkpoint.content_hash,
        **asdict(config.prompt),
        **asdict(config.sampling),
        "schema": None if parts.schema is None else parts.schema.text,
        "dtype": config.engine.dtype,
        "forced_text": config.engine.forced_text,
        "repetition_guard": config.engine.repetition_guard,
        "id_type": str(parts.source.id_type),
    }


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
