"""Answers that call functions: their grammar, and where an unfinished one stands.

The grammar is put together from printed ones: that of every function's arguments, with its rules
renamed, and between them the fixed text of a style (`schema.tool_styles`). Free text ends where
the marker of the first call is complete; what follows is a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import xgrammar

from batchradix.engine.grammar.endless import endless_rules
from batchradix.engine.grammar.json_grammar import json_grammar, readable_text
from batchradix.schema.tool_styles import STYLES, ToolStyle

_ANY = r"[\0-\U0010ffff]*"
# Literals and character classes, which stay, and names, of which calls such as `Macro(` are not
# to be renamed.
_WORD = re.compile(
    r"""(?P<fixed>"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\])|(?P<name>[A-Za-z_][\w.-]*)(?P<call>\()?"""
)
_JSON_PART = re.compile(rb'"(?:[^"\\]|\\.)*(?P<end>")?|[{}\[\]]', re.DOTALL)


@dataclass(frozen=True, slots=True)
class CallLayout:
    """What a `GrammarSpec` of kind ``tool_calls`` says, read from its source.

    ``heads``: of every function, a call up to its arguments. ``schemas``: of its arguments, as
    JSON text. Where ``must_call`` is False an answer may be free text or begin with it.
    """

    style: ToolStyle
    heads: tuple[str, ...]
    schemas: tuple[str, ...]
    must_call: bool
    has_many: bool

    @classmethod
    def read(cls, source: str) -> CallLayout:
        found = json.loads(source)
        style = STYLES[found["style"]]
        functions = found["functions"]
        return cls(
            style=style,
            heads=tuple(style.call_head(function["name"]) for function in functions),
            schemas=tuple(function["arguments"] for function in functions),
            must_call=found["must_call"],
            has_many=found["has_many"],
        )


def tool_calls_grammar(source: str) -> xgrammar.Grammar:
    """The grammar of a ``tool_calls`` source. Raises what xgrammar raises for arguments that it
    rejects, and `ValueError` for a function whose arguments could never end."""
    layout = CallLayout.read(source)
    style = layout.style
    rules, calls = [], []
    for number, (head, schema) in enumerate(zip(layout.heads, layout.schemas, strict=True)):
        printed = readable_text(json_grammar(schema))
        if "root" in endless_rules(printed):
            raise ValueError(
                f"the arguments of function {number + 1} could never end, they require themselves "
                f"without a way out"
            )
        rules.append(_renamed(printed, f"function_{number}_"))
        calls.append(f'{_literal(head)} function_{number}_root "}}"')
    rules.append(f"call ::= {' | '.join(calls)}")
    more = f" ({_literal(style.separator or '')} call)*" if layout.has_many else ""
    opening = style.opening
    if layout.must_call:
        rules.append("root ::= calls")
    elif style.marks_start:
        rules += ["root ::= calls | free_text_0", *_not_beginning_with(style.marker)]
    else:
        opening = opening.removeprefix(style.marker)
        rules.append(
            f"root ::= TagDispatch(({_literal(style.marker)}, calls), loop_after_dispatch=false)"
        )
    parts = [_literal(text) for text in (opening, style.closing)]
    rules.append(f"calls ::= {parts[0]} call{more} {parts[1]}")
    return xgrammar.Grammar.from_ebnf("\n".join(rules) + "\n")


def _not_beginning_with(marker: str) -> list[str]:
    """Rules of any text that does not begin with ``marker``; it may be the beginning of it."""
    rules = [f"free_rest ::= {_ANY}"]
    for place, char in enumerate(marker):
        rule = f'free_text_{place} ::= "" | {_char_class(char)} free_rest'
        if place + 1 < len(marker):
            rule += f" | {_literal(char)} free_text_{place + 1}"
        rules.append(rule)
    return rules


def _char_class(char: str) -> str:
    return f"[^\\{char}]" if char in '"\\]^-' else f"[^{char}]"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _renamed(printed: str, prefix: str) -> str:
    def word(found: re.Match[str]) -> str:
        if found["fixed"] is not None:
            return found[0]
        if found["call"] is not None:
            raise ValueError(f"arguments need {found['name']}, which cannot be part of tool calls")
        return prefix + found[0]

    return _WORD.sub(word, printed)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A way in which an answer may go on to its end: ``before``, what is missing of the arguments
    of ``function`` (None: nothing), ``after``. ``start``: the byte of the answer where these
    arguments begin, None where they have not begun."""

    before: bytes
    function: int | None = None
    start: int | None = None
    after: bytes = b""


def unfinished(layout: CallLayout, text: bytes) -> Iterator[Unfinished]:
    """The ways to end an answer that is cut at the end of ``text``, without further calls than
    the one it is in; none for free text, which may end anywhere."""
    style = layout.style
    heads = [head.encode() for head in layout.heads]
    last = b"}" + style.closing.encode()
    between = b"}" + (style.separator or "").encode()
    expected = style.opening.encode()
    at = 0
    if not (layout.must_call or style.marks_start):
        at = text.find(style.marker.encode())
        if at < 0:
            return
    while True:
        rest = text[at:]
        if not rest.startswith(expected):
            if expected.startswith(rest):
                for number, head in enumerate(heads):
                    yield Unfinished(expected[len(rest) :] + head, number, None, last)
            return
        at += len(expected)
        rest = text[at:]
        number = next((i for i, head in enumerate(heads) if rest.startswith(head)), -1)
        if number < 0:
            for other, head in enumerate(heads):
                if head.startswith(rest):
                    yield Unfinished(head[len(rest) :], other, None, last)
            return
        at += len(heads[number])
        end = _object_end(text, at)
        if end is None:
            yield Unfinished(b"", number, at, last)
            return
        rest = text[end:]
        if last.startswith(rest):
            yield Unfinished(last[len(rest) :])
            return
        at, expected = end, between
        if not layout.has_many:
            return


def open_arguments(layout: CallLayout, text: bytes) -> tuple[int, int] | None:
    """The function whose arguments are open at the end of ``text``, and the byte where they
    begin; None where none are."""
    found = next(unfinished(layout, text), None)
    if found is None or found.function is None or found.start is None:
        return None
    return found.function, found.start


def _object_end(text: bytes, start: int) -> int | None:
    """Where the JSON object that begins at ``start`` ends; None where it does not."""
    depth = 0
    for part in _JSON_PART.finditer(text, start):
        if part[0][:1] in b"{[":
            depth += 1
        elif part[0][:1] in b"}]":
            depth -= 1
            if depth == 0:
                return part.end()
        elif part["end"] is None:
            return None
        if depth == 0:
            return None
    return None
