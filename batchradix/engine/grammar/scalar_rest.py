"""What may follow the beginning of a number or a string so that it is soon whole."""

from __future__ import annotations

import json
import re
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

# Digits after the point that are tried for a number between narrow bounds.
_MAX_DECIMALS = 12
_MAX_DIGITS = 40
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_WHOLE_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_UNITS = re.compile(r"(?:\\u[0-9a-fA-F]{4}|\\[^u]|[^\\])*", re.DOTALL)
_HIGH_SURROGATE = re.compile(r"(?:^|[^\\])(?:\\\\)*\\u[dD][89abAB][0-9a-fA-F]{2}$")


def integer_rest(beginning: str, schema: dict[str, Any]) -> str | None:
    """The shortest digits after ``beginning`` that make an integer of the schema; "" included.

    ``beginning``: "", "-" or digits with or without a sign. Of equally short ones the nearest
    to zero. None where there is none.
    """
    least, most = schema.get("minimum"), schema.get("maximum")
    if "exclusiveMinimum" in schema:
        least = max(schema["exclusiveMinimum"] + 1, least if least is not None else -(10**99))
    if "exclusiveMaximum" in schema:
        most = min(schema["exclusiveMaximum"] - 1, most if most is not None else 10**99)
    is_negative = beginning.startswith("-")
    if is_negative:
        least, most = (None if most is None else -most), (None if least is None else -least)
    digits = beginning.lstrip("-")
    if digits and not digits.isdecimal():
        return None
    step = schema.get("multipleOf", 1)
    for count in range(_MAX_DIGITS):
        low, high = _magnitudes(digits, count, is_negative)
        low = low if least is None else max(low, -(-least // 1))
        high = high if most is None else min(high, most // 1)
        found = -(-low // step) * step
        if low <= high and found <= high:
            return str(int(found))[len(digits) :]
        if digits == "0":
            return None
    return None


def _magnitudes(digits: str, count: int, is_negative: bool) -> tuple[int, int]:
    """Least and greatest whole number whose digits are ``digits`` and ``count`` more."""
    if digits in ("", "0"):
        if not digits and count == 1 and not is_negative:
            return 0, 9
        return (0, 0) if digits and not count and not is_negative else _first(digits, count)
    return int(digits) * 10**count, (int(digits) + 1) * 10**count - 1


def _first(digits: str, count: int) -> tuple[int, int]:
    return (1, 0) if digits or not count else (10 ** (count - 1), 10**count - 1)


def number_rests(beginning: str, schema: dict[str, Any]) -> list[str]:
    """Short continuations of ``beginning`` that make a number within the schema's bounds."""
    rests = []
    if _WHOLE_NUMBER.fullmatch(beginning):
        rests.append("")
    if "e" in beginning.lower():
        rests += ["0", "1", "2", "-1", "-2", "-9"]
    elif "." in beginning:
        rests += _decimals(beginning, schema)
    else:
        whole = integer_rest(beginning, schema)
        if whole is not None:
            rests.append(whole)
        for start in _starts(beginning, schema):
            rests += [start[len(beginning) :] + more for more in _decimals(start, schema)]
    fitting = [rest for rest in rests if _fits(beginning + rest, schema)]
    return sorted(dict.fromkeys(fitting), key=len)


def _starts(beginning: str, schema: dict[str, Any]) -> list[str]:
    """Whole parts with a point that begin so: ``beginning`` itself, zero, those of the bounds."""
    starts = ["0.", "-0."] if beginning in ("", "-") else [f"{beginning}."]
    for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        if key in schema:
            text = f"{Decimal(str(schema[key])):f}"
            starts.append(text.partition(".")[0] + ".")
    return [start for start in dict.fromkeys(starts) if start.startswith(beginning)]


def _decimals(start: str, schema: dict[str, Any]) -> list[str]:
    """The fewest digits after ``start`` (which holds a point) that reach into the bounds."""
    sign = -1 if start.startswith("-") else 1
    written = len(start.partition(".")[2])
    near = Decimal(start if written else f"{start}0")
    low, high = _bounds(schema)
    for count in range(1, _MAX_DECIMALS + 1):
        unit = Decimal(1).scaleb(-(written + count))
        far = near + sign * (Decimal(1).scaleb(-written) - unit)
        least, most = max(low, min(near, far)), min(high, max(near, far))
        lowest = (least / unit).to_integral_value(ROUND_CEILING)
        highest = (most / unit).to_integral_value(ROUND_FLOOR)
        steps = range(int(lowest), min(int(highest), int(lowest) + 2) + 1)
        for value in steps if sign > 0 else [int(highest) - k for k in range(len(steps))]:
            digits = f"{abs(value) * unit:f}"
            text = f"{'-' if sign < 0 else ''}{digits}"
            if text.startswith(start) and _fits(text, schema):
                return [text[len(start) :]]
    return []


def _bounds(schema: dict[str, Any]) -> tuple[Decimal, Decimal]:
    lows = [schema[key] for key in ("minimum", "exclusiveMinimum") if key in schema]
    highs = [schema[key] for key in ("maximum", "exclusiveMaximum") if key in schema]
    low, high = max(lows, default=None), min(highs, default=None)
    return (
        Decimal("-1e30") if low is None else Decimal(str(low)),
        Decimal("1e30") if high is None else Decimal(str(high)),
    )


def _fits(text: str, schema: dict[str, Any]) -> bool:
    if _WHOLE_NUMBER.fullmatch(text) is None:
        return False
    if not _BOUNDS & schema.keys():
        return True  # whatever its exponent, for which a Decimal may be too small
    value = Decimal(text)
    return (
        value >= Decimal(str(schema.get("minimum", "-Infinity")))
        and value <= Decimal(str(schema.get("maximum", "Infinity")))
        and ("exclusiveMinimum" not in schema or value > Decimal(str(schema["exclusiveMinimum"])))
        and ("exclusiveMaximum" not in schema or value < Decimal(str(schema["exclusiveMaximum"])))
    )


def string_rest(content: str, min_length: int) -> str:
    """The shortest end (quote included) of a string whose encoded ``content`` is written.

    An escape cut in the middle is completed, half of a surrogate pair gets its other half.
    """
    units = _UNITS.match(content)
    assert units is not None
    escape = content[units.end() :]
    wanted = "\\udc00" if _HIGH_SURROGATE.search(units[0]) else "\\u0020"
    if escape == "\\" and wanted.endswith("20"):
        rest = "n"
    elif escape:
        is_begun = wanted.startswith(escape.lower())
        rest = wanted[len(escape) :] if is_begun else "0" * (6 - len(escape))
    else:
        rest = ""
    content += rest
    if _HIGH_SURROGATE.search(content):
        rest += "\\udc00"
        content += "\\udc00"
    length = len(json.loads(f'"{content}"', strict=False))
    return rest + "a" * (min_length - length) + '"'


def character_codes(beginning: bytes) -> tuple[int, int] | None:
    """Least and greatest code point whose UTF-8 begins with ``beginning``; None for none."""
    found = []
    for filling in ((0x80, 0x90, 0xA0), (0xBF, 0x9F, 0x8F)):
        for first in filling:
            size = 2 if beginning[0] < 0xE0 else 3 if beginning[0] < 0xF0 else 4
            more = bytes([first] + [filling[0]] * 3)[: size - len(beginning)]
            try:
                found.append(ord((beginning + more).decode()))
                break
            except (UnicodeDecodeError, TypeError):
                continue
    return (found[0], found[1]) if len(found) == 2 else None
