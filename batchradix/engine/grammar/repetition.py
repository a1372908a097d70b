"""Answers that run away under a grammar: text in circles, numbers without end.

A language model that has lost its way repeats itself; inside a string or array that the schema
does not bound nothing would ever stop it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from batchradix.engine.grammar.open_text import (
    OpenArray,
    OpenObject,
    OpenScalar,
    OpenValue,
    read_open,
)
from batchradix.engine.grammar.outline import Outline, Schema
from batchradix.engine.grammar.pattern_walk import PatternWalk
from batchradix.engine.grammar.tool_calls import CallLayout, open_arguments
from batchradix.schema.keywords import EXACT_LENGTH
from batchradix.schema.pattern_parser import UnsupportedPattern
from batchradix.types import GrammarSpec

CHECKED_EVERY = 16  # tokens
MAX_PERIOD = 32  # tokens
MIN_REPEATS = 8
MIN_TOKENS = 128
MAX_NUMBER_CHARS = 40

_NUMBER_CHARS = b"0123456789+-.eE"


class RepetitionGuard:
    """Tells whether answers under one grammar run away; shared by its rows, keeps no state.

    An answer runs away when its end is the same few tokens (32 at most) again and again, at
    least 8 times and 128 tokens, all of it inside one string or array that is still open and
    that the schema does not bound; or when it ends in an unbounded number of more than 40
    characters. Under a pattern or EBNF rules the whole answer is taken for one string, and so is
    free text beside tool calls, and the calls but for arguments that are open.
    """

    def __init__(self, spec: GrammarSpec, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._outline = Outline(spec.source) if spec.kind == "json_schema" else None
        self._calls = CallLayout.read(spec.source) if spec.kind == "tool_calls" else None
        self._arguments: list[RepetitionGuard] = []
        if self._calls is not None:
            specs = [GrammarSpec(kind="json_schema", source=one) for one in self._calls.schemas]
            self._arguments = [RepetitionGuard(one, token_bytes) for one in specs]
        self._is_finite = spec.kind == "choices" or (
            spec.kind == "regex" and _is_finite(spec.source)
        )

    def runs_away(self, token_ids: Sequence[int]) -> bool:
        """Looks at every 16th token of an answer: a bounded time, some microseconds, unless it
        does repeat itself."""
        if len(token_ids) % CHECKED_EVERY or self._is_finite:
            return False
        num_repeating = _num_repeating(token_ids)
        if self._outline is None and self._calls is None:
            return num_repeating > 0
        if not num_repeating and not self._may_end_in_long_number(token_ids):
            return False
        text = self._bytes(token_ids)
        since = None
        if num_repeating:
            since = len(text) - len(self._bytes(token_ids[len(token_ids) - num_repeating :]))
        if self._calls is None:
            return self._is_boundless(text, since)
        found = open_arguments(self._calls, text)
        if found is None or (since is not None and since < found[1]):
            return num_repeating > 0
        function, start = found
        return self._arguments[function]._is_boundless(
            text[start:], None if since is None else since - start
        )

    def _is_boundless(self, text: bytes, since: int | None) -> bool:
        """Whether JSON that repeats itself from byte ``since`` on, or ends in a long number
        where that is None, could go on so for ever."""
        try:
            opened = read_open(text) or []
        except (ValueError, RecursionError):
            return False
        if since is not None:
            return self._is_endless(opened, text, since)
        return self._is_long_number(opened, text)

    def _bytes(self, token_ids: Sequence[int]) -> bytes:
        return b"".join([self._token_bytes[token_id] for token_id in token_ids])

    def _may_end_in_long_number(self, token_ids: Sequence[int]) -> bool:
        end = self._bytes(token_ids[-MAX_NUMBER_CHARS - 1 :])[-MAX_NUMBER_CHARS - 1 :]
        return len(end) > MAX_NUMBER_CHARS and not end.translate(None, _NUMBER_CHARS)

    def _is_long_number(self, opened: list[OpenValue], text: bytes) -> bool:
        if not opened or not isinstance(opened[-1], OpenScalar):
            return False
        begun = text[opened[-1].start :]
        return begun[:1] in b"-0123456789" and any(
            schema.get("type") != "integer" or not {"minimum", "maximum"} <= schema.keys()
            for schema in self._schemas(opened, len(opened) - 1)
            if schema.get("type") in (None, "integer", "number") and not _is_listed(schema)
        )

    def _is_endless(self, opened: list[OpenValue], text: bytes, since: int) -> bool:
        """Whether the innermost open string or array that holds all text from byte ``since`` on
        is unbounded."""
        for depth in reversed(range(len(opened))):
            value = opened[depth]
            if value.start > since:
                continue
            if isinstance(value, OpenArray):
                return any(
                    _may_grow(schema)
                    for schema in self._schemas(opened, depth)
                    if schema.get("type") in (None, "array")
                )
            if isinstance(value, OpenScalar) and text[value.start : value.start + 1] == b'"':
                return any(
                    self._may_lengthen(schema)
                    for schema in self._schemas(opened, depth)
                    if schema.get("type") in (None, "string")
                )
        return False

    def _may_lengthen(self, schema: Schema) -> bool:
        if _is_listed(schema) or self._outline is None:
            return False
        if "maxLength" in schema:  # beyond, strings with escapes are not bounded
            return int(schema["maxLength"]) - int(schema.get("minLength", 0)) > EXACT_LENGTH
        walk = self._outline.walk(schema)
        return walk is None or not walk.is_finite

    def _schemas(self, opened: list[OpenValue], depth: int) -> list[Schema]:
        """What the schema may ask of the open value ``depth``."""
        assert self._outline is not None
        schemas = self._outline.alternatives(self._outline.root)
        for value in opened[:depth]:
            inner: dict[int, Schema] = {}
            for schema in schemas:
                for part in self._parts(value, schema):
                    inner.update((id(one), one) for one in self._outline.alternatives(part))
            schemas = list(inner.values())
        return schemas

    def _parts(self, value: OpenValue, schema: Schema) -> Iterator[object]:
        kind = schema.get("type")
        part: object = False
        if isinstance(value, OpenObject) and kind in (None, "object"):
            part = Outline.property_of(schema, value.key)
        elif isinstance(value, OpenArray) and kind in (None, "array"):
            part = Outline.item(schema, value.num_items)
        if part is not False:
            yield part


def goes_in_circles(token_ids: Sequence[int]) -> bool:
    """Whether free text of these tokens repeats itself; looks at every 16th token."""
    return len(token_ids) % CHECKED_EVERY == 0 and _num_repeating(token_ids) > 0


def _num_repeating(token_ids: Sequence[int]) -> int:
    """How many tokens at the end are one short stretch again and again; 0 where too few."""
    count = len(token_ids)
    for period in range(1, MAX_PERIOD + 1):
        wanted = max(MIN_TOKENS, MIN_REPEATS * period)
        if count < wanted:
            break
        if (
            token_ids[-1] == token_ids[-1 - period]
            and token_ids[count - wanted : count - period]
            == token_ids[count - wanted + period : count]
        ):
            return wanted
    return 0


def _is_listed(schema: Schema) -> bool:
    return "enum" in schema or "const" in schema


def _may_grow(schema: Schema) -> bool:
    return not (_is_listed(schema) or "maxItems" in schema or schema.get("items") is False)


def _is_finite(pattern: str) -> bool:
    try:
        return PatternWalk(pattern).is_finite
    except UnsupportedPattern:
        return False
