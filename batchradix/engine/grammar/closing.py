"""Closing an unfinished answer: the shortest text that makes it whole, checked by its grammar.

The text is read as far as it goes (`open_text`), the schema is walked along what is open in it
(`outline`), and every open value is ended as shortly as its schema allows. Candidates are put to
the grammar's matcher, shortest first. Where none is right (a format or pattern that the walk does
not know, a regular expression, an EBNF grammar) a bounded search over the matcher's allowed bytes
takes its place.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from batchradix.engine.grammar.choices import ChoiceState
from batchradix.engine.grammar.open_text import (
    NotJson,
    OpenArray,
    OpenObject,
    OpenScalar,
    OpenValue,
    Place,
    first_cut,
    read_open,
)
from batchradix.engine.grammar.outline import MAX_SHORTEST_BYTES, Outline, Schema, encoded
from batchradix.engine.grammar.pattern_walk import PatternWalk
from batchradix.engine.grammar.scalar_rest import (
    character_codes,
    integer_rest,
    number_rests,
    string_rest,
)
from batchradix.engine.grammar.state import AnyState, GrammarState
from batchradix.engine.grammar.tool_calls import CallLayout, unfinished
from batchradix.errors import SchemaError
from batchradix.schema.pattern_parser import UnsupportedPattern
from batchradix.types import GrammarSpec

__all__ = ["Closer", "first_cut", "minimal_answer"]

# Ways to end one open value that are kept, shortest first.
_MAX_WAYS = 8
_MAX_TRIED = 64
_MAX_SEARCHED = 2000
_LITERALS = (b"true", b"false", b"null")
_LETTERS = b"abcdefghijklmnopqrstuvwxyz"
# Searched first, and the rest in order of bytes.
_ENDING = b'"}])>,:\n;01ea -.'


class Closer:
    """Closes answers of one grammar; made once a distinct spec, cheap to keep, thread-safe.

    ``token_bytes`` (those of the compiled grammar's tokenizer) serves the search alone.
    """

    def __init__(self, spec: GrammarSpec, token_bytes: Sequence[bytes]) -> None:
        self.spec = spec
        self._token_bytes = token_bytes
        self._outline = Outline(spec.source) if spec.kind == "json_schema" else None
        self._walk: PatternWalk | None = None
        self._choices: list[bytes] = []
        if spec.kind == "choices":
            self._choices = sorted((text.encode() for text in json.loads(spec.source)), key=len)
        if spec.kind == "regex":
            try:
                self._walk = PatternWalk(spec.source)
            except UnsupportedPattern:
                self._walk = None
        self._calls = CallLayout.read(spec.source) if spec.kind == "tool_calls" else None
        self._arguments: list[Closer] = []
        if self._calls is not None:
            specs = [GrammarSpec(kind="json_schema", source=one) for one in self._calls.schemas]
            self._arguments = [Closer(one, token_bytes) for one in specs]

    def close(self, state: AnyState, text: bytes) -> bytes | None:
        """The shortest bytes after ``text`` that complete the answer; b"" where it is complete.

        ``state``: the matcher after ``text``, left as it is. ``text`` may end within a UTF-8
        character. None where nothing was found within the bounds of the search. Takes from tens
        of microseconds to some milliseconds.
        """
        if state.is_terminated or state.can_stop:
            return b""
        if isinstance(state, ChoiceState):
            return state.shortest_rest()
        try:
            ways = self._ways(text)
        except RecursionError:  # nested so deeply that a search would take gigabytes
            return None
        for rest in ways:
            if rest and _completes(state, rest):
                return rest
        return self._searched(state)

    def _ways(self, text: bytes) -> list[bytes]:
        if self._calls is not None:
            return self._call_ways(self._calls, text)
        if self._walk is not None:
            return _walked(self._walk, text, b"")
        if self._outline is None:
            return [choice[len(text) :] for choice in self._choices if choice.startswith(text)]
        try:
            opened = read_open(text)
            if opened:
                return _Ending(self._outline, text, opened).ways(0, self._outline.root)
        except (ValueError, ArithmeticError):
            # No JSON, no character, a number beyond reckoning.
            return []
        if opened is None:
            return []
        shortest = self._outline.shortest(self._outline.root)
        return [] if shortest is None else [shortest]

    def _call_ways(self, layout: CallLayout, text: bytes) -> list[bytes]:
        found = []
        for way in unfinished(layout, text):
            rests = [b""]
            if way.function is not None:
                begun = b"" if way.start is None else text[way.start :]
                rests = self._arguments[way.function]._ways(begun)
            found += [way.before + rest + way.after for rest in rests]
        return sorted(found, key=len)[:_MAX_TRIED]

    def _searched(self, state: GrammarState) -> bytes | None:
        """Uniform-cost search over single bytes, likely endings first."""
        ids, order = self._single_bytes
        allowed = np.zeros((1, len(state.compiled.stop_words)), dtype=np.int32)
        queue: list[tuple[int, int, GrammarState, bytes]] = [(0, 0, state.fork(), b"")]
        tried = 0
        while queue and tried < _MAX_SEARCHED:
            _, _, place, rest = heapq.heappop(queue)
            place.fill(allowed)
            words = allowed[0].view(np.uint32)
            is_allowed = (words[ids >> 5] >> (ids & 31).astype(np.uint32)) & 1 != 0
            for token, byte in zip(ids[is_allowed][:16], order[is_allowed][:16], strict=True):
                tried += 1
                following = place.fork()
                if not following.accept(int(token)):
                    continue
                longer = rest + bytes([byte])
                if following.can_stop:
                    return longer
                # Ends of strings and brackets come nearer to the end than other bytes do.
                cost = len(longer) * 4 - 3 * sum(longer.count(c) for c in b'"}]')
                heapq.heappush(queue, (cost, tried, following, longer))
        return None

    @cached_property
    def _single_bytes(self) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Ids of the tokens of one byte, and those bytes, likely endings first."""
        found: dict[int, int] = {}
        for token, text in enumerate(self._token_bytes):
            if len(text) == 1:
                found.setdefault(text[0], token)
        order = [byte for byte in _ENDING if byte in found]
        order += [byte for byte in sorted(found) if byte not in _ENDING]
        return np.array([found[byte] for byte in order]), np.array(order, dtype=np.uint8)


def minimal_answer(spec: GrammarSpec) -> str | None:
    """The shortest answer of a grammar; None where it is not found without a matcher (EBNF).

    How many tokens it costs, a tokenizer's ``encode_plain`` says: no budget below can do. Raises
    `SchemaError` where it is longer than `MAX_SHORTEST_BYTES`.
    """
    if spec.kind == "json_schema":
        outline = Outline(spec.source)
        shortest = outline.shortest(outline.root)
        if shortest is None and outline.is_too_long:
            raise SchemaError(
                f"schema: its shortest answer has more than {MAX_SHORTEST_BYTES:,} bytes; lower "
                f"minItems, minLength or minProperties"
            )
        return None if shortest is None else shortest.decode()
    if spec.kind == "regex":
        try:
            return PatternWalk(spec.source).shortest_rest("")
        except UnsupportedPattern:
            return None
    if spec.kind == "choices":
        choices: list[str] = json.loads(spec.source)
        return min(choices, key=lambda text: len(text.encode()))
    if spec.kind == "tool_calls":
        return _minimal_calls(CallLayout.read(spec.source))
    return None


def _minimal_calls(layout: CallLayout) -> str | None:
    if not layout.must_call:
        return ""
    style = layout.style
    found = []
    for head, schema in zip(layout.heads, layout.schemas, strict=True):
        arguments = minimal_answer(GrammarSpec(kind="json_schema", source=schema))
        if arguments is not None:
            found.append(f"{style.opening}{head}{arguments}}}{style.closing}")
    return min(found, key=lambda text: len(text.encode()), default=None)


def _completes(state: GrammarState, rest: bytes) -> bool:
    trial = state.fork()
    return trial.accept_text(rest) and trial.can_stop


def _walked(walk: PatternWalk, beginning: bytes, end: bytes) -> list[bytes]:
    """The rest of a text of a pattern, of which the last character may be incomplete."""
    whole, pending = _whole_characters(beginning)
    codes = character_codes(pending) if pending else None
    if pending and codes is None:
        return []
    rest = walk.shortest_rest(whole, codes)
    return [] if rest is None else [rest.encode()[len(pending) :] + end]


def _whole_characters(text: bytes) -> tuple[str, bytes]:
    """The text up to its last whole character, and the bytes of one that is not."""
    for size in range(min(4, len(text) + 1)):
        try:
            return text[: len(text) - size].decode(), text[len(text) - size :]
        except UnicodeDecodeError:
            continue
    raise NotJson("the text is not UTF-8")


class _Ending:
    """The ways to end the open values of one text."""

    def __init__(self, outline: Outline, text: bytes, opened: list[OpenValue]) -> None:
        self._outline = outline
        self._text = text
        self._opened = opened

    def ways(self, depth: int, schema: object) -> list[bytes]:
        """What may follow the text so that open value ``depth`` is a whole one of ``schema``."""
        found: dict[bytes, None] = {}
        for one in self._outline.alternatives(schema):
            found.update(dict.fromkeys(self._alternative(depth, one)))
        return sorted(found, key=len)[: _MAX_WAYS if depth else _MAX_TRIED]

    def _alternative(self, depth: int, schema: Schema) -> Iterator[bytes]:
        value = self._opened[depth]
        spellings = self._outline.spellings(schema)
        if spellings is not None:
            begun = self._text[value.start :]
            yield from (text[len(begun) :] for text in spellings if text.startswith(begun))
            return
        kind = schema.get("type")
        if isinstance(value, OpenObject):
            if kind in (None, "object"):
                yield from self._object(depth, value, schema)
        elif isinstance(value, OpenArray):
            if kind in (None, "array"):
                yield from self._array(depth, value, schema)
        else:
            yield from self._scalar(value, schema, kind)

    def _scalar(self, value: OpenScalar, schema: Schema, kind: str | None) -> Iterator[bytes]:
        begun = self._text[value.start :]
        if begun.startswith(b'"'):
            if kind in (None, "string"):
                yield from self._string(begun[1:], schema)
        elif begun[0] in b"-0123456789":
            if kind == "integer":
                rest = integer_rest(begun.decode(), schema)
                yield from () if rest is None else (rest.encode(),)
            elif kind in (None, "number"):
                yield from map(str.encode, number_rests(begun.decode(), schema))
        else:
            names = {"boolean": _LITERALS[:2], "null": _LITERALS[2:], None: _LITERALS}
            for literal in names.get(kind, ()):
                if literal.startswith(begun):
                    yield literal[len(begun) :]

    def _string(self, content: bytes, schema: Schema) -> Iterator[bytes]:
        """``content``: after the opening quote."""
        walk = self._outline.walk(schema)
        if walk is not None:
            yield from _walked(walk, content, b'"')
            return
        if "pattern" in schema:
            return
        whole, pending = _whole_characters(content)
        if pending:
            codes = character_codes(pending)
            if codes is None:
                return
            whole += chr(codes[0])
            rest = chr(codes[0]).encode()[len(pending) :]
        else:
            rest = b""
        yield rest + string_rest(whole, schema.get("minLength", 0)).encode()

    def _array(self, depth: int, value: OpenArray, schema: Schema) -> Iterator[bytes]:
        outline, count = self._outline, value.num_items
        insides = [b""]
        at_least = 0
        if value.place is Place.INSIDE:
            insides = self.ways(depth + 1, outline.item(schema, count))
            count += 1
        elif value.place is Place.COMMA:
            at_least = 1
        rest = outline.array_rest(
            schema,
            count,
            is_first=value.place in (Place.START, Place.COMMA),
            at_least=at_least,
        )
        if rest is not None:
            yield from (inside + rest for inside in insides)

    def _object(self, depth: int, value: OpenObject, schema: Schema) -> Iterator[bytes]:
        if not self._matches(value, schema):
            return
        if value.place is Place.KEY:
            yield from self._key(value, schema)
            return
        members = dict(value.members)
        insides = [b""]
        if value.place in (Place.COLON, Place.VALUE, Place.INSIDE):
            part = Outline.property_of(schema, value.key)
            if part is False:
                return
            if value.place is Place.INSIDE:
                insides = self.ways(depth + 1, part)
            else:
                shortest = self._outline.shortest(part)
                if shortest is None:
                    return
                insides = [(b":" if value.place is Place.COLON else b"") + shortest]
            members[value.key] = None
        rest = self._outline.object_rest(
            schema,
            members,
            is_first=value.place in (Place.START, Place.COMMA),
            must_add=value.place is Place.COMMA,
        )
        if rest is not None:
            yield from (inside + rest for inside in insides)

    def _matches(self, value: OpenObject, schema: Schema) -> bool:
        return all(
            Outline.property_of(schema, key) is not False
            and (
                not value.is_scalar[key]
                or self._outline.may_be(Outline.property_of(schema, key), member)
            )
            for key, member in value.members.items()
        )

    def _key(self, value: OpenObject, schema: Schema) -> Iterator[bytes]:
        """The text ends inside a key: every listed name that begins so, or any name at all."""
        begun = self._text[value.key_start :]
        properties = schema.get("properties", {})
        names = [(name, part) for name, part in properties.items() if name not in value.members]
        ends = [
            (name, part, encoded(name)[len(begun) :])
            for name, part in names
            if encoded(name).startswith(begun)
        ]
        taken = {*value.members, *properties}
        for names_schema, part in self._open_names(schema):
            ends += [(name, part, end) for name, end in self._names(begun, names_schema, taken)]
        for name, part, end in ends:
            shortest = self._outline.shortest(part)
            rest = self._outline.object_rest(schema, {**value.members, name: None}, is_first=False)
            if shortest is not None and rest is not None:
                yield end + b":" + shortest + rest

    @staticmethod
    def _open_names(schema: Schema) -> Iterator[tuple[Schema, object]]:
        for pattern, part in schema.get("patternProperties", {}).items():
            yield {"type": "string", "pattern": pattern}, part
        extra = schema.get("additionalProperties", "properties" not in schema)
        if extra is not False:
            names = schema.get("propertyNames", {"type": "string"})
            yield names, extra

    def _names(self, begun: bytes, schema: Schema, taken: set[str]) -> Iterator[tuple[str, bytes]]:
        """A new name that begins with ``begun``, and its end."""
        for _ in range(len(taken) + 1):
            for end in self._string(begun[1:], schema):
                variants = [end]
                if end.endswith(b'a"'):  # filled up: any letter will do
                    variants = [end[:-2] + bytes([letter]) + b'"' for letter in _LETTERS]
                for variant in variants:
                    name = str(json.loads(begun + variant))
                    if name not in taken:
                        yield name, variant
                        return
                schema = {**schema, "minLength": len(json.loads(begun + end)) + 1}
