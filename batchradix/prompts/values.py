"""One value of a row as text, by one documented policy.

Text stands as it is. Booleans are ``true`` and ``false``; integers keep every digit; floats are
Python's shortest exact spelling, with ``NaN``, ``Infinity`` and ``-Infinity``; decimals keep
their digits; dates and times are ISO 8601. Lists and objects are JSON on one line with ``", "``
and ``": "``, non-ASCII text kept, what JSON lacks inside them as the text above. Bytes are
refused. None and missing values are the caller's business.
"""

from __future__ import annotations

import datetime
import decimal
import json
import math
import uuid
from typing import Any

from batchradix.errors import RowErrorCode
from batchradix.prompts.row_problem import RowProblem


def render_value(value: Any, name: str) -> str:
    """The text of one value that is not None; ``name`` is the field, for messages.

    Raises `RowProblem` (bad_value) for what has no text.
    """
    if isinstance(value, str):
        return value
    try:
        if isinstance(value, (dict, list, tuple)):
            return json.dumps(value, ensure_ascii=False, default=_scalar)
        return _scalar(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise RowProblem(RowErrorCode.BAD_VALUE, f"field {name!r} {_reason(error)}") from None


def _scalar(value: Any) -> str:
    """The text of a scalar; raises TypeError for what has none."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return repr(float(value))
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, decimal.Decimal):
        return format(value, "f")
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, (datetime.timedelta, uuid.UUID)):
        return str(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError("holds bytes, which a prompt cannot take; decode them to text first")
    kind = type(value).__name__
    raise TypeError(f"holds a value of type {kind}, which a prompt cannot take; make it text")


def _reason(error: Exception) -> str:
    if isinstance(error, TypeError) and str(error).startswith("holds "):
        return str(error)
    if isinstance(error, RecursionError):
        return "is nested too deeply to be written as JSON; flatten it"
    return f"cannot be written as text ({error}); make it text"


def plain(value: Any, name: str) -> Any:
    """``value`` rebuilt from JSON's own types (str, int, float, bool, None, list, dict).

    What JSON lacks becomes text as above. Raises `RowProblem` (bad_value).
    """
    if value is None or type(value) in (str, bool, int, float):
        return value
    try:
        if isinstance(value, dict):
            return {str(key): plain(item, name) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item, name) for item in value]
        return _scalar(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise RowProblem(RowErrorCode.BAD_VALUE, f"field {name!r} {_reason(error)}") from None
