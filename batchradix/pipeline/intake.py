"""The first pass over the input: rows → prompts, settings, seeds and content keys, in columns.

It joins `jobs` and `prompts`. Nothing is kept a row but columns in scratch files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchradix.config import DEFAULT_MAX_TOKENS, SamplingOptions
from batchradix.errors import RowError, RowErrorCode, SchemaError
from batchradix.jobs.base import JobSource
from batchradix.jobs.row_settings import SETTING_COLUMNS, RowSettingsReader
from batchradix.pipeline.budget import Budgets
from batchradix.pipeline.content_keys import ContentKeys, error_tail
from batchradix.pipeline.row_errors import RowErrors, RowErrorWriter
from batchradix.pipeline.row_formats import AnswerFormats
from batchradix.plan.store import TokenTableWriter
from batchradix.prompts.build import PromptBuilder
from batchradix.schema.answer_format import AnswerFormat
from batchradix.scratch import Scratch
from batchradix.types import (
    I32,
    I64,
    U32,
    GrammarSpec,
    RequestTable,
    Row,
    RowSettings,
    Thinking,
    TokenTable,
)

BATCH_ROWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """Every row of the job, by row number.

    ``tokens``: prompts, each with its answer's opening behind it (``requests.num_forced``).
    ``formats``: what answers may look like, number 0 for the run's own, None for any text;
    ``format_id``: int32[n] into it. ``ids``: an Arrow array of the source's id type.
    ``requests.rng_key`` is zero here: it depends on the run's seed. ``seeds``: int64[n],
    meaningful where ``has_seed``: bool[n].
    ``content_keys``: uint8[n, 16], equal for rows whose answers must be equal; the occurrence
    of an unseeded sampled prompt counts, so two such rows differ. ``base_keys`` are the same
    without occurrence, ``occurrence``: int64[n]. ``lengths``: int64[n], tokens of each row.
    """

    tokens: TokenTable
    lengths: I64
    ids: pa.ChunkedArray
    errors: RowErrors
    requests: RequestTable
    formats: tuple[AnswerFormat | None, ...]
    format_id: I32
    seeds: I64
    has_seed: NDArray[np.bool_]
    base_keys: NDArray[np.uint8]
    content_keys: NDArray[np.uint8]
    former_keys: NDArray[np.uint8] | None
    occurrence: I64
    num_cleaned: int

    def __len__(self) -> int:
        return len(self.tokens)

    def prompt_length(self, row: int) -> int:
        """Tokens of a row's prompt, without the opening of its answer."""
        num_forced = self.requests.num_forced
        return int(self.lengths[row]) - (0 if num_forced is None else int(num_forced[row]))

    def runnable(self, scratch: Scratch) -> I64 | None:
        """int64[m]: numbers of the rows that have a prompt to run; None when all have."""
        if not len(self.errors):
            return None
        mask = scratch.full(len(self), 1, np.bool_)
        mask[self.errors.rows] = False
        return scratch.where(mask)


