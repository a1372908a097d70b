"""How models write tool calls: the text around function names and arguments, and reading it.

An answer is free text, then calls, then nothing. A style says what stands before the first
call, between calls and after the last; what is written has the spaces that the models were
trained on (``{"name": "f", "arguments": ``), arguments themselves are compact JSON. Reading
is lenient about whitespace around all of these. Markers such as ``<tool_call>`` are text here,
whatever tokens a model has for them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from batchradix.errors import RowErrorCode
from batchradix.schema.answers import InvalidAnswer, json_text

_WORD = re.compile(r"<\w*>|</\w+>|\[[A-Z_]+\]|\"\w+\"|\S")
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolStyle:
    """One way of writing calls.

    ``opening``, ``separator`` (None: there is only ever one call) and ``closing`` stand before,
    between and after calls. ``marker``: what free text never holds, since calls begin there; ""
    where calls cannot be told from free text. ``marks_start``: the marker counts at the very
    beginning only. ``head``: a call up to its arguments with the name as JSON for ``%s``.
    """

    name: str
    opening: str
    separator: str | None
    closing: str
    marker: str
    head: str
    arguments_key: str = "arguments"
    marks_start: bool = False

    def call_head(self, function: str) -> str:
        """A call of ``function`` up to its arguments; ``}`` ends it."""
        return self.head % json_text(function)

    def render(self, calls: list[tuple[str, str]]) -> str:
        """(function, arguments as JSON text) of each call as an answer; "" for no calls."""
        if not calls:
            return ""
        texts = [f"{self.call_head(name)}{arguments}}}" for name, arguments in calls]
        return self.opening + (self.separator or "").join(texts) + self.closing


STYLES: Mapping[str, ToolStyle] = {
    style.name: style
    for style in (
        ToolStyle(
            name="hermes",
            opening="<tool_call>\n",
            separator="\n</tool_call>\n<tool_call>\n",
            closing="\n</tool_call>",
            marker="<tool_call>",
            head='{"name": %s, "arguments": ',
        ),
        ToolStyle(
            name="llama3",
            opening="",
            separator=None,
            closing="",
            marker='{"name":',
            marks_start=True,
            head='{"name": %s, "parameters": ',
            arguments_key="parameters",
        ),
        ToolStyle(
            name="mistral",
            opening="[TOOL_CALLS][",
            separator=", ",
            closing="]",
            marker="[TOOL_CALLS]",
            head='{"name": %s, "arguments": ',
        ),
        ToolStyle(
            name="json",
            opening="[",
            separator=",",
            closing="]",
            marker="",
            head='{"name":%s,"arguments":',
        ),
    )
}

# What stands in templates of models that write their calls in yet another way.
_OTHER_WAYS = ("<function=", "<arg_key>", "[ARGS]", "[CALL_ID]", "<｜tool▁call")


def detect_style(chat_template: str | None) -> ToolStyle | None:
    """The style that a chat template speaks of; None where it is none of these."""
    text = chat_template or ""
    if any(sign in text for sign in _OTHER_WAYS):
        return None
    if "<tool_call>" in text and "arguments" in text:
        return STYLES["hermes"]
    if "[TOOL_CALLS]" in text:
        return STYLES["mistral"]
    if re.search(r'\{\\?"name\\?": function name, \\?"parameters\\?":', text):
        return STYLES["llama3"]
    return None


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call as it stands in an answer: the function's name, and its arguments' own text."""

    name: str
    arguments: str


def read_calls(text: str, style: ToolStyle) -> list[WrittenCall]:
    """The calls of a finished answer, [] where it is free text.

    Raises `InvalidAnswer` (``invalid_json``) where calls begin and are not what ``style`` says.
    """
    if style.marks_start:
        start = 0 if text.startswith(style.marker) else -1
    else:
        start = text.find(style.marker)
    if start < 0:
        return []
    reader = _Reader(text, start)
    reader.take(style.opening)
    calls = [reader.call(style)]
    while style.separator is not None and reader.takes(style.separator):
        calls.append(reader.call(style))
    reader.take(style.closing)
    reader.end()
    return calls


class _Reader:
    """A place in an answer; whatever is asked for may have whitespace before it."""

    def __init__(self, text: str, place: int) -> None:
        self._text = text
        self._place = place

    def takes(self, expected: str) -> bool:
        """Goes beyond ``expected``, whatever whitespace parts its words; False, with the place as
        it was, where it is not there."""
        before = self._place
        for word in _WORD.findall(expected):
            self._skip()
            if not self._text.startswith(word, self._place):
                self._place = before
                return False
            self._place += len(word)
        return True

    def take(self, expected: str) -> None:
        if not self.takes(expected):
            raise self._broken(f"expected {expected.strip()!r}")

    def call(self, style: ToolStyle) -> WrittenCall:
        before, after = (part.strip() for part in style.head.split("%s"))
        self.take(before)
        name = self._value()
        self.take(after)
        arguments = self._value()
        self.take("}")
        function = json.loads(name)
        if not isinstance(function, str):
            raise self._broken("the name of a call is no string")
        return WrittenCall(name=function, arguments=arguments)

    def end(self) -> None:
        self._skip()
        if self._place < len(self._text):
            raise self._broken("text goes on after the calls")

    def _value(self) -> str:
        """The text of the JSON value that stands here."""
        self._skip()
        try:
            _, end = _DECODER.raw_decode(self._text, self._place)
        except (ValueError, RecursionError):
            raise self._broken("expected JSON") from None
        found = self._text[self._place : end]
        self._place = end
        return found

    def _skip(self) -> None:
        found = _SPACE.match(self._text, self._place)
        assert found is not None
        self._place = found.end()

    def _broken(self, what: str) -> InvalidAnswer:
        return InvalidAnswer(
            RowErrorCode.INVALID_JSON, f"no tool calls: {what} at character {self._place}"
        )
