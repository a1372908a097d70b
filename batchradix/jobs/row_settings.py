"""Sampling options that a row sets for itself, in columns named like the options."""

from __future__ import annotations

import math
import numbers
from dataclasses import replace
from decimal import Decimal
from typing import Any

from batchradix.config import SamplingOptions
from batchradix.errors import OptionError, RowError, RowErrorCode
from batchradix.types import Row

_INTEGERS = ("max_tokens", "top_k", "seed")
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
SETTING_COLUMNS: tuple[str, ...] = (*_INTEGERS, *_NUMBERS, "stop")
"""The columns that are options of their row; null or missing means the job's own value."""

_MAX_CACHED = 4096


class RowSettingsReader:
    """Reads rows against one set of defaults; rows that say the same share one object."""

    def __init__(self, defaults: SamplingOptions) -> None:
        self.defaults = defaults
        self._known: dict[tuple[tuple[str, Any], ...], SamplingOptions] = {}

    def read(self, row: Row) -> SamplingOptions | RowError:
        """The row's options: the very ``defaults`` where it sets none, or `bad_setting`.

        Integers may come as floats of whole value (a nullable integer column becomes one on its
        way through pandas); booleans, text, NaN and infinity are refused. ``stop`` is a string
        or a list of strings.
        """
        values = row.values
        changed: list[tuple[str, Any]] = []
        for column in SETTING_COLUMNS:
            value = values.get(column)
            if value is not None:
                try:
                    changed.append((column, _setting(column, value)))
                except OptionError as error:
                    return _bad_setting(row, column, str(error))
        if not changed:
            return self.defaults
        key = tuple(changed)
        options = self._known.get(key)
        if options is None:
            for column, value in changed:
                try:
                    SamplingOptions(**{column: value})
                except OptionError as error:
                    return _bad_setting(row, column, str(error))
            try:
                options = replace(self.defaults, **dict(changed))
            except OptionError as error:  # the run chooses in a way that draws nothing
                return _bad_setting(row, "temperature", str(error))
            if len(self._known) >= _MAX_CACHED:
                self._known.clear()
            self._known[key] = options
        return options


def read_row_settings(row: Row, defaults: SamplingOptions) -> SamplingOptions | RowError:
    """`RowSettingsReader.read` for a single row."""
    return RowSettingsReader(defaults).read(row)


def _bad_setting(row: Row, column: str, problem: str) -> RowError:
    return RowError(RowErrorCode.BAD_SETTING, f"{row.place}, column {column}: {problem}")


def _setting(column: str, value: Any) -> Any:
    """The value as `SamplingOptions` takes it; raises `OptionError` where it is of no such kind."""
    if column == "stop":
        return _stop(value)
    is_number = isinstance(value, (numbers.Real, Decimal)) and not isinstance(value, bool)
    if not is_number:
        kind = "an integer" if column in _INTEGERS else "a number"
        raise OptionError(f"{column} must be {kind}, not {_short(value)}")
    try:
        as_float = float(value)
    except (OverflowError, ValueError):  # beyond float64, a signalling NaN
        as_float = math.inf
    if column in _INTEGERS:
        is_whole = isinstance(value, numbers.Integral) or (
            math.isfinite(as_float) and value == int(value)
        )
        if not is_whole or not -(2**63) <= int(value) < 2**63:
            raise OptionError(f"{column} must be an integer of 64 bits, not {_short(value)}")
        return int(value)
    if not math.isfinite(as_float):
        raise OptionError(f"{column} must be a finite number, not {_short(value)}")
    return as_float


def _stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(t, str) for t in texts):
        raise OptionError(f"stop must be a string or a list of strings, not {_short(value)}")
    if not all(texts):
        raise OptionError("stop must not hold an empty string")
    return tuple(texts)


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a huge integer"
    return text if len(text) <= 60 else f"{text[:57]}..."
