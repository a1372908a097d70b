"""The ``messages`` column: a chat in the shape of the OpenAI API, checked and made plain."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from batchradix.errors import RowErrorCode
from batchradix.prompts.chat import ROLES, ChatTemplate, Conversation
from batchradix.prompts.row_problem import RowProblem
from batchradix.prompts.values import plain

_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING = ("reasoning_content", "thinking", "reasoning")


def read_conversation(
    messages: Any,
    tools: Any,
    template: ChatTemplate,
    system: str | None,
    *,
    may_continue: bool = True,
    must_continue: bool = False,
) -> Conversation:
    """A row's messages (a list of dicts, or JSON text of one) for ``template``.

    ``system`` goes before the messages of a row that has no system message of its own. A last
    message of the assistant's is a prefill, to be continued, unless ``may_continue`` is False: then
    the answer is a message after it. With ``must_continue`` there has to be one. Raises
    `RowProblem`.
    """
    listed = _listed(messages, "messages")
    if not listed:
        raise RowProblem(RowErrorCode.BAD_VALUE, "'messages' is empty; give at least one message")
    chat = [_message(message, i, template) for i, message in enumerate(listed)]
    if system is not None and not any(m["role"] in ("system", "developer") for m in chat):
        chat.insert(0, {"role": "system", "content": _for_template(system, template)})
    for role in ("system", "developer", "tool"):
        if any(message["role"] == role for message in chat) and template.leaves_out(role):
            raise RowProblem(
                RowErrorCode.UNSUPPORTED_CONTENT,
                f"the model's chat template leaves {role} messages out without a word; put their "
                f"text into a user message, or give another template with --chat-template",
            )
    if must_continue and chat[-1]["role"] != "assistant":
        raise RowProblem(
            RowErrorCode.BAD_VALUE,
            f"'continue_final_message' is true and the last message is of the role "
            f"{chat[-1]['role']}; end with the assistant's message that is to be continued, or "
            f"leave the parameter out",
        )
    prefill = may_continue and _is_prefill(chat[-1])
    return Conversation(messages=chat, tools=_tools(tools, template), prefill=prefill)


def ends_with_assistant(messages: Any) -> bool:
    """Whether the last of a row's messages, checked or not, is the assistant's."""
    try:
        last = _listed(messages, "messages")[-1]
    except (RowProblem, IndexError):
        return False
    return isinstance(last, Mapping) and last.get("role") == "assistant"


def _listed(value: Any, name: str) -> list[Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise RowProblem(
                RowErrorCode.BAD_VALUE,
                f"{name!r} is text and not JSON; it must be a list of objects, or JSON of one",
            ) from None
    if not isinstance(value, (list, tuple)):
        raise RowProblem(
            RowErrorCode.BAD_VALUE,
            f"{name!r} must be a list of objects, not {type(value).__name__}",
        )
    return list(value)


def _message(message: Any, index: int, template: ChatTemplate) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RowProblem(
            RowErrorCode.BAD_VALUE,
            f"{where} must be an object with 'role' and 'content', not {type(message).__name__}",
        )
    # Columns of structs fill in every key that any row has; chat templates expect absence.
    given = {str(key): value for key, value in message.items() if value is not None}
    role = given.get("role")
    if role not in ROLES:
        shown = "is missing" if role is None else f"is {str(role)[:40]!r}"
        raise RowProblem(
            RowErrorCode.BAD_VALUE,
            f"the role of {where} {shown}; it must be one of {', '.join(ROLES)}",
        )
    calls = given.pop("tool_calls", None)
    content = given.pop("content", None)
    out = {"role": role, **{key: plain(value, f"{where}.{key}") for key, value in given.items()}}
    if content is not None:
        out["content"] = _content(content, where, template)
    elif not calls and not any(out.get(key) for key in _REASONING):
        code = RowErrorCode.NULL_FIELD if "content" in message else RowErrorCode.BAD_VALUE
        raise RowProblem(code, f"{where} has no content; give it some text")
    if calls:
        out["tool_calls"] = _tool_calls(calls, where, template)
    return _with_reasoning(out)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Reasoning under each of the names that templates read it by."""
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _content(content: Any, where: str, template: ChatTemplate) -> Any:
    """A message's content: text, or the list of its parts where the template takes such."""
    if isinstance(content, str):
        return _for_template(content, template)
    if not isinstance(content, (list, tuple)):
        raise RowProblem(
            RowErrorCode.BAD_VALUE,
            f"the content of {where} must be text or a list of parts, not {type(content).__name__}",
        )
    texts = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
    if template.takes_parts:
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _for_template(text: str, template: ChatTemplate) -> Any:
    return [{"type": "text", "text": text}] if template.needs_parts else text


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise RowProblem(
            RowErrorCode.BAD_VALUE,
            f"{where} must be an object with 'type' and 'text', not {type(part).__name__}",
        )
    kind, text = part.get("type"), part.get("text")
    if kind not in _TEXT_PARTS:
        raise RowProblem(
            RowErrorCode.UNSUPPORTED_CONTENT,
            f"{where} is of type {str(kind)[:40]!r}; images, audio and other media are not "
            f"supported, only text",
        )
    if not isinstance(text, str):
        raise RowProblem(RowErrorCode.BAD_VALUE, f"the text of {where} must be text")
    return text


