"""What the answer of each row may look like, numbered: the run's own format and those of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from batchradix.errors import RowError, RowErrorCode, SchemaError
from batchradix.schema.answer_format import AnswerFormat
from batchradix.schema.questions import QuestionFormats
from batchradix.schema.row_formats import RowFormats
from batchradix.types import U32, GrammarSpec, Row

Opening = Callable[[GrammarSpec], Sequence[int]]
"""The token ids with which every answer under a grammar begins; raises `SchemaError`."""


class AnswerFormats:
    """The formats of a job's rows. Number 0 is the run's own; None stands for any text.

    ``formats[i]`` and ``openings[i]`` (uint32, what every answer under it begins with) belong
    together. ``opening`` compiles a grammar and tells its opening; without it, or without
    ``is_forced``, there are no openings.
    """

    def __init__(
        self,
        own: AnswerFormat | None,
        rows: RowFormats | QuestionFormats | None = None,
        *,
        opening: Opening | None = None,
        is_forced: bool = True,
    ) -> None:
        self._rows = rows
        self._opening = opening
        self._is_forced = is_forced
        self._numbers: dict[AnswerFormat | None, int] = {}
        self._problems: dict[AnswerFormat | None, SchemaError] = {}
        self.formats: list[AnswerFormat | None] = [own]
        self.openings: list[U32] = [self._opening_of(own)]

    @property
    def columns(self) -> frozenset[str]:
        """The input columns that `number` reads."""
        return frozenset() if self._rows is None else self._rows.columns

    def number(self, row: Row) -> int | RowError:
        """The number of the row's format, or `bad_setting` where it cannot be used."""
        cell = None if self._rows is None else self._rows.cell(row.values)
        if self._rows is None or cell is None:
            return 0
        try:
            return self._numbered(self._rows.read(cell))
        except SchemaError as error:
            place = f"{row.place}, column {self._rows.name_of(cell)}"
            return RowError(RowErrorCode.BAD_SETTING, f"{place}: {error}")

    def identity(self, number: int) -> str:
        """What sets the answers of format ``number`` apart from others; "" for the run's own."""
        found = self.formats[number]
        return "" if number == 0 else "text" if found is None else f"{found.kind} {found.text}"

    def _numbered(self, found: AnswerFormat | None) -> int:
        if found in self._problems:
            raise self._problems[found]
        if found not in self._numbers:
            try:
                opening = self._opening_of(found)
            except SchemaError as error:
                self._problems[found] = error
                raise
            self._numbers[found] = len(self.formats)
            self.formats.append(found)
            self.openings.append(opening)
        return self._numbers[found]

    def _opening_of(self, found: AnswerFormat | None) -> U32:
        if found is None or self._opening is None:
            return np.zeros(0, dtype=np.uint32)
        ids = self._opening(found.grammar)  # also compiles it, so that it is refused here
        return np.array(ids if self._is_forced else (), dtype=np.uint32)

    @property
    def notices(self) -> tuple[str, ...]:
        """What the user has to know of the rows' own formats, each sentence once."""
        sentences = [text for found in self.formats[1:] if found for text in found.notices]
        return tuple(f"in schemas of rows: {text}" for text in dict.fromkeys(sentences))
