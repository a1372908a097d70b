"""What rows ask for: those that ask for the same are of one kind, settled once for all of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from batchradix.config import DEFAULT_MAX_TOKENS, SamplingOptions
from batchradix.errors import RowError, RowErrorCode, SchemaError
from batchradix.jobs.row_settings import SETTING_COLUMNS, RowSettingsReader
from batchradix.pipeline.budget import Budgets
from batchradix.pipeline.row_formats import AnswerFormats
from batchradix.prompts.questions import Prompts
from batchradix.schema.answer_format import AnswerFormat
from batchradix.schema.questions import QUESTION_KEY
from batchradix.types import I64, GrammarSpec, Row, RowSettings, Thinking


@dataclass(frozen=True, slots=True)
class RowKind:
    """The options of rows, the options that they would have under former settings of the run, the
    number of their format, and how they think."""

    options: SamplingOptions
    former: SamplingOptions
    format_id: int
    thinking: Thinking | None = None

    def settings(self, grammar: GrammarSpec | None) -> RowSettings:
        """What the engine is told of the rows, whose answers must match ``grammar``."""
        options = self.options
        return RowSettings(
            temperature=float(options.temperature),
            top_p=float(options.top_p),
            top_k=max(0, options.top_k),
            min_p=float(options.min_p),
            repetition_penalty=float(options.repetition_penalty),
            presence_penalty=float(options.presence_penalty),
            frequency_penalty=float(options.frequency_penalty),
            stop=options.stop,
            grammar=grammar,
            probabilities=options.probabilities,
            choose=options.choose,
            thinking=self.thinking,
        )


class RowKinds:
    """Tells the kinds of rows. ``options`` reads a row's own, ``former`` what they would be under
    former settings; ``columns``: the input's, where they are known once it is read."""

    def __init__(
        self,
        options: RowSettingsReader,
        former: RowSettingsReader | None,
        formats: AnswerFormats,
        *,
        budgets: Budgets | None,
        prompts: Prompts,
        columns: Callable[[], tuple[str, ...] | None],
        context_length: int,
    ) -> None:
        self._options, self._former, self._formats = options, former, formats
        self._budgets, self._prompts, self._columns = budgets, prompts, columns
        self._context_length = context_length

    def of(
        self, rows: list[Row], lengths: I64, thinks: NDArray[np.bool_], errors: dict[int, RowError]
    ) -> tuple[I64, list[RowKind]]:
        """int64[n]: the number of each row's kind, and the kinds. Number 0 is for rows that cannot
        run; why not is put to ``errors``."""
        kinds: dict[RowKind, int] = {}
        kind_of = np.zeros(len(rows), dtype=np.int64)
        fits = lengths <= self._most_alike
        fits[list(errors)] = False
        for alike in (fits & ~thinks, fits & thinks):
            if alike.any():  # one stands for all of them
                first = int(alike.argmax())
                number = self._number(rows[first], 1, bool(thinks[first]), kinds)
                assert isinstance(number, int)
                kind_of[alike] = number
        for i in np.flatnonzero(~fits).tolist():
            if i not in errors:
                found = self._number(rows[i], int(lengths[i]), bool(thinks[i]), kinds)
                if isinstance(found, RowError):
                    errors[i] = found
                else:
                    kind_of[i] = found
        return kind_of, [RowKind(self._options.defaults, self._options.defaults, 0), *kinds]

    def _number(
        self, row: Row, num_tokens: int, thinks: bool, kinds: dict[RowKind, int]
    ) -> int | RowError:
        """The number of the row's kind among ``kinds``, or why it cannot run."""
        options = self._options.read(row)
        if isinstance(options, RowError):
            return options
        number = self._formats.number(row)
        if isinstance(number, RowError):
            return number
        answers = self._formats.formats[number]
        thinking = self._thinking(options, answers) if thinks else None
        refusal = self._refusal(row, options, answers, num_tokens, thinking)
        if refusal is not None:
            return refusal
        former = options
        if self._former is not None:
            before = self._former.read(row)
            assert isinstance(before, SamplingOptions)  # its columns were read already
            former = before
        return kinds.setdefault(RowKind(options, former, number, thinking), len(kinds) + 1)

    def _refusal(
        self,
        row: Row,
        options: SamplingOptions,
        answers: AnswerFormat | None,
        num_tokens: int,
        thinking: Thinking | None,
    ) -> RowError | None:
        """Why a row whose prompt has ``num_tokens`` cannot run, None when it can."""
        if options.stop and answers is not None and not answers.takes_stop:
            return RowError(
                RowErrorCode.BAD_SETTING,
                f"{row.place}, column stop: a stop string could cut an answer that does not match "
                f"the grammar yet; let the grammar end the answer",
            )
        least, budgets = 0 if thinking is None else 1 + len(thinking.closing_ids), self._budgets
        if num_tokens + least + 1 <= self._context_length:
            if budgets is None or answers is None:
                return None
            return budgets.check_row(row, answers.grammar, options.max_tokens, num_tokens + least)
        return RowError(
            RowErrorCode.PROMPT_TOO_LONG,
            f"{row.place}: the prompt has {num_tokens:,} tokens and the model takes "
            f"{self._context_length:,} with the answer; shorten it or use a model with a longer "
            f"context",
        )

    def _thinking(self, options: SamplingOptions, answers: AnswerFormat | None) -> Thinking:
        """How a row thinks before an answer of its budget."""
        thinking = self._prompts.thinking
        assert thinking is not None, "a row thinks though none can"
        least = 1
        if answers is not None and self._budgets is not None:
            with suppress(SchemaError):  # which refuses the row
                least = self._budgets.least(answers.grammar)
        return replace(
            thinking,
            answer_tokens=options.max_tokens or DEFAULT_MAX_TOKENS,
            least_tokens=least,
        )

    @cached_property
    def _most_alike(self) -> int:
        """How long a prompt may be to tell without looking at its row that it can run, and that
        it is of the same kind as others; -1 where rows have options or formats of their own."""
        columns = self._columns()
        columns = columns and (*columns, QUESTION_KEY)
        if columns is None or {*SETTING_COLUMNS, *self._formats.columns}.intersection(columns):
            return -1
        options, answers = self._options.defaults, self._formats.formats[0]
        least = 1
        if answers is not None:
            if options.stop and not answers.takes_stop:
                return -1
            try:
                least = 1 if self._budgets is None else self._budgets.least(answers.grammar)
            except SchemaError:
                return -1
        fits = least <= (options.max_tokens or DEFAULT_MAX_TOKENS)
        if self._prompts.thinking is not None:
            least += 1 + len(self._prompts.thinking.closing_ids)
        return self._context_length - least if fits else -1
