"""One row's prompt laid open: its text and tokens, what it shares, and how its answer begins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchradix.config import RunConfig
from batchradix.errors import InputError, RowError
from batchradix.pipeline.intake import BATCH_ROWS
from batchradix.pipeline.job import RadixEngines
from batchradix.pipeline.parts import Parts, open_parts
from batchradix.pipeline.row_formats import AnswerFormats
from batchradix.prompts.detokenise import IncrementalDetokenizer
from batchradix.prompts.view import PromptView
from batchradix.report.progress import Progress, Silent
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
    prompt."""

    id: Any
    row: int
    view: PromptView
    opening: tuple[int, ...]
    opening_text: str
    neighbour: Neighbour | None

    def to_json(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        neighbour = self.neighbour
        return {
            "id": self.id,
            "row": self.row,
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
    """The prompt of the row with id (else number) ``row``, or of the one with id ``id``; of the
    first without either. Loads no weights; under a schema the grammar is compiled.

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
        columns = parts.prompts.required_columns | formats.columns
        found = _find(parts, columns, row, id)
        view = parts.prompts.explain(found)
        error = found.error or view.error
        number: int | RowError = 0 if error is not None else formats.number(found)
        if isinstance(number, RowError):
            error = number
        if error is not None:
            raise InputError(f"this row has no prompt: {error.message}")
        assert isinstance(number, int)
        opening = () if view.thinks else tuple(formats.openings[number].tolist())
        return Previewed(
            id=found.id,
            row=found.index,
            view=view,
            opening=opening,
            opening_text=_text(parts, opening),
            neighbour=_neighbour(parts, found, view),
        )


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


def _neighbour(parts: Parts, row: Row, view: PromptView) -> Neighbour | None:
    """In the sorted order of all prompts the longest common beginning is that with a row beside, so
    whichever shares most stands there."""
    ids = np.array(view.ids, dtype=np.uint32)
    best: tuple[int, Row] | None = None
    num_compared = 0
    for rows in _first_rows(parts):
        tokens = parts.prompts.encode(rows).tokens
        num_compared += len(rows)
        for number, other in enumerate(rows):
            theirs = tokens[number]
            if other.index == row.index or not len(theirs):
                continue
            shared = _num_common(ids, theirs)
            if best is None or shared > best[0]:
                best = shared, other
    if best is None:
        return None
    shared, other = best
    return Neighbour(
        id=other.id,
        row=other.index,
        shared_tokens=shared,
        shared_text=_beginning(parts, view, shared),
        num_compared=num_compared,
    )


def _beginning(parts: Parts, view: PromptView, num_tokens: int) -> str:
    """The text of the first tokens of a prompt."""
    texts: list[str] = []
    for span in view.spans:
        if num_tokens < len(span.ids):
            return "".join([*texts, _text(parts, span.ids[:num_tokens])])
        texts.append(span.text)
        num_tokens -= len(span.ids)
    return "".join(texts)


def _first_rows(parts: Parts) -> Iterator[list[Row]]:
    left = MOST_COMPARED
    formats = frozenset() if parts.row_formats is None else parts.row_formats.columns
    for rows in parts.source.batches(parts.prompts.required_columns | formats, BATCH_ROWS):
        yield rows[:left]
        left -= len(rows)
        if left <= 0:
            return


def _num_common(a: U32, b: U32) -> int:
    size = min(len(a), len(b))
    differs = np.flatnonzero(a[:size] != b[:size])
    return int(differs[0]) if len(differs) else size
