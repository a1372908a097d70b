"""The lines of a template that list fields, one place each, and may stand in any order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from batchradix.errors import TemplateError
from batchradix.prompts.guard import Piece
from batchradix.prompts.template import Place, Template

Parts = tuple[str | Place | Piece, ...]


@dataclass(frozen=True, slots=True)
class FieldList:
    """A template taken apart: what stands before the list, its lines without line breaks, and
    what stands behind it."""

    template: Template
    before: Parts
    lines: tuple[Parts, ...]
    behind: Parts

    def __len__(self) -> int:
        return len(self.lines)

    def ordered(self, order: Sequence[int]) -> Template:
        """The template with its lines in another order."""
        parts: list[str | Place | Piece] = list(self.before)
        for number, line in enumerate(order):
            parts += ["\n"] * (number > 0)
            parts += self.lines[line]
        return replace(self.template, parts=_joined([*parts, *self.behind]))

    def line(self, number: int) -> Template:
        """One line alone."""
        return replace(self.template, parts=self.lines[number])


def find_list(template: Template) -> FieldList:
    """The longest run of lines of a template with one place each; of equals the first.

    Raises `TemplateError` where no two such lines follow each other.
    """
    lines = _lines(template.parts)
    best = range(0)
    begin = 0
    for number in range(len(lines) + 1):
        if number == len(lines) or not _is_field(lines[number]):
            if number - begin > len(best):
                best = range(begin, number)
            begin = number + 1
    if len(best) < 2:
        raise TemplateError(
            "`reorder_columns` needs a template that lists fields: two lines or more, one after "
            "the other, with one place such as {{ column }} in each"
        )
    before = _with_breaks(lines[: best.start])
    behind = _with_breaks(lines[best.stop :])
    return FieldList(
        template=template,
        before=_joined([*before, "\n"] if best.start else before),
        lines=tuple(map(tuple, lines[best.start : best.stop])),
        behind=_joined(["\n", *behind] if best.stop < len(lines) else behind),
    )


def _lines(parts: Parts) -> list[list[str | Place | Piece]]:
    lines: list[list[str | Place | Piece]] = [[]]
    for part in parts:
        if not isinstance(part, str):
            lines[-1].append(part)
            continue
        first, *rest = part.split("\n")
        lines[-1] += [first] if first else []
        lines += [[text] if text else [] for text in rest]
    return lines


def _is_field(line: Sequence[str | Place | Piece]) -> bool:
    return [type(part) for part in line if not isinstance(part, str)] == [Place]


def _with_breaks(lines: Sequence[Sequence[str | Place | Piece]]) -> list[str | Place | Piece]:
    parts: list[str | Place | Piece] = []
    for number, line in enumerate(lines):
        parts += ["\n"] * (number > 0)
        parts += line
    return parts


def _joined(parts: Sequence[str | Place | Piece]) -> Parts:
    """Parts without two texts one after the other."""
    joined: list[str | Place | Piece] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, str) and isinstance(last, str):
            joined[-1] = last + part
        else:
            joined.append(part)
    return tuple(joined)
