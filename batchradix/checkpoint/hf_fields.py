"""The fields of a ``config.json``, read one by one and checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchradix.errors import ModelError

MOST = 1e15  # of any number; larger ones are damage, and overflow somewhere
MOST_ELEMENTS = 2**31 - 1
MOST_LAYERS = 10_000


class Fields:
    """``config.json`` with its values checked; null counts as absent, as in `transformers`."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self.path = path
        self.config = config

    def error(self, sentence: str) -> ModelError:
        return ModelError(f"{self.path}: {sentence}")

    def number(self, name: str, default: float | None = None) -> float:
        return self.positive(name, self.config.get(name), default)

    def positive(self, name: str, value: Any, default: float | None = None) -> float:
        if value is None:
            value = default
        if value is None:
            raise self.error(f"{name} is missing; the folder is incomplete, fetch the model again")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(f"{name} is {value!r}, not a number")
        if value > MOST:
            raise self.error(f"{name} is too large to be true")
        if not math.isfinite(value) or value <= 0:
            raise self.error(f"{name} is {value!r}, but must be above 0")
        return value

    def integer(self, name: str, default: int | None = None, most: int = MOST_ELEMENTS) -> int:
        """A whole number above 0 and up to ``most``."""
        value = self.number(name, default)
        if value != int(value):
            raise self.error(f"{name} is {value!r}, not a whole number")
        if value > most:
            raise self.error(f"{name} is {value!r}, but must be {most:,} or less")
        return int(value)

    def count(self, name: str, default: int, most: int = MOST_ELEMENTS) -> int:
        """A whole number that may be 0, and where it is null is ``default``."""
        value = self.config.get(name)
        value = default if value is None else value
        if value == 0 and value is not False:
            return 0
        if isinstance(value, int) and value < 0:
            raise self.error(f"{name} is {value!r}, but must be 0 or more")
        return self.integer(name, default or None, most)

    def text(self, name: str, default: str) -> str:
        value = self.config.get(name)
        if value is not None and not isinstance(value, str):
            raise self.error(f"{name} is {value!r}, not a name")
        return default if value is None else value

    def object(self, name: str) -> Mapping[str, Any]:
        """Empty where it is absent or null."""
        value = self.config.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(f"{name} is {value!r}, not an object")
        return {} if value is None else value

    @property
    def num_layers(self) -> int:
        return self.integer("num_hidden_layers", most=MOST_LAYERS)

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.config.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(f"{name} is {value!r}, not true or false")
        return default if value is None else value
