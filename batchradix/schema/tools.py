"""Functions that a model may call, and answers that are calls of them.

`ToolSet` is what a job asks for; how its model writes calls is known once the model's chat
template is, and `ToolSet.format_for` then makes the `AnswerFormat`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchradix.errors import OptionError, RowErrorCode, SchemaError
from batchradix.schema.answers import VALUE_METADATA, InvalidAnswer, json_text
from batchradix.schema.output_schema import OutputSchema
from batchradix.schema.tool_styles import STYLES, ToolStyle, detect_style, read_calls
from batchradix.types import GrammarSpec

if TYPE_CHECKING:
    import pyarrow as pa

# A schema of no more than these and without properties is how functions without parameters are
# described; as a JSON Schema it would take any.
_OF_NO_PARAMETERS = {"type", "properties", "required", "title", "description", "$schema"}
_AUTO, _REQUIRED = "auto", "required"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function: its name and the schema of its arguments."""

    name: str
    parameters: OutputSchema


class ToolSet:
    """Functions, and how they are to be called.

    ``tools``: OpenAI's list (``{"type": "function", "function": {...}}``, or the inner objects
    alone), its JSON text, or a file of it. ``choice``: ``auto`` (free text, calls, or text and
    then calls), ``required`` (calls), a function's name or OpenAI's object for it (one call of
    that function); None is ``auto``, and ``required`` in the style ``json``. ``parallel``:
    whether an answer may hold several calls; None where the style has them. ``style``: a key of
    `tool_styles.STYLES`, None for that of the model's chat template.

    Raises `OptionError` or `SchemaError` for what cannot be used. ``json``: the list in OpenAI's
    shape, as chat templates take it.
    """

    def __init__(
        self,
        tools: str | Path | Sequence[Mapping[str, Any]],
        *,
        choice: str | Mapping[str, Any] | None = None,
        parallel: bool | None = None,
        style: str | None = None,
    ) -> None:
        self.json = _openai_list(_listed(tools))
        self.tools = tuple(_tool(tool["function"]) for tool in self.json)
        names = [tool.name for tool in self.tools]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise SchemaError(f"tools: there are two functions called {repeated!r}")
        if style is not None and style not in STYLES:
            raise OptionError(f"`tool_format` must be {_either(STYLES)}, not {style!r}")
        if parallel is not None and not isinstance(parallel, bool):
            raise OptionError(f"`parallel_tool_calls` must be True or False, not {parallel!r}")
        self._choice = _choice(choice, names)
        self._parallel = parallel
        self._style = style

    def format_for(self, model: str, chat_template: str | None) -> ToolFormat:
        """The format of answers of a model, by the style asked for or that of its chat template.

        Raises `OptionError` when the style is not known or cannot do what was asked for.
        """
        style = detect_style(chat_template) if self._style is None else STYLES[self._style]
        if style is None:
            why = (
                "which has no chat template"
                if chat_template is None
                else "whose chat template shows none of the known ways"
            )
            raise OptionError(
                f"tools: how to call functions is not known for model {model}, {why}; give "
                f"`tool_format` {_either(STYLES)} (json works with every model)"
            )
        choice = self._choice or (_AUTO if style.marker else _REQUIRED)
        if choice == _AUTO and not style.marker:
            raise OptionError(
                f"`tool_choice` auto needs calls that can be told from free text, and the format "
                f"{style.name} has no marker; use required, or another `tool_format`"
            )
        if self._parallel and style.separator is None:
            raise OptionError(
                f"`parallel_tool_calls` cannot be had in the format {style.name}, in which an "
                f"answer is one call"
            )
        return ToolFormat(self, style, choice, parallel=self._parallel is not False)


