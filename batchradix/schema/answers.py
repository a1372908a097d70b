"""An answer's text as strict JSON, and the one error that says why it cannot be taken."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from batchradix.errors import RowError, RowErrorCode

VALUE_METADATA = {b"batchradix.json_lines": b"value"}
"""Of a field whose answers are no JSON texts: JSON lines then hold the value, else the text."""


def is_written_from_value(field: Any) -> bool:
    """Whether a ``pa.Field`` carries `VALUE_METADATA`."""
    return bool((field.metadata or {}).get(b"batchradix.json_lines") == b"value")


class InvalidAnswer(Exception):
    """An answer that becomes an error row; never leaves the pipeline.

    ``pointer`` is the JSON pointer of the offending part of the answer, "" for the whole.
    """

    def __init__(self, code: RowErrorCode, message: str, pointer: str = "") -> None:
        place = f" at {pointer}" if pointer else ""
        super().__init__(f"the answer{place}: {message}")
        self.code = code
        self.message = message
        self.pointer = pointer

    @property
    def row_error(self) -> RowError:
        """The error as a result row carries it; its sentence is ``str(self)``."""
        return RowError(self.code, str(self))


def read_json(text: str) -> Any:
    """The value of a JSON text: exact integers, no NaN, no repeated key, no half character.

    Raises `InvalidAnswer` with ``invalid_json``, or with ``not_representable`` for a number
    beyond float64 or a string that is no Unicode text.
    """
    try:
        value = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_distinct_keys,
        )
    except json.JSONDecodeError as error:
        raise InvalidAnswer(
            RowErrorCode.INVALID_JSON,
            f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}",
        ) from None
    except RecursionError:
        raise InvalidAnswer(RowErrorCode.INVALID_JSON, "nested too deeply to be read") from None
    except ValueError:  # Python's limit on the digits of an integer
        raise InvalidAnswer(
            RowErrorCode.NOT_REPRESENTABLE, "a number has too many digits"
        ) from None
    # Only an escape (or a broken text) can hold one half of a surrogate pair.
    if "\\u" in text or not text.isascii():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise InvalidAnswer(
                RowErrorCode.NOT_REPRESENTABLE, "a string holds half of a surrogate pair"
            ) from None
    return value


def json_text(value: Any) -> str:
    """Compact JSON with non-ASCII text as it is; what JSON-text cells hold."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def pointer_step(pointer: str, step: str | int) -> str:
    """``pointer`` extended by a property name or an index (RFC 6901)."""
    return f"{pointer}/{str(step).replace('~', '~0').replace('/', '~1')}"


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidAnswer(RowErrorCode.INVALID_JSON, f"not JSON: {name} is not a JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise InvalidAnswer(
            RowErrorCode.NOT_REPRESENTABLE, f"{_short(digits)} is beyond what float64 holds"
        )
    return number


def _distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidAnswer(
                    RowErrorCode.INVALID_JSON, f"an object has the key {_short(key)!r} twice"
                )
            seen.add(key)
    return value


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
