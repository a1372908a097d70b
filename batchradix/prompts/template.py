"""Prompt templates: text with places such as ``{{ column }}`` and ``{{ info.sku }}``.

There is nothing else: no expressions, no statements. Whatever in braces is not a place is
ordinary text, so a template may hold JSON samples. What a place brings in is data and is never
looked into for places.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from batchradix.errors import RowErrorCode
from batchradix.prompts.guard import Piece
from batchradix.prompts.row_problem import RowProblem
from batchradix.prompts.values import render_value

_BRACES = re.compile(r"\{\{[^{}\r\n]*\}\}")
_NAME = r"\w+(?:[ \-]+\w+)*"
_PLACE = re.compile(rf"{_NAME}(?:\.{_NAME})*")
SCHEMA_PLACE = "schema"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row's value goes: the column, and the way down into it when it is nested."""

    column: str
    inner: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return ".".join((self.column, *self.inner))

    def text(self, values: Mapping[str, Any]) -> str:
        """The row's text for this place; raises `RowProblem` when it is missing or null."""
        if self.column not in values:
            raise RowProblem(
                RowErrorCode.MISSING_FIELD,
                f"the prompt needs field {self.name!r}, which this row has not; "
                f"add it, leave the row out, or say with --null what stands in for it",
            )
        value, path = values[self.column], self.column
        for step in self.inner:
            if value is None:
                raise _null(self.name, path)
            value = _descend(value, step, self.name, path)
            path = f"{path}.{step}"
        if value is None:
            raise _null(self.name, path)
        return render_value(value, self.name)


def _descend(value: Any, step: str, name: str, path: str) -> Any:
    if isinstance(value, dict):
        if step in value:
            return value[step]
    elif isinstance(value, (list, tuple)):
        if step.isdecimal() and int(step) < len(value):
            return value[int(step)]
    else:
        raise RowProblem(
            RowErrorCode.MISSING_FIELD,
            f"the prompt needs field {name!r}, but {path!r} is "
            f"{type(value).__name__} here and has no fields",
        )
    raise RowProblem(
        RowErrorCode.MISSING_FIELD,
        f"the prompt needs field {name!r}, and {path!r} has no {step!r} in this row; "
        f"add it or leave the row out",
    )


def _null(name: str, path: str) -> RowProblem:
    where = f" ({path!r} is null)" if path != name else ""
    return RowProblem(
        RowErrorCode.NULL_FIELD,
        f"field {name!r} is null in this row{where}; fill it in, leave the row out, or say with "
        f"--null what stands in for it",
    )


def parse_place(text: str, columns: Collection[str]) -> Place | None:
    """The place that ``text`` (from between braces) names, or None when it is no place.

    A column whose whole name is ``text`` comes first, whatever characters it has, then the
    longest column that ``text`` begins with up to a dot.
    """
    if text in columns:
        return Place(text)
    if not _PLACE.fullmatch(text):
        return None
    steps = text.split(".")
    for length in range(len(steps) - 1, 1, -1):
        column = ".".join(steps[:length])
        if column in columns:
            return Place(column, tuple(steps[length:]))
    return Place(steps[0], tuple(steps[1:]))


@dataclass(frozen=True, slots=True)
class Template:
    """A parsed template: text, places, and the schema's text, in order.

    ``parts``: str is the template's own text; a `Piece` is constant data (the schema).
    ``stray``: what stands in double braces and is no place, as written. ``null_text`` stands
    in for what is null or missing in a row, where it is given.
    """

    parts: tuple[str | Place | Piece, ...]
    stray: tuple[str, ...]
    null_text: str | None = None

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(part for part in self.parts if isinstance(part, Place))

    @property
    def literal(self) -> str:
        """The template's own text, one line break where a place stood."""
        return "\n".join(part for part in self.parts if isinstance(part, str))

    @property
    def has_schema(self) -> bool:
        return any(isinstance(part, Piece) for part in self.parts)

    def pieces(self, values: Mapping[str, Any]) -> list[Piece]:
        """The rendered text with its provenance; raises `RowProblem`."""
        return [
            Piece(text, not isinstance(part, str))
            for text, part in zip(self.texts(values), self.parts, strict=True)
        ]

    def texts(self, values: Mapping[str, Any]) -> list[str]:
        """The rendered text of each of ``parts``; raises `RowProblem`."""
        return [
            part
            if isinstance(part, str)
            else self._text(part, values)
            if isinstance(part, Place)
            else part.text
            for part in self.parts
        ]

    def _text(self, place: Place, values: Mapping[str, Any]) -> str:
        try:
            return place.text(values)
        except RowProblem as problem:
            absent = problem.code in (RowErrorCode.MISSING_FIELD, RowErrorCode.NULL_FIELD)
            if self.null_text is None or not absent:
                raise
            return self.null_text


def parse_template(text: str, columns: Collection[str], schema_text: str | None) -> Template:
    """Cuts a template at its places. Never fails: what is no place is text.

    ``{{ schema }}`` is the schema's text where there is one, else a column of that name.
    """
    parts: list[str | Place | Piece] = []
    stray: list[str] = []
    literal = ""
    end = 0
    for match in _BRACES.finditer(text):
        inside = match.group()[2:-2].strip()
        part: Place | Piece | None
        if inside == SCHEMA_PLACE and schema_text is not None:
            part = Piece(schema_text, True)
        else:
            part = parse_place(inside, columns)
        literal += text[end : match.start()]
        end = match.end()
        if part is None:
            literal += match.group()
            stray.append(match.group())
            continue
        if literal:
            parts.append(literal)
        parts.append(part)
        literal = ""
    literal += text[end:]
    if literal:
        parts.append(literal)
    return Template(tuple(parts), tuple(stray))