class ToolFormat:
    """Answers that are calls of functions, an `answer_format.AnswerFormat`.

    ``value`` is a list of (name, arguments as JSON text), empty for free text.
    """

    takes_stop = True
    choices: tuple[str, ...] | None = None

    def __init__(self, tools: ToolSet, style: ToolStyle, choice: str, *, parallel: bool) -> None:
        is_one = choice not in (_AUTO, _REQUIRED)
        allowed = [tool for tool in tools.tools if not is_one or tool.name == choice]
        has_many = parallel and not is_one and style.separator is not None
        self.tools: list[dict[str, Any]] = tools.json
        self.text = json_text(tools.json)
        self.kind = f"tool_calls {style.name} {choice}{'' if has_many else ' single'}"
        self.grammar = GrammarSpec(
            kind="tool_calls",
            source=json_text(
                {
                    "style": style.name,
                    "must_call": choice != _AUTO,
                    "has_many": has_many,
                    "functions": [
                        {"name": tool.name, "arguments": tool.parameters.json_grammar.source}
                        for tool in allowed
                    ],
                }
            ),
        )
        self._allowed = {tool.name: tool.parameters for tool in allowed}
        self._style = style
        self._must_call = choice != _AUTO
        self._has_many = has_many

    @property
    def prompt_line(self) -> str:
        """How to call, for a model whose chat template does not say it."""
        example = self._style.render([("NAME", "{ARGUMENTS}")])
        may = "Call functions" if self._must_call else "You may call functions"
        return f"{may} by writing\n{example}\nThese are the functions:"

    @property
    def notices(self) -> tuple[str, ...]:
        """What decoding does not enforce, function by function."""
        return tuple(
            f"function {name}: {notice}"
            for name, parameters in self._allowed.items()
            for notice in parameters.notices
        )

    @property
    def arrow_type(self) -> pa.DataType:
        """``list<struct<name: string, arguments: string>>``; the arguments are marked as JSON."""
        import pyarrow as pa

        from batchradix.schema.arrow_types import JSON_METADATA

        call = [
            pa.field("name", pa.string()),
            pa.field("arguments", pa.string(), metadata=JSON_METADATA),
        ]
        return pa.list_(pa.struct(call))

    def arrow_field(self, name: str) -> pa.Field:
        """A nullable field whose values JSON lines hold."""
        import pyarrow as pa

        return pa.field(name, self.arrow_type, nullable=True, metadata=VALUE_METADATA)

    def to_arrow(self, values: Sequence[Any | None]) -> pa.Array:
        """An array of `arrow_type` from answers; None (no answer) becomes null."""
        import pyarrow as pa

        return pa.array(values, type=self.arrow_type)

    def parse(self, text: str) -> list[dict[str, str]]:
        """The calls of a finished answer: ``name``, and ``arguments`` as they were written.

        Raises `InvalidAnswer` for what is no call where one begins (``invalid_json``), and for
        calls that were not allowed or whose arguments break their schema (``schema_mismatch``).
        """
        calls = read_calls(text, self._style)
        if not calls and self._must_call:
            raise InvalidAnswer(RowErrorCode.SCHEMA_MISMATCH, "it calls no function")
        if len(calls) > 1 and not self._has_many:
            raise InvalidAnswer(RowErrorCode.SCHEMA_MISMATCH, "it calls more than one function")
        for number, call in enumerate(calls):
            parameters = self._allowed.get(call.name)
            if parameters is None:
                raise InvalidAnswer(
                    RowErrorCode.SCHEMA_MISMATCH,
                    f"{call.name!r} is no function that may be called",
                    f"/{number}/name",
                )
            try:
                parameters.check(call.arguments)
            except InvalidAnswer as invalid:
                pointer = f"/{number}/arguments{invalid.pointer}"
                raise InvalidAnswer(invalid.code, invalid.message, pointer) from None
        return [{"name": call.name, "arguments": call.arguments} for call in calls]


def _listed(tools: Any) -> list[Any]:
    source = "the list"
    if isinstance(tools, str | Path):
        text = str(tools)
        if isinstance(tools, Path) or not text.lstrip().startswith(("[", "{")):
            source = text
            text = _file_text(Path(tools))
        try:
            tools = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SchemaError(f"tools: {source} is not JSON: {error}") from None
    if isinstance(tools, Mapping):
        tools = [tools]
    if not isinstance(tools, list | tuple):
        raise SchemaError(f"tools: expected a list of functions, not {type(tools).__name__}")
    if not tools:
        raise SchemaError("tools: there are none; give at least one function")
    try:
        text = json.dumps(tools, allow_nan=False, ensure_ascii=False)
        text.encode()
        copied: list[Any] = json.loads(text)
    except UnicodeEncodeError:
        raise SchemaError("tools: a string in them holds half of a surrogate pair") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(f"tools: {source} is not JSON: {error}") from None
    return copied


def _file_text(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except FileNotFoundError:
        raise SchemaError(
            f"tools: the file {path} does not exist; give a JSON file of functions"
        ) from None
    except UnicodeDecodeError as error:
        raise SchemaError(f"tools: {path} is not UTF-8 text (byte {error.start})") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SchemaError(f"tools: {path} cannot be read: {reason}") from None


def _openai_list(tools: list[Any]) -> list[dict[str, Any]]:
    """Every tool in OpenAI's shape."""
    found = []
    for number, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise SchemaError(f"tools: number {number} is no object")
        if tool.get("type", "function") != "function" and "name" not in tool:
            raise SchemaError(
                f"tools: number {number} is of type {tool['type']!r}, and only functions can be "
                f"called"
            )
        function = tool.get("function", tool)
        if not isinstance(function, dict):
            raise SchemaError(f"tools: number {number} has no object at 'function'")
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise SchemaError(f"tools: the function of number {number} has no name")
        if function is tool:  # a bare function may still say that it is one
            function = {key: part for key, part in tool.items() if (key, part) != _TYPE}
        found.append({"type": "function", "function": function})
    return found


_TYPE = ("type", "function")


def _tool(function: dict[str, Any]) -> Tool:
    name, schema = function["name"], function.get("parameters")
    where = f"tools: the parameters of {name!r}"
    if schema is None:
        schema = {"properties": {}}
    if not isinstance(schema, dict):
        raise SchemaError(f"{where} must be a JSON Schema of an object")
    if schema.get("type", "object") != "object":
        raise SchemaError(f"{where} must describe an object, not {schema['type']!r}")
    if schema.get("properties") == {} and schema.keys() <= _OF_NO_PARAMETERS:
        schema = {**schema, "additionalProperties": False}
    try:
        return Tool(name, OutputSchema({"type": "object", **schema}))
    except SchemaError as error:
        raise SchemaError(f"{where}: {str(error).removeprefix('schema: ')}") from None


def _choice(choice: Any, names: list[str]) -> str | None:
    if isinstance(choice, Mapping):
        function = choice.get("function")
        choice = function.get("name") if isinstance(function, Mapping) else choice
    if choice is None or choice in (_AUTO, _REQUIRED) or choice in names:
        found: str | None = choice
        return found
    raise OptionError(
        f"`tool_choice` must be auto, required or the name of a function ({', '.join(names)}), "
        f"not {choice!r}"
    )


def _either(names: Mapping[str, object]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}"
