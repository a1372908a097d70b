"""Unfinished JSON text: which objects and arrays are open, and where its last value broke off."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from batchradix.schema.answers import pointer_step

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SCALAR = re.compile(rb"[-+.0-9A-Za-z]+")
_LITERALS = (b"true", b"false", b"null")
# A member of an object or an item of an array is remembered up to this many bytes: long enough
# for tags, which tell the branches of a union apart.
_MAX_TAG_BYTES = 200


class Place(Enum):
    """Where in an open object or array the text ends."""

    START = "after the opening bracket"
    KEY = "inside a key"
    COLON = "after a key"
    VALUE = "after a colon"
    INSIDE = "inside a value that is itself open"
    NEXT = "after a whole value"
    COMMA = "after a comma"


@dataclass(slots=True)
class OpenObject:
    """``members``: whole members in order, the value None where it is no short scalar."""

    start: int
    place: Place = Place.START
    key_start: int = 0
    key: str = ""
    members: dict[str, Any] = field(default_factory=dict)
    is_scalar: dict[str, bool] = field(default_factory=dict)


@dataclass(slots=True)
class OpenArray:
    """``num_items``: whole items."""

    start: int
    place: Place = Place.START
    num_items: int = 0


@dataclass(slots=True)
class OpenScalar:
    """A string, number or literal that the end of the text cut; a number may be whole."""

    start: int


OpenValue = OpenObject | OpenArray | OpenScalar


class NotJson(ValueError):
    """The text is no beginning of compact JSON."""


def read_open(text: bytes) -> list[OpenValue] | None:
    """The open values from the outside in; empty before the first byte, None when none is open.

    ``text``: a prefix of compact JSON (no whitespace between tokens), perhaps cut within an
    escape or a UTF-8 character. A number that reaches the end of the text counts as open.
    Raises `NotJson`.
    """
    stack: list[OpenValue] = []
    at = 0
    is_whole = False
    while at < len(text):
        if is_whole:
            raise NotJson("text goes on after the value")
        top = stack[-1] if stack else None
        if isinstance(top, OpenObject):
            at = _in_object(top, text, at, stack)
        elif isinstance(top, OpenArray):
            at = _in_array(top, text, at, stack)
        else:
            at = _value(text, at, stack)
        if at < 0:  # the last value is a cut scalar, now on the stack
            return stack
        is_whole = not stack
    return None if is_whole else stack


def _in_object(top: OpenObject, text: bytes, at: int, stack: list[OpenValue]) -> int:
    char = text[at : at + 1]
    if top.place in (Place.START, Place.COMMA) and char == b'"':
        top.key_start = at
        found = _STRING.match(text, at)
        if found is None:
            top.place = Place.KEY
            return -1
        top.key = json.loads(found[0])
        top.place = Place.COLON
        return found.end()
    if top.place is Place.COLON and char == b":":
        top.place = Place.VALUE
        return at + 1
    if top.place is Place.VALUE:
        top.place = Place.INSIDE
        return _value(text, at, stack)
    if top.place is Place.NEXT and char == b",":
        top.place = Place.COMMA
        return at + 1
    if top.place in (Place.START, Place.NEXT) and char == b"}":
        return _closed(text, at, stack)
    raise NotJson(f"{char!r} at {at}")


def _in_array(top: OpenArray, text: bytes, at: int, stack: list[OpenValue]) -> int:
    char = text[at : at + 1]
    if top.place in (Place.START, Place.NEXT) and char == b"]":
        return _closed(text, at, stack)
    if top.place is Place.NEXT and char == b",":
        top.place = Place.COMMA
        return at + 1
    if top.place in (Place.START, Place.COMMA):
        top.place = Place.INSIDE
        return _value(text, at, stack)
    raise NotJson(f"{char!r} at {at}")


def _value(text: bytes, at: int, stack: list[OpenValue]) -> int:
    char = text[at : at + 1]
    if char == b"{":
        stack.append(OpenObject(at))
        return at + 1
    if char == b"[":
        stack.append(OpenArray(at))
        return at + 1
    found = (_STRING if char == b'"' else _SCALAR).match(text, at)
    if found is None and char != b'"':
        raise NotJson(f"{char!r} at {at}")
    reaches_end = found is not None and found.end() == len(text)
    if found is None or (reaches_end and char != b'"' and found[0] not in _LITERALS):
        stack.append(OpenScalar(at))
        return -1
    _finished(stack, found[0])
    return found.end()


def _closed(text: bytes, at: int, stack: list[OpenValue]) -> int:
    stack.pop()
    _finished(stack, None)
    return at + 1


def _finished(stack: list[OpenValue], spelling: bytes | None) -> None:
    if not stack:
        return
    parent = stack[-1]
    if isinstance(parent, OpenArray):
        parent.num_items += 1
        parent.place = Place.NEXT
    elif isinstance(parent, OpenObject):
        is_short = spelling is not None and len(spelling) <= _MAX_TAG_BYTES
        parent.members[parent.key] = json.loads(spelling) if is_short and spelling else None
        parent.is_scalar[parent.key] = is_short
        parent.place = Place.NEXT


@dataclass(frozen=True, slots=True)
class _Span:
    """A value in a whole text: ``pointer`` to it, the bytes it covers, the kind of its start."""

    pointer: str
    start: int
    end: int
    kind: str


def first_cut(text_before: str, closed_text: str) -> str:
    """The JSON pointer (RFC 6901) of the first value of ``closed_text`` that its author did not
    finish: one that ``text_before``, from which it was closed, breaks off in or does not reach.

    A number at the very end of ``text_before`` counts as cut, since digits might have followed;
    so does an array to which only its bracket was added. "" (the whole answer) when nothing but
    closing brackets of objects was missing. Half a character at the end of ``text_before`` must
    have been left out. Raises `NotJson` when ``closed_text`` is no compact JSON or
    nests too deeply.
    """
    cut = len(text_before.encode())
    spans: list[_Span] = []
    try:
        _walk(closed_text.encode(), 0, "", spans)
    except RecursionError:
        raise NotJson("it nests too deeply") from None
    unfinished = (
        span
        for span in spans
        if span.start >= cut or (span.kind not in "{[" and not _is_before(span, cut))
    )
    first = next(unfinished, None)
    arrays = [span for span in spans if span.kind == "[" and span.start < cut < span.end]
    if arrays and (first is None or first.start > arrays[-1].end):
        return arrays[-1].pointer  # the innermost open array: nothing was added to it
    return "" if first is None else first.pointer


def _is_before(span: _Span, cut: int) -> bool:
    """Whether a value was whole before the cut."""
    is_number = span.kind not in '"{[tfn'
    return span.end < cut or (span.end == cut and not is_number)


def _walk(text: bytes, at: int, pointer: str, spans: list[_Span]) -> int:
    """Adds the value at ``at`` and those inside it, a parent first; returns where it ends."""
    kind = text[at : at + 1].decode("latin-1")
    if kind not in ("{", "["):
        found = (_STRING if kind == '"' else _SCALAR).match(text, at)
        if found is None:
            raise NotJson(f"{kind!r} at {at}")
        spans.append(_Span(pointer, at, found.end(), kind))
        return found.end()
    index, start = len(spans), at
    spans.append(_Span(pointer, at, at, kind))
    at += 1
    count = 0
    while text[at : at + 1] not in (b"}", b"]"):
        at += text[at : at + 1] == b","
        step: str | int = count
        if kind == "{":
            key = _STRING.match(text, at)
            if key is None or text[key.end() : key.end() + 1] != b":":
                raise NotJson(f"no key at {at}")
            step = json.loads(key[0])
            at = key.end() + 1
        at = _walk(text, at, pointer_step(pointer, step), spans)
        count += 1
    spans[index] = _Span(pointer, start, at + 1, kind)
    return at + 1
