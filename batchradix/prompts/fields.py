"""Prompts seen as fields: pieces of text, of which rows may have the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batchradix.checkpoint.tokenizer import Tokenizer
from batchradix.prompts.field_list import FieldList
from batchradix.prompts.row_problem import RowProblem
from batchradix.prompts.template import Place, Template
from batchradix.prompts.tokenise import count_tokens
from batchradix.types import Row


@dataclass(frozen=True, slots=True)
class Field:
    """``name``: the place's, None for the template's own text. ``line``: from 1."""

    name: str | None
    line: int


class Fields:
    """What reads the fields of rows: each of ``pieces``, rendered, is one. ``arranged`` gives a
    row as prompts take it."""

    def __init__(
        self, pieces: Sequence[Template], tokenizer: Tokenizer, arranged: Callable[[Row], Row]
    ) -> None:
        self._pieces = tuple(pieces)
        self._tokenizer = tokenizer
        self._arranged = arranged

    def __len__(self) -> int:
        return len(self._pieces)

    def texts(self, row: Row) -> list[str] | None:
        """The text of each field in a row's prompt; None for a row that has none."""
        if row.error is not None:
            return None
        values = self._arranged(row).values
        try:
            return ["".join(piece.texts(values)) for piece in self._pieces]
        except RowProblem:
            return None

    def num_tokens(self, texts: Sequence[str]) -> list[int]:
        """How many tokens each text has by itself."""
        return count_tokens(self._tokenizer, texts)


class TemplateFields(Fields):
    """The parts of a template: its own texts and its places, in order, and their lines."""

    def __init__(
        self, template: Template, tokenizer: Tokenizer, arranged: Callable[[Row], Row]
    ) -> None:
        alone = [Template((part,), (), template.null_text) for part in template.parts]
        super().__init__(alone, tokenizer, arranged)
        line, fields = 1, []
        for part in template.parts:
            fields.append(Field(part.name if isinstance(part, Place) else None, line))
            line += part.count("\n") if isinstance(part, str) else 0
        self.fields = tuple(fields)


class ListFields(Fields):
    """The lines of a list of fields."""

    def __init__(
        self, listed: FieldList, tokenizer: Tokenizer, arranged: Callable[[Row], Row]
    ) -> None:
        lines = [listed.line(number) for number in range(len(listed))]
        super().__init__(lines, tokenizer, arranged)