class _Columns:
    """Growing columns."""

    def __init__(self, scratch: Scratch, id_type: pa.DataType) -> None:
        self.settings_id = scratch.column(np.int32)
        self.format_id = scratch.column(np.int32)
        self.max_tokens = scratch.column(np.int32)
        self.num_forced = scratch.column(np.int32)
        self.any_forced = False
        self.seeds = scratch.column(np.int64)
        self.has_seed = scratch.column(np.bool_)
        self.ids = scratch.arrow_column(id_type)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What rows have in common that ask for the same: their options, the options that they would
    have under former settings of the run, the number of their format, and how they think."""

    options: SamplingOptions
    former: SamplingOptions
    format_id: int
    thinking: Thinking | None = None


def _settings(
    options: SamplingOptions, grammar: GrammarSpec | None, thinking: Thinking | None
) -> RowSettings:
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
        thinking=thinking,
    )


def _refusal(
    row: Row,
    options: SamplingOptions,
    answers: AnswerFormat | None,
    num_tokens: int,
    context_length: int,
    budgets: Budgets | None,
    thinking: Thinking | None,
) -> RowError | None:
    """Why a row whose prompt has ``num_tokens`` cannot run, None when it can."""
    if options.stop and answers is not None and not answers.takes_stop:
        return RowError(
            RowErrorCode.BAD_SETTING,
            f"{row.place}, column stop: a stop string could cut an answer that does not match "
            f"the grammar yet; let the grammar end the answer",
        )
    least = 0 if thinking is None else 1 + len(thinking.closing_ids)
    if num_tokens + least + 1 <= context_length:
        if budgets is None or answers is None:
            return None
        return budgets.check_row(row, answers.grammar, options.max_tokens, num_tokens + least)
    return RowError(
        RowErrorCode.PROMPT_TOO_LONG,
        f"{row.place}: the prompt has {num_tokens:,} tokens and the model takes "
        f"{context_length:,} with the answer; shorten it or use a model with a longer context",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FormerSettings:
    """What the rows of the job that an output holds were run with."""

    sampling: SamplingOptions
    retries: int


class _Reader:
    """Takes batches of rows into columns; ``keys`` are theirs, ``former`` what they would be
    under other settings of the run."""

    def __init__(
        self,
        source: JobSource,
        prompts: PromptBuilder,
        formats: AnswerFormats,
        *,
        sampling: SamplingOptions,
        former: FormerSettings | None,
        context_length: int,
        may_retry: bool,
        budgets: Budgets | None,
        scratch: Scratch,
    ) -> None:
        self.columns = _Columns(scratch, source.id_type)
        self.settings: dict[RowSettings, int] = {}
        """Distinct ones, numbered in order of first appearance."""
        self.errors = RowErrorWriter(scratch)
        self.num_cleaned = 0
        self.keys = ContentKeys(scratch, may_retry=may_retry)
        self.former: ContentKeys | None = None
        self._source, self._prompts, self._formats = source, prompts, formats
        self._context_length, self._budgets = context_length, budgets
        # The run's seed is no seed of a row: equal rows without one draw differently.
        self._options = RowSettingsReader(replace(sampling, seed=None))
        self._former_options: RowSettingsReader | None = None
        if former is not None:
            self.former = ContentKeys(scratch, may_retry=former.retries > 0)
            self._former_options = RowSettingsReader(replace(former.sampling, seed=None))

    def read(self, rows: list[Row]) -> TokenTable:
        """The prompts of a batch, each with its answer's opening behind it."""
        batch = self._prompts.encode(rows)
        self.num_cleaned += batch.num_cleaned
        errors = {i: row.error for i, row in enumerate(rows) if row.error is not None}
        errors = batch.errors | errors
        lengths = batch.tokens.lengths
        kind_of, kinds = self._kinds_of(rows, lengths, batch.thinks, errors)
        lengths[kind_of == 0] = 0
        tokens = _drop_rows(batch.tokens, lengths)
        tails = {i: error_tail(error) for i, error in errors.items()}
        for i in sorted(errors):
            self.errors.add(rows[i].index, errors[i])
        max_tokens = self._add_keys(self.keys, tokens, kinds, kind_of, tails)
        if self.former is not None:
            before = [replace(kind, options=kind.former) for kind in kinds]
            self._add_keys(self.former, tokens, before, kind_of, tails)
        columns = self.columns
        format_id = np.array([k.format_id for k in kinds], dtype=np.int32)[kind_of]
        settings_id = [0, *map(self._settings_id, kinds[1:])]
        seeds = [k.options.seed for k in kinds]
        columns.format_id.append(format_id)
        columns.settings_id.append(np.array(settings_id)[kind_of])
        columns.max_tokens.append(max_tokens)
        columns.seeds.append(np.array([seed or 0 for seed in seeds], dtype=np.int64)[kind_of])
        columns.has_seed.append(np.array([seed is not None for seed in seeds])[kind_of])
        columns.ids.append(pa.array([row.id for row in rows], type=self._source.id_type))
        thinks = np.array([kind.thinking is not None for kind in kinds])[kind_of]
        return self._with_openings(tokens, format_id, np.where(thinks, 0, max_tokens))

    def _kinds_of(
        self,
        rows: list[Row],
        lengths: I64,
        thinks: NDArray[np.bool_],
        errors: dict[int, RowError],
    ) -> tuple[I64, list[_Kind]]:
        """int64[n]: the number of each row's kind, and the kinds. Number 0 is for rows that cannot
        run; why not is put to ``errors``."""
        kinds: dict[_Kind, int] = {}
        kind_of = np.zeros(len(rows), dtype=np.int64)
        fits = lengths <= self._most_alike
        fits[list(errors)] = False
        for alike in (fits & ~thinks, fits & thinks):
            if alike.any():  # one stands for all of them
                first = int(alike.argmax())
                number = self._kind_of(rows[first], 1, bool(thinks[first]), kinds)
                assert isinstance(number, int)
                kind_of[alike] = number
        for i in np.flatnonzero(~fits).tolist():
            if i not in errors:
                found = self._kind_of(rows[i], int(lengths[i]), bool(thinks[i]), kinds)
                if isinstance(found, RowError):
                    errors[i] = found
                else:
                    kind_of[i] = found
        return kind_of, [_Kind(self._options.defaults, self._options.defaults, 0), *kinds]

    def _kind_of(
        self, row: Row, num_tokens: int, thinks: bool, kinds: dict[_Kind, int]
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
        refusal = _refusal(
            row, options, answers, num_tokens, self._context_length, self._budgets, thinking
        )
        if refusal is not None:
            return refusal
        former = options
        if self._former_options is not None:
            before = self._former_options.read(row)
            assert isinstance(before, SamplingOptions)  # its columns were read already
            former = before
        return kinds.setdefault(_Kind(options, former, number, thinking), len(kinds) + 1)

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
        columns = self._source.columns
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

    def _settings_id(self, kind: _Kind) -> int:
        answers = self._formats.formats[kind.format_id]
        grammar = None if answers is None else answers.grammar
        settings = _settings(kind.options, grammar, kind.thinking)
        return self.settings.setdefault(settings, len(self.settings))

    def _add_keys(
        self,
        keys: ContentKeys,
        tokens: TokenTable,
        kinds: list[_Kind],
        kind_of: I64,
        tails: dict[int, bytes],
    ) -> I32:
        """Adds the keys of a batch; int32[n]: the rows' ``max_tokens``, cut to the context.

        ``tails``: of the rows that cannot run.
        """
        options = [kind.options for kind in kinds]
        answer = [each.max_tokens or DEFAULT_MAX_TOKENS for each in options]
        thinking = [kind.thinking for kind in kinds]  # of the run's own settings
        thinking = [
            t and replace(t, answer_tokens=n) for t, n in zip(thinking, answer, strict=True)
        ]
        totals = zip(answer, thinking, strict=True)
        most = np.array([n if t is None else t.total_tokens for n, t in totals])
        max_tokens: I64 = np.minimum(most[kind_of], self._context_length - tokens.lengths)
        max_tokens[kind_of == 0] = 1
        identities = [self._formats.identity(kind.format_id) for kind in kinds]
        made: dict[tuple[int, int], bytes] = {}
        pairs = list(zip(kind_of.tolist(), max_tokens.tolist(), strict=True))
        for kind, count in set(pairs):
            made[kind, count] = keys.tail(options[kind], count, identities[kind], thinking[kind])
        draws = np.array([each.temperature > 0 and each.seed is None for each in options])
        draws[0] = False
        all_tails = [made[pair] for pair in pairs]
        for i, tail in tails.items():
            all_tails[i] = tail
        keys.append(tokens, all_tails, draws[kind_of])
        return max_tokens.astype(np.int32)

    def _with_openings(self, tokens: TokenTable, format_id: I32, max_tokens: I32) -> TokenTable:
        openings = self._formats.openings
        lengths = np.array([len(ids) for ids in openings], dtype=np.int32)[format_id]
        most = np.where(tokens.lengths > 0, np.minimum(max_tokens, lengths), 0)
        num_forced: I32 = most.astype(np.int32)
        self.columns.num_forced.append(num_forced)
        self.columns.any_forced |= bool(num_forced.any())
        return _with_opening(tokens, openings, format_id, num_forced)


def read_rows(
    source: JobSource,
    prompts: PromptBuilder,
    *,
    sampling: SamplingOptions,
    formats: AnswerFormats,
    context_length: int,
    may_retry: bool = False,
    folder: Path | None,
    scratch: Scratch | None = None,
    budgets: Budgets | None = None,
    former: FormerSettings | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Intake:
    """Reads, renders and tokenises every row of ``source`` once, in batches.

    ``formats`` tells what a row's answer must match and what it then begins with; that is put
    behind its prompt, as far as its ``max_tokens`` go. ``budgets`` finds the rows into whose
    budget no answer fits. ``may_retry``: greedy rows may come to be sampled. ``former``: settings
    under which the rows' keys are wanted as well. ``folder`` takes the token table's files
    (memory-mapped afterwards); None keeps it in memory. The columns are made in ``scratch`` (None:
    in memory). A row that cannot be run becomes an entry of ``errors`` and has no tokens.
    """
    scratch = scratch or Scratch(least_bytes=None)
    reader = _Reader(
        source,
        prompts,
        formats,
        sampling=sampling,
        former=former,
        context_length=context_length,
        may_retry=may_retry,
        budgets=budgets,
        scratch=scratch,
    )
    wanted = frozenset(prompts.required_columns) | {*SETTING_COLUMNS, *formats.columns}
    writer = TokenTableWriter(folder)
    num_rows = 0
    for rows in source.batches(wanted, BATCH_ROWS):
        writer.append(reader.read(rows))
        num_rows += len(rows)
        if on_progress is not None:
            on_progress(num_rows)
    tokens = writer.finish()
    for array in (tokens.values, tokens.offsets):
        scratch.watch(array)
    scratch.let_go()
    return _assemble(tokens, reader, formats, scratch)


def _drop_rows(tokens: TokenTable, lengths: I64) -> TokenTable:
    """The table without the tokens of rows whose length was set to zero."""
    if np.array_equal(tokens.lengths, lengths):
        return tokens
    keep = np.repeat(lengths > 0, tokens.lengths)
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return TokenTable(tokens.values[keep], offsets)


def _with_opening(
    tokens: TokenTable, openings: Sequence[U32], format_id: I32, num_forced: I32
) -> TokenTable:
    """The table with the first ``num_forced[i]`` tokens of its opening behind each row."""
    if not num_forced.any():
        return tokens
    parts: list[U32] = []
    for row, (count, number) in enumerate(zip(num_forced.tolist(), format_id, strict=True)):
        parts += [tokens[row], openings[number][:count]]
    offsets = np.zeros(len(tokens) + 1, dtype=np.int64)
    np.cumsum(tokens.lengths + num_forced, out=offsets[1:])
    return TokenTable(np.concatenate(parts), offsets)


def _assemble(
    tokens: TokenTable, reader: _Reader, formats: AnswerFormats, scratch: Scratch
) -> Intake:
    columns, keys = reader.columns, reader.keys.finish()
    lengths = scratch.zeros(len(tokens), np.int64)
    for part in scratch.windows(len(tokens)):
        lengths[part] = np.diff(tokens.offsets[part.start : part.stop + 1])
    num_forced = columns.num_forced.finish()
    intake = Intake(
        tokens=tokens,
        lengths=lengths,
        ids=columns.ids.finish(),
        errors=reader.errors.finish(),
        requests=RequestTable(
            settings=tuple(reader.settings) or (RowSettings(),),
            settings_id=columns.settings_id.finish(),
            max_tokens=columns.max_tokens.finish(),
            rng_key=np.broadcast_to(np.uint64(0), len(tokens)),
            num_forced=num_forced if columns.any_forced else None,
        ),
        formats=tuple(formats.formats),
        format_id=columns.format_id.finish(),
        seeds=columns.seeds.finish(),
        has_seed=columns.has_seed.finish(),
        base_keys=keys.base,
        content_keys=keys.keys,
        former_keys=None if reader.former is None else reader.former.finish().keys,
        occurrence=keys.occurrence,
        num_cleaned=reader.num_cleaned,
    )
    scratch.let_go()
    return intake
