"""What is wrong with one row, on its way from where it is found to the row's `RowError`."""

from __future__ import annotations

from batchradix.errors import RowError, RowErrorCode
from batchradix.prompts.surrogates import clean_text
from batchradix.types import Row


class RowProblem(Exception):
    """This row has no prompt. ``sentence`` names field and remedy, not yet the row."""

    def __init__(self, code: RowErrorCode, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code
        self.sentence = sentence

    def at(self, row: Row) -> RowError:
        """The `RowError` that names the row, and its line where it has one."""
        return RowError(self.code, clean_text(f"{row.place}: {self.sentence}"))
