"""Result rows for a person: a table where they fit the terminal, else a list of records."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from batchradix.visible import one_line

COUNTS = (
    "finish_reason",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "probabilities",
)
"""Columns that are not shown unless they are asked for."""

_LEAST_WIDTH = 12  # of a column whose values are cut
_GAP = 3
_MOST_CELL = 400
_RECORD_LINES = 4
_STYLES = {"ok": "green", "truncated": "yellow", "error": "red"}


@dataclass(frozen=True, slots=True)
class Layout:
    """What is to be shown: rows of values by name; ``columns`` in order."""

    columns: tuple[str, ...]
    rows: tuple[Mapping[str, Any], ...]


def arranged(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None) -> Layout:
    """Rows with ``columns``, or (None) with those that tell most: without counts, with a column a
    field where ``value`` is an object, and without ``text`` where ``value`` says it all."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    if columns is not None:
        split = [name for name in columns if name not in names]
        return Layout(tuple(columns), tuple(_split(row, split) for row in rows))
    values = [row.get("value") for row in rows]
    drop = {*COUNTS, *(name for name in names if all(row.get(name) is None for row in rows))}
    drop -= {"id", "status"}
    if values and all(value is not None for value in values):
        drop.add("text")
    if any(isinstance(value, Mapping) for value in values):
        fields = dict.fromkeys(
            name for value in values if isinstance(value, Mapping) for name in value
        )
        spelt = {name: f"value.{name}" if name in names else name for name in fields}
        place = names.index("value")
        names[place : place + 1] = spelt.values()
        rows = [_with_fields(row, spelt) for row in rows]
    return Layout(tuple(name for name in names if name not in drop), tuple(rows))


def lacks(row: Mapping[str, Any], name: str) -> bool:
    """Whether a row has no such column or field, nor can have had it in a value that is null."""
    value = row.get("value", {})
    fields = value if isinstance(value, Mapping) else {}
    return value is not None and not {name, name.split(".")[0]} & {*row, *fields}


def _with_fields(row: Mapping[str, Any], spelt: Mapping[str, str]) -> dict[str, Any]:
    value = row.get("value")
    found = value if isinstance(value, Mapping) else {}
    return {**row, **{shown: found.get(name) for name, shown in spelt.items()}}


def _split(row: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The row with values inside of others, by names such as ``value.total`` or ``total``."""
    found = dict(row)
    for name in names:
        value: Any = row
        path = name.split(".")
        value_column = row.get("value")
        if len(path) == 1 and isinstance(value_column, Mapping):
            value = value_column
        for part in path:
            value = value.get(part) if isinstance(value, Mapping) else None
        found[name] = value
    return found


def print_layout(layout: Layout, *, width: int, is_terminal: bool) -> None:
    """Prints it on standard output, no line wider than ``width`` characters."""
    from rich.cells import cell_len
    from rich.console import Console

    console = Console(
        width=width,
        highlight=False,
        markup=False,
        emoji=False,
        no_color=None if is_terminal else True,
    )
    cells = [[_cell(row.get(name)) for name in layout.columns] for row in layout.rows]
    heads = [one_line(name, _MOST_CELL) for name in layout.columns]
    natural = [max(map(cell_len, column)) for column in zip(heads, *cells, strict=True)]
    room = width - _GAP * (len(natural) - 1)
    if sum(min(one, _LEAST_WIDTH) for one in natural) <= room:
        _print_table(console, layout, heads, cells, _shared_out(natural, room))
    else:
        _print_records(console, heads, cells, width)


def _shared_out(natural: Sequence[int], room: int) -> list[int]:
    """Widths of columns: what each needs, as far as those that need least leave room for it."""
    widths = [0] * len(natural)
    waiting = sorted(range(len(natural)), key=natural.__getitem__)
    for number, column in enumerate(waiting):
        widths[column] = min(natural[column], room // (len(waiting) - number))
        room -= widths[column]
    return widths


def _print_table(
    console: Any, layout: Layout, heads: list[str], cells: list[list[str]], widths: list[int]
) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name, head, width in zip(layout.columns, heads, widths, strict=True):
        is_count = all(_is_count(row.get(name)) for row in layout.rows)
        table.add_column(
            Text(head),
            width=width,
            no_wrap=True,
            overflow="ellipsis",
            justify="right" if is_count else "left",
        )
    for row in cells:
        table.add_row(*(Text(cell, style=_style(cell)) for cell in row))
    console.print(table)


def _print_records(console: Any, heads: list[str], cells: list[list[str]], width: int) -> None:
    from rich.cells import chop_cells
    from rich.text import Text

    indent = min(max(map(len, heads), default=0), max(4, width // 3))
    room = max(2, width - indent - 2)
    for number, row in enumerate(cells):
        if number:
            console.print()
        for head, cell in zip(heads, row, strict=True):
            lines = chop_cells(cell, room) or [""]
            if len(lines) > _RECORD_LINES:
                lines = [*lines[: _RECORD_LINES - 1], f"{lines[_RECORD_LINES - 1][: room - 2]}…"]
            for line, text in enumerate(lines):
                left = one_line(head, indent) if not line else ""
                console.print(
                    Text(f"{left:>{indent}}  ", style="bold") + Text(text, _style(cell)),
                    no_wrap=True,
                    overflow="ellipsis",
                )


def _is_count(value: Any) -> bool:
    return value is None or (isinstance(value, (int, Decimal)) and not isinstance(value, bool))


def _style(cell: str) -> str:
    return _STYLES.get(cell, "")


def _cell(value: Any) -> str:
    """A value in one harmless line."""
    if value is None:
        return ""
    if isinstance(value, Mapping) and {"code", "message"} == set(value):
        value = f"{value['code']}: {value['message']}"
    return one_line(value if isinstance(value, str) else to_json(value), _MOST_CELL)


def to_json(value: Any) -> str:
    """The JSON text of a value, decimals with all their digits, no control character in it."""
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, Mapping):
        pairs = (f"{json.dumps(str(name))}: {to_json(one)}" for name, one in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(to_json, value)) + "]"
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
        return text if text.isprintable() else json.dumps(value)
    return json.dumps(value, default=str)
