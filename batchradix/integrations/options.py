"""The options of a job as keywords, and a job's config in a form that travels to a process."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypedDict

from batchradix.config import (
    DEFAULT_MODEL,
    DType,
    EngineOptions,
    OutputOptions,
    PromptOptions,
    Quantize,
    RunConfig,
    SamplingOptions,
    Speculate,
    Switch,
)
from batchradix.errors import OptionError
from batchradix.jobs.base import NO_ID_COLUMN
from batchradix.schema.answer_format import AnswerFormat, answer_format
from batchradix.schema.tools import ToolSet


class SamplingKeywords(TypedDict, total=False):
    """Each field of `SamplingOptions` by its own name."""

    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: tuple[str, ...]
    probabilities: bool
    choose: Literal["walk", "joint"]


class EngineKeywords(TypedDict, total=False):
    """Each field of `EngineOptions` by its own name."""

    dtype: DType
    quantize: Quantize
    deterministic: bool
    device: str
    attention: str
    batch_size: int | None
    prefill_tokens: int | None
    kv_tokens: int | None
    kv_memory_bytes: int | None
    prefix_cache: bool
    forced_text: bool
    repetition_guard: bool
    speculate: Speculate
    overlap: Switch
    cuda_graphs: Switch
    num_threads: int | None
    grammar_timeout_s: float
    grammar_memory_bytes: int | None
    plan_memory_bytes: int | None
    row_timeout_s: float | None
    kv_store: Path | str | None
    kv_store_bytes: int | None
    kv_disk_bytes: int | None
    kv_host_memory_bytes: int | None


class AnswerKeywords(TypedDict, total=False):
    """What answers may look like, as `answer_format` takes it."""

    schema: Any
    fields: str | None
    regex: str | None
    grammar: str | Path | None
    choices: str | Path | Sequence[str] | None
    tools: Any
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    tool_format: str | None


class PromptKeywords(TypedDict, total=False):
    """Each field of `PromptOptions` by its own name."""

    template: str | None
    chat: bool
    instruction: str | None
    column: str | None
    system: str | None
    null_text: str | None


class JobOptions(AnswerKeywords, PromptKeywords, SamplingKeywords, EngineKeywords, total=False):
    """The arguments of `batchradix.run` that say what is asked of each row, and the fields of
    ``sampling`` and ``engine`` by their own names, which win over those of the objects."""

    model: str | os.PathLike[str]
    schema_column: str | None
    retries: int
    keep_truncated: bool
    sampling: SamplingOptions | None
    engine: EngineOptions | None


def job_config(options: Mapping[str, Any]) -> RunConfig:
    """The config of a job without an input, from the keywords of `JobOptions`.

    Its ``schema`` is an `AnswerFormat`, a `ToolSet` or None. Raises `OptionError` for a keyword
    that is none, and what the parts raise.
    """
    known = JobOptions.__annotations__
    for name in options:
        if name not in known:
            close = get_close_matches(name, known, 1)
            meant = f"; did you mean `{close[0]}`?" if close else ""
            raise OptionError(f"there is no option `{name}`{meant}")

    def given(group: Any) -> dict[str, Any]:
        return {name: options[name] for name in options if name in group.__annotations__}

    model = options.get("model", DEFAULT_MODEL)
    if not isinstance(model, (str, os.PathLike)):
        raise OptionError(f"`model` must be a name or a path, not {model!r}")
    sampling = given(SamplingKeywords)
    if isinstance(sampling.get("stop"), (str, list)):
        stop = sampling["stop"]
        sampling["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    return RunConfig(
        input=None,
        model=os.fspath(model),
        schema=answer_format(**given(AnswerKeywords)),
        schema_column=options.get("schema_column"),
        id_column=NO_ID_COLUMN,  # rows keep their place, so nobody asks
        retries=options.get("retries", 0),
        prompt=PromptOptions(**given(PromptKeywords)),
        sampling=_with(options.get("sampling") or SamplingOptions(), sampling),
        engine=_with(options.get("engine") or EngineOptions(), given(EngineKeywords)),
        output=OutputOptions(keep_truncated=options.get("keep_truncated", False)),
    )


def _with(base: Any, changes: dict[str, Any]) -> Any:
    return replace(base, **changes) if changes else base


@dataclass(frozen=True, slots=True)
class PortableJob:
    """A job's config in plain Python values alone: what travels to another process.

    ``answers`` are the arguments of `answer_format`, with the texts of files in place of their
    paths.
    """

    config: RunConfig
    answers: dict[str, Any]

    @classmethod
    def of(cls, config: RunConfig, options: Mapping[str, Any]) -> PortableJob:
        """``config`` as `job_config` made it from ``options``."""
        return cls(replace(config, schema=None), _answers(config.schema, options))

    def restored(self) -> RunConfig:
        """The config with its answer format."""
        return replace(self.config, schema=answer_format(**self.answers))


def _answers(format_: AnswerFormat | ToolSet | None, options: Mapping[str, Any]) -> dict[str, Any]:
    if format_ is None:
        return {}
    if isinstance(format_, ToolSet):
        beside = ("tool_choice", "parallel_tool_calls", "tool_format")
        return {"tools": format_.json} | {name: options.get(name) for name in beside}
    match format_.kind:
        case "json_schema":
            return {"schema": json.loads(format_.text)}
        case "regex":
            return {"regex": format_.text}
        case "ebnf":
            return {"grammar": format_.text}
        case "choices":
            return {"choices": json.loads(format_.text)}
    raise OptionError(f"a format of kind {format_.kind} cannot be used here; give `tools` instead")
