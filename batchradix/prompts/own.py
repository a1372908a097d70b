"""Prompts that rows bring themselves: a column ``messages``, or a raw ``prompt``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from batchradix.errors import RowErrorCode
from batchradix.prompts.chat import ChatTemplate, Conversation
from batchradix.prompts.messages import read_conversation
from batchradix.prompts.row_problem import RowProblem
from batchradix.prompts.thinking import KWARGS_COLUMN, Asked
from batchradix.prompts.values import render_value

_COLUMNS = ("messages", "prompt", "tools", KWARGS_COLUMN)
_CONTINUES = "continue_final_message"  # of requests, which all have it


@dataclass(frozen=True, slots=True)
class OwnPrompts:
    """How a job reads such rows.

    ``chat`` is None where ``no_chat`` says why. ``system`` goes before messages without one;
    ``has_tools``: the run has functions of its own, ``tools`` where the chat template shows them.
    ``are_requests``: rows are those of an OpenAI batch file, which say themselves whether a last
    assistant message is to be continued.
    """

    chat: ChatTemplate | None
    no_chat: str
    system: str | None
    has_tools: bool
    tools: list[dict[str, Any]] | None
    are_requests: bool

    @property
    def columns(self) -> frozenset[str]:
        return frozenset([*_COLUMNS, *((_CONTINUES,) if self.are_requests else ())])

    def may_continue(self, values: Mapping[str, Any]) -> bool:
        """Whether a last message of the assistant's is a prefill."""
        return not self.are_requests or bool(values[_CONTINUES])

    def conversation(self, values: Mapping[str, Any], asked: Asked) -> Conversation | None:
        """The chat that a row brings, None where it brings none. Raises `RowProblem`."""
        if values.get("messages") is None:
            return None
        if self.chat is None:
            raise RowProblem(
                RowErrorCode.TEMPLATE_FAILED, f"the row has 'messages', and {self.no_chat}"
            )
        tools = values.get("tools")
        if self.has_tools and tools:
            raise RowProblem(
                RowErrorCode.BAD_VALUE,
                "the row has 'tools' of its own, and the run's tools are those that answers "
                "may call; leave the column or --tools out",
            )
        if self.are_requests and not self.chat.reads("tools"):
            tools = None  # a warning says so
        chat = read_conversation(
            values["messages"],
            tools,
            self.chat,
            self.system,
            may_continue=self.may_continue(values),
            must_continue=self.are_requests and bool(values[_CONTINUES]),
        )
        return asked.applied(replace(chat, tools=self.tools or chat.tools))

    def raw(self, values: Mapping[str, Any]) -> str:
        """The raw prompt of a row without messages. Raises `RowProblem`."""
        if values.get("prompt") is None:
            code, what = RowErrorCode.MISSING_FIELD, "has neither 'prompt' nor 'messages'"
            if "prompt" in values or "messages" in values:
                name = "prompt" if "prompt" in values else "messages"
                code, what = RowErrorCode.NULL_FIELD, f"has null in field {name!r}"
            raise RowProblem(code, f"the row {what}; fill it in or leave the row out")
        if self.system is not None:
            raise RowProblem(
                RowErrorCode.BAD_VALUE,
                "a system message was given and this row has a raw 'prompt', not 'messages'",
            )
        prompt = values["prompt"]
        if isinstance(prompt, (dict, list, tuple)):
            raise RowProblem(
                RowErrorCode.BAD_VALUE,
                f"field 'prompt' must be text, not {type(prompt).__name__}; chat messages belong "
                f"into a column named 'messages'",
            )
        return render_value(prompt, "prompt")
