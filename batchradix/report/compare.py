"""Whether two values mean the same, wherever they were written: in a table, as JSON, in a cell."""

from __future__ import annotations

import json
from decimal import Decimal, InvalidOperation
from typing import Any

from batchradix.types import Cell

_PLAIN = (str, bool, type(None))
_NO_NUMBER = ("NaN", "inf", "-inf")  # JSON has no word for these but null


def is_number(value: Any) -> bool:
    """Whether it is a number; truth values are none."""
    return isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)


def same(one: Any, other: Any, tolerance: Decimal = Decimal(0)) -> bool:
    """Whether two values of JSON, or cells, are equal: numbers to the last digit, or as far as
    ``tolerance`` lets them differ; objects whatever the order of their names, and a name that is
    missing as one that is null."""
    if type(one) is type(other) and type(one) in _PLAIN:
        return bool(one == other)
    if isinstance(one, Cell) or isinstance(other, Cell):
        if isinstance(one, Cell) and isinstance(other, Cell):
            return str(one) == str(other) or _same_numbers(one, other, tolerance)
        cell, value = (one, other) if isinstance(one, Cell) else (other, one)
        return _same_as_cell(cell, value, tolerance)
    if is_number(one) and is_number(other):
        return one == other or abs(_exact(one) - _exact(other)) <= tolerance
    if isinstance(one, dict) and isinstance(other, dict):
        return all(
            same(one.get(name), other.get(name), tolerance) for name in one.keys() | other.keys()
        )
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(
            same(a, b, tolerance) for a, b in zip(one, other, strict=True)
        )
    return type(one) is type(other) and bool(one == other)


def _same_as_cell(cell: str, value: Any, tolerance: Decimal) -> bool:
    """Whether the text of a cell says ``value``, which is no cell."""
    if value is None:
        return not cell or cell in _NO_NUMBER
    if isinstance(value, str):
        return value == str(cell)
    if is_number(value):
        number = _number(cell)
        return number is not None and same(number, value, tolerance)
    try:
        return same(json.loads(cell, parse_float=Decimal), value, tolerance)
    except ValueError:
        return False


def _same_numbers(one: str, other: str, tolerance: Decimal) -> bool:
    numbers = _number(one), _number(other)
    return bool(tolerance) and None not in numbers and same(*numbers, tolerance)


def _number(text: str) -> Decimal | None:
    try:
        found = Decimal(text)
    except InvalidOperation:
        return None
    return found if found.is_finite() else None


def difference(one: Any, other: Any) -> Decimal | None:
    """How far two numbers are apart, None where one is none."""
    one, other = (_number(x) if isinstance(x, Cell) else x for x in (one, other))
    if not (is_number(one) and is_number(other)):
        return None
    return abs(_exact(one) - _exact(other))


def _exact(number: Any) -> Decimal:
    return Decimal(str(number)) if isinstance(number, float) else Decimal(number)
