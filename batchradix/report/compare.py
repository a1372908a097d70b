"""Whether two values mean the same, wherever they were written: in a table, as JSON, in a cell."""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

_NO_NUMBER = ("NaN", "inf", "-inf")  # JSON has no word for these but null


def is_number(value: Any) -> bool:
    """Whether it is a number; truth values are none."""
    return isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)


def same(one: Any, other: Any, tolerance: Decimal = Decimal(0)) -> bool:
    """Whether two values of JSON are equal: numbers to the last digit, or as far as ``tolerance``
    lets them differ; objects whatever the order of their names, and a name that is missing as one
    that is null."""
    if is_number(one) and is_number(other):
        return one == other or abs(_exact(one) - _exact(other)) <= tolerance
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return all(
            same(one.get(name), other.get(name), tolerance) for name in one.keys() | other.keys()
        )
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(
            same(a, b, tolerance) for a, b in zip(one, other, strict=True)
        )
    return type(one) is type(other) and bool(one == other)


def same_as_cell(cell: str, value: Any, tolerance: Decimal = Decimal(0)) -> bool:
    """Whether the text of a cell, which has no type and is empty for null, says ``value``."""
    if value is None:
        return not cell or cell in _NO_NUMBER
    if isinstance(value, str):
        return value == cell
    if is_number(value):
        try:
            return same(Decimal(cell), value, tolerance)
        except InvalidOperation:
            return False
    try:
        return same(json.loads(cell, parse_float=Decimal), value, tolerance)
    except ValueError:
        return False


def difference(one: Any, other: Any) -> Decimal | None:
    """How far two numbers are apart, None where one is none."""
    if not (is_number(one) and is_number(other)):
        return None
    return abs(_exact(one) - _exact(other))


def _exact(number: Any) -> Decimal:
    return Decimal(str(number)) if isinstance(number, float) else Decimal(number)
