"""The text of a row that is too long for its prompt: which it is, cutting it, parts of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from batchradix.checkpoint.tokenizer import Tokenizer
from batchradix.prompts.row_problem import RowProblem
from batchradix.prompts.surrogates import clean_text
from batchradix.prompts.template import Place
from batchradix.types import I64, Row

GAP = "\n[...]\n"
"""What stands where the middle of a text was taken out."""

_Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class LongText:
    """The longest text that a row brings into its prompt, and where its values hold it."""

    row: Row
    text: str
    path: _Path

    def put(self, text: str) -> Row:
        """The row with another text in its place."""
        return replace(self.row, values=_put(self.row.values, self.path, text))


def longest_text(row: Row, places: Sequence[Place] | None) -> LongText | None:
    """The row's longest text: of the ``places`` of a template, else of a raw ``prompt`` or what the
    user says in ``messages``. None where there is none; what the model would be told then is up to
    the builder of prompts."""
    if places is not None:
        found = [_placed(row, place) for place in places]
    elif row.values.get("messages") is not None:
        found = _said(row)
    else:
        prompt = row.values.get("prompt")
        found = [LongText(row, prompt, ("prompt",))] if isinstance(prompt, str) else []
    texts = [each for each in found if each is not None and each.text]
    return max(texts, key=lambda each: len(each.text), default=None)


def _placed(row: Row, place: Place) -> LongText | None:
    try:
        text = clean_text(place.text(row.values))
    except RowProblem:
        return None
    path: list[str | int] = [place.column]
    value: Any = row.values[place.column]
    for step in place.inner:
        key = step if isinstance(value, Mapping) else int(step)
        path.append(key)
        value = value[key]
    return LongText(row, text, tuple(path))


def _said(row: Row) -> list[LongText | None]:
    messages = row.values["messages"]
    if isinstance(messages, str):
        try:
            messages = json.loads(messages)
        except (ValueError, RecursionError):
            return []
    if not isinstance(messages, (list, tuple)):
        return []
    row = replace(row, values={**row.values, "messages": list(messages)})
    found: list[LongText | None] = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") != "user":
            continue
        content = message.get("content")
        if isinstance(content, str):
            found.append(LongText(row, clean_text(content), ("messages", i, "content")))
        elif isinstance(content, (list, tuple)):
            found += [
                LongText(row, clean_text(part["text"]), ("messages", i, "content", j, "text"))
                for j, part in enumerate(content)
                if isinstance(part, Mapping) and isinstance(part.get("text"), str)
            ]
    return found


def _put(value: Any, path: _Path, text: str) -> Any:
    if not path:
        return text
    step, *inner = path
    if isinstance(step, str):
        return {**value, step: _put(value[step], tuple(inner), text)}
    return [*value[:step], _put(value[step], tuple(inner), text), *value[step + 1 :]]


class Cutter:
    """Cuts one text at the places between its tokens."""

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        self._text = text
        self._places: I64 = tokenizer.places(text)
        self.num_tokens = len(self._places)

    def span(self, begin: int, end: int) -> tuple[int, int]:
        """From and up to which character tokens [begin, end) go, with what stands between the last
        of them and the next. A character of several tokens belongs to each of them."""
        start = 0 if begin <= 0 else int(self._places[begin, 0])
        if end >= self.num_tokens:
            return start, len(self._text)
        return start, max(int(self._places[end, 0]), int(self._places[end - 1, 1]))

    def slice(self, begin: int, end: int) -> str:
        """The text of `span`."""
        start, stop = self.span(begin, end)
        return self._text[start:stop]

    def shortened(self, keep: int, overflow: str) -> str:
        """The text with ``keep`` tokens left: its last, or both ends (``truncate-middle``)."""
        if overflow == "truncate-left":
            return self.slice(self.num_tokens - keep, self.num_tokens)
        head = (keep + 1) // 2
        tail = self.slice(self.num_tokens - (keep - head), self.num_tokens) if keep > head else ""
        return f"{self.slice(0, head)}{GAP}{tail}"

    def parts(self, size: int, overlap: int) -> list[str]:
        """The text in parts of ``size`` tokens, each with ``overlap`` of the one before."""
        return [
            self.slice(begin, end) for begin, end in part_bounds(self.num_tokens, size, overlap)
        ]


def part_bounds(num_tokens: int, size: int, overlap: int) -> list[tuple[int, int]]:
    """Half-open intervals of at most ``size`` tokens that cover [0, num_tokens) in order, each
    but the first beginning ``overlap`` (less than ``size``) tokens before the end of the last."""
    bounds = [(0, min(size, num_tokens))]
    while bounds[-1][1] < num_tokens:
        begin = bounds[-1][1] - overlap
        bounds.append((begin, min(begin + size, num_tokens)))
    return bounds
