"""One row's prompt laid open: its text and tokens, what it shares, and how its answer begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchradix.config import RunConfig
from batchradix.errors import InputError, RowError
from batchradix.jobs.row_settings import SETTING_COLUMNS
from batchradix.pipeline.intake import BATCH_ROWS
from batchradix.pipeline.job import RadixEngines
from batchradix.pipeline.parts import Parts, open_parts
from batchradix.pipeline.planned import expander_of
from batchradix.pipeline.row_formats import AnswerFormats
from batchradix.prompts.detokenise import IncrementalDetokenizer
from batchradix.prompts.view import PromptView
from batchradix.report.progress import Progress, Silent
from batchradix.schema.questions import QUESTION_KEY
from batchradix.types import U32, Row

MOST_COMPARED = 10_000
"""Rows of the input, from its beginning, among which that one is looked for with which a prompt
shares most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """The row that stands beside another one in the plan: of the first ``num_compared`` rows the
    one with which it shares most. ``shared_tokens``: how many tokens both prompts begin with (and
    openings of answers, where the prompts are equal), ``shared_text`` their text."""

    id: Any
    row: int
    shared_tokens: int
    shared_text: str
    num_compared: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Previewed:
    """A row's prompt. ``opening``: the tokens that every answer to it is forced to begin with, and
    ``opening_text`` their text. ``neighbour`` is None where there is no other row with a
    prompt. ``question``: the name of the one that it asks, None where the job has none; ``part``
    and ``num_parts``: which part of the row's text it has (from 1), of how many."""

    id: Any
    row: int
    view: PromptView
    opening: tuple[int, ...]
    opening_text: str
    neighbour: Neighbour | None
    question: str | None = None
    part: int = 1
    num_parts: int = 1

    def to_json(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        neighbour = self.neighbour
        return {
            "id": self.id,
            "row": self.row,
            **({} if self.question is None else {"question": self.question}),
            **({} if self.num_parts == 1 else {"part": self.part, "parts": self.num_parts}),
            "text": self.view.text,
            "marked": self.view.marked(),
            "prompt_tokens": len(self.view.ids),
            "spans": [
                {"text": span.text, "is_token": span.is_token, "ids": list(span.ids)}
                for span in self.view.spans
            ],
            "opening": {"text": self.opening_text, "ids": list(self.opening)},
            "neighbour": neighbour
            and {
                "id": neighbour.id,
                "row": neighbour.row,
                "shared_tokens": neighbour.shared_tokens,
                "shared_text": neighbour.shared_text,
                "compared_rows": neighbour.num_compared,
            },
        }


def preview(
    config: RunConfig,
    row: str | None = None,
    *,
    id: str | None = None,
    progress: Progress | None = None,
) -> Previewed:
    """The first of `previews`, whose arguments and errors these are."""
    return previews(config, row, id=id, progress=progress)[0]


def previews(
    config: RunConfig,
    row: str | None = None,
    *,
    id: str | None = None,
    progress: Progress | None = None,
) -> tuple[Previewed, ...]:
    """The prompts of the row with id (else number) ``row``, or of the one with id ``id``; of the
    first without either: one, or those of its questions and the parts of its text. Loads no
    weights; under a schema the grammar is compiled.

    Raises `InputError` when there is no such row or it has no prompt.
    """
    parts = open_parts(config, progress=progress or Silent())
    with closing(parts.source):
        formats = AnswerFormats(
            parts.schema,
            parts.row_formats,
            opening=_openings(parts),
            is_forced=config.engine.forced_text,
        )
        columns = parts.prompts.required_columns | formats.columns | {*SETTING_COLUMNS}
        found = _find(parts, columns, row, id)
        slots = expander_of(parts).slots(found)
        views = [parts.prompts.explain(slot) for slot in slots]
        openings = [_opening(formats, slot, view) for slot, view in zip(slots, views, strict=True)]
        neighbours = _neighbours(parts, columns, found, views)
        questions = [_question(config, slot) for slot in slots]
        sizes, seen = Counter(questions), Counter[str | None]()
        shown = []
        for view, opening, neighbour, question in zip(
            views, openings, neighbours, questions, strict=True
        ):
            seen[question] += 1
            shown.append(
                Previewed(
                    id=found.id,
                    row=found.index,
                    view=view,
                    opening=opening,
                    opening_text=_text(parts, opening),
                    neighbour=neighbour,
                    question=question,
                    part=seen[question],
                    num_parts=sizes[question],
                )
            )
        return tuple(shown)


def _question(config: RunConfig, slot: Row) -> str | None:
    return config.questions[slot.values[QUESTION_KEY]].name if config.questions else None


def _opening(formats: AnswerFormats, slot: Row, view: PromptView) -> tuple[int, ...]:
    """The tokens that the answer to a prompt begins with. Raises `InputError` for none."""
    error = slot.error or view.error
    number: int | RowError = 0 if error is not None else formats.number(slot)
    if isinstance(number, RowError):
        error = number
    if error is not None:
        raise InputError(f"this row has no prompt: {error.message}")
    assert isinstance(number, int)
    return () if view.thinks else tuple(formats.openings[number].tolist())


def _openings(parts: Parts) -> Any:
    if parts.schema is None and parts.row_formats is None:
        return None
    return RadixEngines(parts.checkpoint, options=parts.config.engine).opening


def _text(parts: Parts, ids: tuple[int, ...]) -> str:
    state = IncrementalDetokenizer(parts.checkpoint.tokenizer.token_bytes).start()
    return "".join(state.push(token) for token in ids)


def _find(parts: Parts, columns: frozenset[str], row: str | None, id: str | None) -> Row:
    by_number: Row | None = None
    for rows in parts.source.batches(columns):
        for candidate in rows:
            wanted = row if id is None else id
            if wanted is None or str(candidate.id) == wanted:
                return candidate
            if id is None and str(candidate.index) == wanted:
                by_number = candidate
    if by_number is not None:
        return by_number
    what = "has no rows"
    if id is not None:
        what = f"has no row with the id {id!r}"
    elif row is not None:
        what = f"has no row with the id or number {row!r}"
    raise InputError(f"{parts.source.name} {what}")


def _neighbours(
    parts: Parts, columns: frozenset[str], row: Row, views: Sequence[PromptView]
) -> list[Neighbour | None]:
    """For each prompt of a row the other row with which it shares most. In the sorted order of all
    prompts the longest common beginning is that with one beside, so whichever shares most stands
    there."""
    prompts = [np.array(view.ids, dtype=np.uint32) for view in views]
    best: list[tuple[int, Row] | None] = [None] * len(views)
    num_compared = 0
    expander = expander_of(parts)
    for rows in _first_rows(parts, columns):
        num_compared += len(rows)
        expanded = expander.expand(rows)
        for place, other in enumerate(expanded.rows):
            theirs = expanded.batch.tokens[place]
            if _number(other) == row.index or not len(theirs):
                continue
            for i, ids in enumerate(prompts):
                shared, found = _num_common(ids, theirs), best[i]
                if found is None or shared > found[0]:
                    best[i] = shared, other
    return [
        found
        and Neighbour(
            id=found[1].id,
            row=_number(found[1]),
            shared_tokens=found[0],
            shared_text=_beginning(parts, view, found[0]),
            num_compared=num_compared,
        )
        for view, found in zip(views, best, strict=True)
    ]


def _number(row: Row) -> int:
    """The number of a row of the table in the input."""
    return row.index if row.number is None else row.number


def _beginning(parts: Parts, view: PromptView, num_tokens: int) -> str:
    """The text of the first tokens of a prompt."""
    texts: list[str] = []
    for span in view.spans:
        if num_tokens < len(span.ids):
            return "".join([*texts, _text(parts, span.ids[:num_tokens])])
        texts.append(span.text)
        num_tokens -= len(span.ids)
    return "".join(texts)


def _first_rows(parts: Parts, columns: frozenset[str]) -> Iterator[list[Row]]:
    left = MOST_COMPARED
    for rows in parts.source.batches(columns, BATCH_ROWS):
        yield rows[:left]
        left -= len(rows)
        if left <= 0:
            return


def _num_common(a: U32, b: U32) -> int:
    size = min(len(a), len(b))
    differs = np.flatnonzero(a[:size] != b[:size])
    return int(differs[0]) if len(differs) else size