def _tool_calls(calls: Any, where: str, template: ChatTemplate) -> list[Any]:
    if not template.reads("tool_calls"):
        raise RowProblem(
            RowErrorCode.UNSUPPORTED_CONTENT,
            f"{where} has tool calls, and the model's chat template has no place for them; use a "
            f"model with tools, or write the call as content",
        )
    out = []
    for i, call in enumerate(_listed(calls, f"{where}.tool_calls")):
        name = f"{where}.tool_calls[{i}]"
        if not isinstance(call, Mapping):
            raise RowProblem(RowErrorCode.BAD_VALUE, f"{name} must be an object")
        made = plain(_without_nulls(call), name)
        holder = made.get("function", made)
        if not isinstance(holder, dict):
            raise RowProblem(RowErrorCode.BAD_VALUE, f"{name}.function must be an object")
        place = f"{name}.function.arguments" if "function" in made else f"{name}.arguments"
        if template.needs_argument_objects:
            holder["arguments"] = _as_object(holder.get("arguments"), place)
        elif not isinstance(holder.get("arguments"), (str, dict, type(None))):
            raise _no_arguments(place, holder["arguments"])
        out.append(made)
    return out


def _as_object(arguments: Any, place: str) -> Any:
    """Arguments as an object, so that a template that writes JSON does not quote them twice."""
    if arguments is None or isinstance(arguments, dict):
        return arguments or {}
    value = None
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(arguments)
    if not isinstance(value, dict):
        raise _no_arguments(place, arguments)
    return value


def _no_arguments(place: str, given: Any) -> RowProblem:
    shown = repr(given)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return RowProblem(
        RowErrorCode.BAD_VALUE, f"{place} must be an object or JSON text of one, not {shown}"
    )


def _tools(tools: Any, template: ChatTemplate) -> list[Any] | None:
    if tools is None:
        return None
    listed = _listed(tools, "tools")
    if not listed:
        return None
    if not template.reads("tools"):
        raise RowProblem(
            RowErrorCode.UNSUPPORTED_CONTENT,
            "the row has 'tools', and the model's chat template has no place for them; use a model "
            "with tools, or leave the column out",
        )
    made: list[Any] = plain(_without_nulls(listed), "tools")
    return made


def _without_nulls(value: Any) -> Any:
    """``value`` without the keys that are null, but for what is the tool's own business."""
    if isinstance(value, Mapping):
        return {
            k: v if k in ("arguments", "parameters") else _without_nulls(v)
            for k, v in value.items()
            if v is not None
        }
    if isinstance(value, (list, tuple)):
        return [_without_nulls(item) for item in value]
    return value


def _is_prefill(last: dict[str, Any]) -> bool:
    if last["role"] != "assistant":
        return False
    content = last.get("content")
    if content is None or content == [] or "tool_calls" in last:
        raise RowProblem(
            RowErrorCode.UNSUPPORTED_CONTENT,
            "the last message is the assistant's and has no text to continue; end with a user or "
            "tool message",
        )
    return True
