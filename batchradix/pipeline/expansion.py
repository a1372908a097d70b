"""Rows of the input to rows of the table: one for each question and each part of a long text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from batchradix.chat_options import DEFAULT_THINKING_TOKENS
from batchradix.checkpoint.tokenizer import Tokenizer
from batchradix.config import DEFAULT_MAX_TOKENS
from batchradix.errors import RowError, SchemaError
from batchradix.jobs.row_settings import RowSettingsReader
from batchradix.pipeline.budget import Budgets
from batchradix.pipeline.row_formats import AnswerFormats
from batchradix.prompts.build import PromptBatch
from batchradix.prompts.overflow import Cutter, LongText, longest_text
from batchradix.prompts.questions import Prompts
from batchradix.row_options import LongRows, Question
from batchradix.schema.questions import QUESTION_KEY
from batchradix.types import U32, Row, Thinking, TokenTable

_TRIES = 8  # a text cut anew may take some tokens more than the tokens it was cut at
_DEFAULT_SHARE = 4
_NO_TOKENS = np.zeros(0, dtype=np.uint32)

Room = Callable[[Row, Thinking | None], int]


@dataclass(frozen=True, slots=True)
class Expanded:
    """A batch of the table's rows. ``sizes``: how many each row and question of the input became;
    ``asks``: which of them wait for the answers of those before them, by position; ``cut_tokens``:
    what was left out of the text of each."""

    rows: list[Row]
    batch: PromptBatch
    sizes: list[int] = field(default_factory=list)
    asks: list[int] = field(default_factory=list)
    cut_tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Slot:
    """A row of the table with its prompt."""

    row: Row
    tokens: U32
    error: RowError | None = None
    thinks: bool = False
    cut_tokens: int = 0
    is_ask: bool = False


@dataclass(frozen=True, slots=True)
class Expansion:
    """What makes several rows of the table of one of the input, or cuts its text."""

    tokenizer: Tokenizer | None = None
    questions: tuple[Question, ...] = ()
    long_rows: LongRows = field(default_factory=LongRows)
    thinking_tokens: int | None = None


class Rooms:
    """How many tokens a prompt may have beside its answer's ``max_tokens``. Where these are not
    said, 1,024 or a quarter of the context are kept free, and the shortest answer's at least.

    Of rows that think ``thinking_tokens`` are kept free too, at most half of the context; where
    they are not said, 4,096 or a quarter.
    """

    def __init__(
        self,
        options: RowSettingsReader,
        formats: AnswerFormats,
        budgets: Budgets | None,
        context_length: int,
        thinking_tokens: int | None = None,
    ) -> None:
        self._options, self._formats, self._budgets = options, formats, budgets
        self._context_length = context_length
        quarter = min(DEFAULT_THINKING_TOKENS, context_length // _DEFAULT_SHARE)
        said = thinking_tokens
        self._thinking_tokens = quarter if said is None else min(said, context_length // 2)

    def __call__(self, row: Row, thinking: Thinking | None) -> int:
        """Of the prompt of a row of the table, which thinks first where ``thinking`` is there; all
        of the context for one that cannot run."""
        options, number = self._options.read(row), self._formats.number(row)
        if isinstance(options, RowError) or isinstance(number, RowError):
            return self._context_length
        default = min(DEFAULT_MAX_TOKENS, self._context_length // _DEFAULT_SHARE)
        budget, answers = options.max_tokens or default, self._formats.formats[number]
        if answers is not None and self._budgets is not None:
            with suppress(SchemaError):
                budget = max(budget, self._budgets.least(answers.grammar))
        if thinking is not None:
            budget += self._thinking_tokens + len(thinking.closing_ids)
        return self._context_length - budget


class Expander:
    """Makes the table's rows of those of a job, batch by batch, with their prompts.

    ``room`` tells how many tokens the prompt of a row of the table may have. Of each row of the
    input come, question by question, the parts of its text in order; where there are several and
    the model is to be asked over their answers, a row for that follows, without a prompt yet. All
    questions see the same parts, or the same truncated text, so that they share it.
    """

    def __init__(
        self,
        prompts: Prompts,
        expansion: Expansion,
        room: Room,
    ) -> None:
        self._prompts, self._tokenizer = prompts, expansion.tokenizer
        self._questions, self._long = expansion.questions, expansion.long_rows
        self._room = room
        self._next = 0
        self._num_cleaned = 0

    @property
    def makes_several(self) -> bool:
        """Whether a row of the input may become several."""
        return bool(self._questions) or self._long.chunks

    def expand(self, rows: list[Row]) -> Expanded:
        """The table's rows for a batch of the input's."""
        if not self._questions and self._long.overflow == "error":
            return Expanded(rows, self._prompts.encode(rows))
        self._num_cleaned = 0
        found: list[_Slot] = []
        sizes: list[int] = []
        each = len(self._questions) or 1
        slots = self._encoded(rows)
        for i, row in enumerate(rows):
            for group in self._fitted(row, slots[i * each : (i + 1) * each]):
                found += group
                sizes.append(len(group))
        if self.makes_several:
            for slot in found:
                number = slot.row.index if slot.row.number is None else slot.row.number
                slot.row = replace(slot.row, index=self._next, number=number)
                self._next += 1
        tokens = TokenTable.from_rows([slot.tokens for slot in found])
        errors = {i: slot.error for i, slot in enumerate(found) if slot.error is not None}
        return Expanded(
            [slot.row for slot in found],
            PromptBatch(
                tokens, errors, self._num_cleaned, np.array([slot.thinks for slot in found], bool)
            ),
            sizes,
            [i for i, slot in enumerate(found) if slot.is_ask],
            [slot.cut_tokens for slot in found],
        )

    def asked(self, row: Row) -> list[Row]:
        """The row once for each question, with what that says of its answer; itself without."""
        if not self._questions:
            return [row]
        return [
            replace(
                row,
                values={
                    **row.values,
                    QUESTION_KEY: number,
                    **({} if question.max_tokens is None else {"max_tokens": question.max_tokens}),
                },
            )
            for number, question in enumerate(self._questions)
        ]

    def slots(self, row: Row) -> list[Row]:
        """The rows of the table that a row becomes and that have prompts."""
        groups = self._fitted(row, self._encoded([row]))
        return [slot.row for group in groups for slot in group if not slot.is_ask]

    def _encoded(self, rows: Sequence[Row]) -> list[_Slot]:
        asked = [each for row in rows for each in self.asked(row)]
        batch = self._prompts.encode(asked)
        self._num_cleaned += batch.num_cleaned
        return [
            _Slot(row, batch.tokens[i], batch.errors.get(i), bool(batch.thinks[i]))
            for i, row in enumerate(asked)
        ]

    def _excess(self, slots: Sequence[_Slot]) -> int:
        """How many tokens the longest of some prompts has too many; negative where all fit."""
        thinking = self._prompts.thinking if any(slot.thinks for slot in slots) else None
        over = [
            len(slot.tokens) - self._room(slot.row, thinking if slot.thinks else None)
            for slot in slots
            if slot.error is None and slot.row.error is None
        ]
        return max(over, default=-1)

    def _fitted(self, row: Row, slots: list[_Slot]) -> list[list[_Slot]]:
        """The row's questions with as many parts each as its text was cut into."""
        whole = [[slot] for slot in slots]
        size = self._long.chunk_tokens
        excess = -1 if self._long.overflow == "error" else self._excess(slots)
        if row.error is not None or (excess <= 0 and size is None):
            return whole
        long = longest_text(row, self._prompts.places)
        if long is None or self._tokenizer is None:
            return whole
        if excess <= 0 and size is not None and len(long.text.encode()) <= size:
            return whole  # no token is shorter than a byte
        cutter = Cutter(long.text, self._tokenizer)
        if self._long.truncates:
            return self._truncated(long, cutter, excess) or whole
        if excess <= 0 and size is not None and cutter.num_tokens <= size:
            return whole
        return self._parted(long, cutter, excess) or whole

    def _truncated(self, long: LongText, cutter: Cutter, excess: int) -> list[list[_Slot]] | None:
        """None where the prompt does not fit without any of the text."""
        keep = cutter.num_tokens - excess
        for _ in range(_TRIES):
            if keep < 1:
                return None
            slots = self._encoded([long.put(cutter.shortened(keep, self._long.overflow))])
            excess = self._excess(slots)
            if excess <= 0:
                for slot in slots:
                    slot.cut_tokens = cutter.num_tokens - keep
                return [[slot] for slot in slots]
            keep -= excess
        return None

    def _parted(self, long: LongText, cutter: Cutter, excess: int) -> list[list[_Slot]] | None:
        """None where the prompt does not fit with a part longer than what parts share."""
        size = cutter.num_tokens - max(0, excess)
        if self._long.chunk_tokens is not None:
            size = min(size, self._long.chunk_tokens)
        for _ in range(_TRIES):
            if size <= self._long.chunk_overlap:
                return None
            parts = [long.put(text) for text in cutter.parts(size, self._long.chunk_overlap)]
            slots = self._encoded(parts)
            excess = self._excess(slots)
            if excess <= 0:
                each = len(self._questions) or 1
                return [
                    [*slots[number::each], *self._ask(row, slots[number].thinks)]
                    for number, row in enumerate(self.asked(long.row))
                ]
            size -= excess
        return None

    def _ask(self, row: Row, thinks: bool) -> list[_Slot]:
        return [_Slot(row, _NO_TOKENS, thinks=thinks, is_ask=True)] if self._long.asks else []
