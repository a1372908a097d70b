"""A template seen as fields: its own texts and its places, in order, and their lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchradix.checkpoint.tokenizer import Tokenizer
from batchradix.prompts.row_problem import RowProblem
from batchradix.prompts.surrogates import clean_text
from batchradix.prompts.template import Place, Template
from batchradix.types import Row


@dataclass(frozen=True, slots=True)
class Field:
    """``name``: the place's, None for the template's own text. ``line``: from 1."""

    name: str | None
    line: int


class TemplateFields:
    """The fields of a job's prompts; made by `build.PromptBuilder.fields`."""

    def __init__(self, template: Template, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer
        line, fields = 1, []
        for part in template.parts:
            fields.append(Field(part.name if isinstance(part, Place) else None, line))
            line += part.count("\n") if isinstance(part, str) else 0
        self.fields = tuple(fields)

    def texts(self, row: Row) -> list[str] | None:
        """The text of each field in a row's prompt; None for a row that has none."""
        try:
            return None if row.error is not None else self._template.texts(row.values)
        except RowProblem:
            return None

    def num_tokens(self, texts: Sequence[str]) -> list[int]:
        """How many tokens each text has by itself."""
        plain = [clean_text(text) for text in texts]
        return [len(ids) for ids in self._tokenizer.encode_plain(plain, [False] * len(plain))]
