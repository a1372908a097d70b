"""Prompts of several questions to one row: its text first, which they share, a question last."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from batchradix.config import PromptOptions
from batchradix.errors import RowError, TemplateError
from batchradix.prompts.build import PromptBatch, PromptBuilder
from batchradix.prompts.fields import TemplateFields
from batchradix.prompts.template import Place
from batchradix.prompts.view import PromptView
from batchradix.row_options import Question
from batchradix.schema.questions import QUESTION_KEY, QuestionFormats
from batchradix.types import Row, Thinking, TokenTable

_PLACE = re.compile(r"\{\{\s*question\s*\}\}")
_SCHEMA_PLACE = re.compile(r"\{\{\s*schema\s*\}\}")

MakeBuilder = Callable[[PromptOptions, str | None], PromptBuilder]
"""A builder by these options, whose schema is this text."""


class Prompts(Protocol):
    """What makes prompts of rows: a `PromptBuilder`, or `QuestionPrompts`."""

    @property
    def required_columns(self) -> frozenset[str]: ...

    @property
    def places(self) -> tuple[Place, ...] | None: ...

    @property
    def shows_schema(self) -> bool: ...

    @property
    def thinking(self) -> Thinking | None: ...

    @property
    def may_think(self) -> bool: ...

    @property
    def warnings(self) -> tuple[str, ...]: ...

    def encode(self, rows: Sequence[Row]) -> PromptBatch: ...

    def explain(self, row: Row) -> PromptView: ...

    def fields(self) -> TemplateFields | None: ...


class QuestionPrompts:
    """Prompts of rows whose values hold the number of a question under `QUESTION_KEY`.

    With a template (or an instruction, or a column alone) a question stands behind it, or where
    the template says ``{{ question }}``, and may have places itself; without, it stands behind the
    row's ``prompt``, or in the last of its ``messages``. What its answer must match follows it.
    Raises what `PromptBuilder` raises.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        formats: QuestionFormats,
        options: PromptOptions,
        make_builder: MakeBuilder,
    ) -> None:
        self._template = _base_template(options)
        self._texts = [
            _with_format(question.text, found)
            for question, found in zip(questions, formats.formats, strict=True)
        ]
        if self._template is None:
            self._builders = [make_builder(options, None)] * len(questions)
            return
        is_chat = options.chat or options.template is None
        self._builders = []
        for question, found in zip(questions, formats.formats, strict=True):
            text = question.text
            if found is not None and not _SCHEMA_PLACE.search(text + self._template):
                text = f"{text}\n\n{found.prompt_line}\n{{{{ schema }}}}"
            asked = replace(
                options,
                template=_put(self._template, text),
                chat=is_chat,
                instruction=None,
                column=None,
            )
            schema_text = None if found is None else found.text
            try:
                self._builders.append(make_builder(asked, schema_text))
            except TemplateError as error:
                if "{{" not in question.text:  # then it is the template's own place
                    raise
                raise TemplateError(f"question {question.name!r}: {error}") from None

    @property
    def required_columns(self) -> frozenset[str]:
        """Top-level input columns that prompts are made of."""
        return frozenset().union(*(builder.required_columns for builder in self._builders))

    @property
    def places(self) -> tuple[Place, ...] | None:
        """Where prompts show text of their row."""
        return self._builders[0].places

    @property
    def shows_schema(self) -> bool:
        return any(builder.shows_schema for builder in self._builders)

    @property
    def thinking(self) -> Thinking | None:
        """How rows think that do, None where none can."""
        return self._builders[0].thinking

    @property
    def may_think(self) -> bool:
        """Whether the answer to any question may be thought about."""
        return any(builder.may_think for builder in self._builders)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed and probably not meant, each sentence once."""
        return tuple(dict.fromkeys(w for builder in self._builders for w in builder.warnings))

    def fields(self) -> TemplateFields | None:
        """None: the row's text stands first, as it should."""
        return None

    def encode(self, rows: Sequence[Row]) -> PromptBatch:
        """Token ids of the rows' prompts, each by its question. As `PromptBuilder.encode`."""
        numbers = np.array([row.values[QUESTION_KEY] for row in rows], dtype=np.int64)
        tokens: list[Any] = [()] * len(rows)
        errors: dict[int, RowError] = {}
        num_cleaned = 0
        thinks = np.zeros(len(rows), dtype=np.bool_)
        for number, builder in enumerate(self._builders):
            here = np.flatnonzero(numbers == number).tolist()
            if not here:
                continue
            batch = builder.encode([self._asked(rows[i]) for i in here])
            num_cleaned += batch.num_cleaned
            thinks[here] = batch.thinks
            for place, i in enumerate(here):
                tokens[i] = batch.tokens[place]
                if place in batch.errors:
                    errors[i] = batch.errors[place]
        return PromptBatch(TokenTable.from_rows(tokens), errors, num_cleaned, thinks)

    def explain(self, row: Row) -> PromptView:
        """One row's prompt with its spans and their ids."""
        number: int = row.values[QUESTION_KEY]
        return self._builders[number].explain(self._asked(row))

    def _asked(self, row: Row) -> Row:
        if self._template is not None or row.error is not None:
            return row
        text, values = self._texts[row.values[QUESTION_KEY]], row.values
        if values.get("messages") is not None:
            return replace(row, values={**values, "messages": _ask_last(values["messages"], text)})
        if isinstance(values.get("prompt"), str):
            return replace(row, values={**values, "prompt": f"{values['prompt']}\n\n{text}"})
        return row  # the builder says what is wrong with it


def _base_template(options: PromptOptions) -> str | None:
    if options.template is not None:
        return options.template
    if options.column is None:
        return None
    front = "" if options.instruction is None else f"{options.instruction}\n\n"
    return f"{front}{{{{ {options.column} }}}}"


def _put(template: str, question: str) -> str:
    if _PLACE.search(template):
        return _PLACE.sub(lambda found: question, template)
    return f"{template}\n\n{question}"


def _with_format(text: str, found: Any) -> str:
    return text if found is None else f"{text}\n\n{found.prompt_line}\n{found.text}"


def _ask_last(messages: Any, text: str) -> Any:
    """The messages with a question at the end: of the last where it is the user's and a text, else
    in one of its own. What are no messages is left for others to refuse."""
    if isinstance(messages, str):
        try:
            messages = json.loads(messages)
        except (ValueError, RecursionError):
            return messages
    if not isinstance(messages, (list, tuple)):
        return messages
    last = messages[-1] if messages else None
    if isinstance(last, Mapping) and last.get("role") == "user":
        content = last.get("content")
        if isinstance(content, str):
            return [*messages[:-1], {**last, "content": f"{content}\n\n{text}"}]
    return [*messages, {"role": "user", "content": text}]
