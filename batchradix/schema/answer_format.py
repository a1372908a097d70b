"""What an answer may look like, whatever it was described by, and where a job's comes from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from batchradix.errors import OptionError
from batchradix.types import GrammarSpec

if TYPE_CHECKING:
    import pyarrow as pa

    from batchradix.schema.tools import ToolSet


class ValueColumn(Protocol):
    """What the ``value`` column holds: a type, and the way from parsed answers into it.

    ``choices``: what the answers are called where they are few and listed, in order; else None.
    """

    choices: tuple[str, ...] | None

    @property
    def arrow_type(self) -> pa.DataType:
        """The Arrow type of an answer; the same whatever the answers are."""
        ...

    def arrow_field(self, name: str) -> pa.Field:
        """A nullable field of `arrow_type`, with the metadata that writers need."""
        ...

    def to_arrow(self, values: Sequence[Any | None]) -> pa.Array:
        """An array of `arrow_type`; None (no answer) becomes null."""
        ...


class AnswerFormat(ValueColumn, Protocol):
    """The shape of an answer: its grammar, its Arrow type, and the check of every value.

    ``kind``: ``json_schema``, ``regex``, ``ebnf``, ``choices``, or ``tool_calls`` and in which
    way. ``text``: what it was described by, in one spelling, for prompts and metadata.
    ``grammar``: what decoding enforces.
    """

    @property
    def kind(self) -> str: ...

    @property
    def text(self) -> str: ...

    @property
    def grammar(self) -> GrammarSpec: ...

    @property
    def prompt_line(self) -> str:
        """The sentence that introduces ``text`` in a prompt."""
        ...

    @property
    def notices(self) -> tuple[str, ...]:
        """What the user has to know before the run, a sentence each."""
        ...

    @property
    def takes_stop(self) -> bool:
        """Whether the check of a finished answer notices that a stop string cut it short."""
        ...

    def parse(self, text: str) -> Any:
        """The value of a finished answer. Raises `schema.answers.InvalidAnswer`."""
        ...


def answer_format(
    *,
    schema: Any = None,
    fields: str | None = None,
    regex: str | None = None,
    grammar: str | Path | None = None,
    choices: str | Path | Sequence[str] | None = None,
    tools: Any = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel_tool_calls: bool | None = None,
    tool_format: str | None = None,
) -> AnswerFormat | ToolSet | None:
    """The one format that was asked for, None when none was.

    ``schema`` as in `load_schema`, or a format that is made already. ``fields``: see
    `schema.fields`. ``regex``: a pattern that the whole answer matches. ``grammar``: EBNF with the
    rule ``root``, as text (with ``::=`` in it) or a file of it. ``choices``: texts, or a text as
    `schema.text_formats.read_choices` takes it. ``tools`` with the rest: see `schema.tools`; the
    model's chat template makes a format of the `ToolSet`.

    Raises `OptionError` when several are given, `SchemaError` for what cannot be used.
    """
    given = {
        "schema": schema,
        "fields": fields,
        "regex": regex,
        "grammar": grammar,
        "choices": choices,
        "tools": tools,
    }
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise OptionError(
            f"{' and '.join(f'`{name}`' for name in names)} exclude each other; give one of them"
        )
    beside = {
        "tool_choice": tool_choice,
        "parallel_tool_calls": parallel_tool_calls,
        "tool_format": tool_format,
    }
    lone = next((name for name, value in beside.items() if value is not None), None)
    if lone is not None and tools is None:
        raise OptionError(f"`{lone}` needs `tools`; give some functions to call")
    if not names:
        return None
    if tools is not None:
        from batchradix.schema.tools import ToolSet

        return ToolSet(tools, choice=tool_choice, parallel=parallel_tool_calls, style=tool_format)
    if fields is not None:
        from batchradix.schema.fields import fields_schema
        from batchradix.schema.output_schema import OutputSchema

        return OutputSchema(fields_schema(fields))
    if schema is not None:
        return load_format(schema)
    from batchradix.schema.text_formats import (
        ChoiceFormat,
        EbnfFormat,
        RegexFormat,
        read_choices,
        read_grammar,
    )

    if regex is not None:
        return RegexFormat(regex)
    if grammar is not None:
        return EbnfFormat(read_grammar(grammar))
    assert choices is not None
    return ChoiceFormat(read_choices(choices))


def format_arguments(format_: Any) -> dict[str, Any]:
    """The arguments of `answer_format` that make a format again, in plain values: what travels to
    another process. Raises `OptionError` for one of tools."""
    match getattr(format_, "kind", "tools"):
        case "json_schema":
            return {"schema": json.loads(format_.text)}
        case "regex":
            return {"regex": format_.text}
        case "ebnf":
            return {"grammar": format_.text}
        case "choices":
            return {"choices": json.loads(format_.text)}
        case kind:
            raise OptionError(f"a format of kind {kind} cannot be used here; give `tools` instead")


def load_format(spec: Any) -> AnswerFormat:
    """``spec`` itself where it is a format, else the schema that `load_schema` reads from it."""
    from batchradix.schema.load import load_schema

    if isinstance(getattr(spec, "grammar", None), GrammarSpec):
        return cast(AnswerFormat, spec)
    return load_schema(spec)
