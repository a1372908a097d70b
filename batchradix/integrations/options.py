"""The options of a job as keywords, and a job's config in a form that travels to a process."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

from batchradix.chat_options import ChatOptions
from batchradix.config import (
    DEFAULT_MODEL,
    EngineOptions,
    OutputOptions,
    PromptOptions,
    RunConfig,
    SamplingOptions,
)
from batchradix.errors import OptionError
from batchradix.jobs.base import NO_ID_COLUMN
from batchradix.schema.answer_format import AnswerFormat, answer_format
from batchradix.schema.tools import ToolSet

_ANSWERS = tuple(inspect.signature(answer_format).parameters)
_OF_THE_JOB = ("model", "lora", "schema_column", "retries", "keep_truncated", "sampling", "engine")


def option_names() -> tuple[str, ...]:
    """The keywords of a job: the arguments of `batchradix.run` that say what is asked of each row,
    and the fields of its ``sampling`` and ``engine`` by their own names."""
    groups = (PromptOptions, ChatOptions, SamplingOptions, EngineOptions)
    return (*_OF_THE_JOB, *_ANSWERS, *(field.name for group in groups for field in fields(group)))


def job_config(options: Mapping[str, Any]) -> RunConfig:
    """The config of a job without an input, from keywords (see `option_names`).

    Single settings win over those of ``sampling`` and ``engine``. Its ``schema`` is an
    `AnswerFormat`, a `ToolSet` or None. Raises `OptionError` for a keyword that is none, and what
    the parts raise.
    """
    known = option_names()
    for name in options:
        if name not in known:
            close = get_close_matches(name, known, 1)
            meant = f"; did you mean `{close[0]}`?" if close else ""
            raise OptionError(f"there is no option `{name}`{meant}")

    model = options.get("model", DEFAULT_MODEL)
    if not isinstance(model, (str, os.PathLike)):
        raise OptionError(f"`model` must be a name or a path, not {model!r}")
    lora = options.get("lora")
    if lora is not None and not isinstance(lora, (str, os.PathLike)):
        raise OptionError(f"`lora` must be the folder of an adapter, not {lora!r}")
    sampling = _given(SamplingOptions, options)
    if isinstance(stop := sampling.get("stop"), (str, list)):
        sampling["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    return RunConfig(
        input=None,
        model=os.fspath(model),
        lora=None if lora is None else os.fspath(lora),
        schema=answer_format(**{name: options[name] for name in _ANSWERS if name in options}),
        schema_column=options.get("schema_column"),
        id_column=NO_ID_COLUMN,  # rows keep their place, so nobody asks
        retries=options.get("retries", 0),
        prompt=PromptOptions(**_given(PromptOptions, options)),
        chats=ChatOptions(**_given(ChatOptions, options)),
        sampling=replace(options.get("sampling") or SamplingOptions(), **sampling),
        engine=replace(options.get("engine") or EngineOptions(), **_given(EngineOptions, options)),
        output=OutputOptions(keep_truncated=options.get("keep_truncated", False)),
    )


def _given(group: type, options: Mapping[str, Any]) -> dict[str, Any]:
    names = (field.name for field in fields(group))
    return {name: options[name] for name in names if name in options}


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
