"""What answers to OpenAI's requests may look like: their ``response_format`` and their tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchradix.errors import OptionError, SchemaError
from batchradix.schema.answer_format import AnswerFormat
from batchradix.schema.row_formats import RESPONSE_FORMAT, RowFormats
from batchradix.schema.tool_styles import STYLES, ToolStyle, detect_style
from batchradix.schema.tools import ToolSet

_JSON_STYLE = "json"
_TOOL_COLUMNS = ("tools", "tool_choice", "parallel_tool_calls")


class RequestFormats(RowFormats):
    """Reads the columns ``response_format``, ``tools``, ``tool_choice`` and
    ``parallel_tool_calls`` of requests; equal ones share one format.

    ``style``: how calls are written, a key of `tool_styles.STYLES`; None for that of the model's
    chat template. Where that shows none, calls that are required are written as ``json``.
    """

    def __init__(self, *, model: str, chat_template: str | None, style: str | None) -> None:
        super().__init__(RESPONSE_FORMAT, drops_nulls=False)
        self._model = model
        self._chat_template = chat_template
        self._asked_style = style

    @property
    def columns(self) -> frozenset[str]:
        return frozenset({RESPONSE_FORMAT, *_TOOL_COLUMNS})

    @property
    def style(self) -> ToolStyle:
        """How this model's calls are written; which may not do for free text."""
        found = detect_style(self._chat_template)
        return STYLES[self._asked_style or (_JSON_STYLE if found is None else found.name)]

    def cell(self, values: Mapping[str, Any]) -> Any:
        if not values.get("tools"):
            value = super().cell(values)
            # Said to be a format, so it is none of a request with tools.
            return {"type": None, **value} if _has_tools(value) else value
        return {name: values[name] for name in sorted(self.columns) if name in values}

    def name_of(self, cell: Any) -> str:
        return "tools" if _has_tools(cell) else RESPONSE_FORMAT

    def _load(self, value: Any) -> AnswerFormat | None:
        if not _has_tools(value):
            return super()._load(value)
        choice, parallel = value.get("tool_choice"), value.get("parallel_tool_calls")
        if parallel is not None and not isinstance(parallel, bool):
            raise SchemaError(f"'parallel_tool_calls' must be true or false, not {parallel!r}")
        if not isinstance(value["tools"], list):
            raise SchemaError("'tools' must be a list of functions")
        if isinstance(choice, Mapping) and choice.get("type") != "function":
            raise SchemaError(f"'tool_choice' of type {choice.get('type')!r} is not supported")
        if choice == "auto" and _limits(value.get(RESPONSE_FORMAT)):
            raise SchemaError(
                "'response_format' beside tools that may or may not be called is not supported; "
                "give one of them, or 'tool_choice' required"
            )
        style = self._asked_style
        if choice != "auto" and style is None:
            style = self.style.name
        try:
            tools = ToolSet(
                value["tools"],
                choice=choice,
                parallel=False if parallel is False else None,
                style=style,
            )
            return tools.format_for(self._model, self._chat_template)
        except OptionError as error:
            raise SchemaError(str(error)) from None


def _has_tools(cell: Any) -> bool:
    """Whether it holds a request's tools, and not its ``response_format`` alone."""
    return isinstance(cell, Mapping) and "tools" in cell and "type" not in cell


def _limits(response_format: Any) -> bool:
    """Whether a response format leaves out any text."""
    return isinstance(response_format, Mapping) and response_format.get("type") != "text"
