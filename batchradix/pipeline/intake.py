"""The first pass over the input: rows → prompts, settings, seeds and content keys, in columns.

It joins `jobs` and `prompts`. Nothing is kept a row but columns in scratch files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchradix.config import DEFAULT_MAX_TOKENS, SamplingOptions
from batchradix.jobs.row_settings import SETTING_COLUMNS, RowSettingsReader
from batchradix.pipeline.budget import Budgets
from batchradix.pipeline.content_keys import ContentKeys, error_tail
from batchradix.pipeline.expansion import Expanded, Expander, Expansion, Rooms
from batchradix.pipeline.row_errors import RowErrors, RowErrorWriter
from batchradix.pipeline.row_formats import AnswerFormats
from batchradix.pipeline.row_kinds import RowKind, RowKinds
from batchradix.plan.store import TokenTableWriter
from batchradix.prompts.questions import Prompts
from batchradix.schema.answer_format import AnswerFormat
from batchradix.scratch import Scratch
from batchradix.types import (
    I32,
    I64,
    U32,
    RequestTable,
    Row,
    RowSettings,
    TokenTable,
)

BATCH_ROWS = 512


class RowSource(Protocol):
    """What rows are read from: a `JobSource`, or rows that are there already."""

    @property
    def columns(self) -> tuple[str, ...] | None: ...

    @property
    def id_type(self) -> pa.DataType: ...

    def batches(
        self, columns: Collection[str] | None, batch_rows: int = ...
    ) -> Iterator[list[Row]]: ...


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

    Where rows of the input are several here (`pipeline.expansion`) ``part_starts``: int64[m + 1]
    says where the parts begin of each row and question. ``asks``: int64[k], the rows that get
    their prompts from the answers to the parts before them. ``cut_tokens``: int32[n].
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
    part_starts: I64 | None = None
    asks: I64 | None = None
    cut_tokens: I32 | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def prompt_length(self, row: int) -> int:
        """Tokens of a row's prompt, without the opening of its answer."""
        num_forced = self.requests.num_forced
        return int(self.lengths[row]) - (0 if num_forced is None else int(num_forced[row]))

    def runnable(self, scratch: Scratch) -> I64 | None:
        """int64[m]: numbers of the rows that have a prompt to run; None when all have."""
        if not len(self.errors) and self.asks is None:
            return None
        mask = scratch.full(len(self), 1, np.bool_)
        mask[self.errors.rows] = False
        if self.asks is not None:
            mask[self.asks] = False
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
        self.part_sizes = scratch.column(np.int64)
        self.asks = scratch.column(np.int64)
        self.cut_tokens = scratch.column(np.int32)


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
        source: RowSource,
        prompts: Prompts,
        formats: AnswerFormats,
        expansion: Expansion,
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
        self._source, self._formats, self._context_length = source, formats, context_length
        # The run's seed is no seed of a row: equal rows without one draw differently.
        options = RowSettingsReader(replace(sampling, seed=None))
        self.expander = Expander(
            prompts,
            expansion,
            Rooms(options, formats, budgets, context_length, expansion.thinking_tokens),
        )
        former_options: RowSettingsReader | None = None
        if former is not None:
            self.former = ContentKeys(scratch, may_retry=former.retries > 0)
            former_options = RowSettingsReader(replace(former.sampling, seed=None))
        self._kinds = RowKinds(
            options,
            former_options,
            formats,
            budgets=budgets,
            prompts=prompts,
            columns=lambda: source.columns,
            context_length=context_length,
        )

    def read(self, rows: list[Row]) -> TokenTable:
        """The prompts of a batch of the input, each with its answer's opening behind it."""
        expanded = self.expander.expand(rows)
        rows, batch = expanded.rows, expanded.batch
        self.num_cleaned += batch.num_cleaned
        errors = {i: row.error for i, row in enumerate(rows) if row.error is not None}
        errors = batch.errors | errors
        lengths = batch.tokens.lengths
        kind_of, kinds = self._kinds.of(rows, lengths, batch.thinks, errors)
        lengths[kind_of == 0] = 0
        tokens = _drop_rows(batch.tokens, lengths)
        tails = {i: error_tail(error) for i, error in errors.items()}
        for i in sorted(errors):
            self.errors.add(rows[i].index, errors[i])
        asked = _ask_tails(tokens, expanded)
        max_tokens = self._add_keys(self.keys, tokens, kinds, kind_of, tails, asked)
        if self.former is not None:
            before = [replace(kind, options=kind.former) for kind in kinds]
            self._add_keys(self.former, tokens, before, kind_of, tails, asked)
        columns = self.columns
        columns.part_sizes.append(np.array(expanded.sizes, dtype=np.int64))
        asks = [rows[i].index for i in expanded.asks if i not in errors]
        columns.asks.append(np.array(asks, dtype=np.int64))
        columns.cut_tokens.append(np.array(expanded.cut_tokens, dtype=np.int32))
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

    def _settings_id(self, kind: RowKind) -> int:
        answers = self._formats.formats[kind.format_id]
        grammar = None if answers is None else answers.grammar
        return self.settings.setdefault(kind.settings(grammar), len(self.settings))

    def _add_keys(
        self,
        keys: ContentKeys,
        tokens: TokenTable,
        kinds: list[RowKind],
        kind_of: I64,
        tails: dict[int, bytes],
        asked: dict[int, bytes],
    ) -> I32:
        """Adds the keys of a batch; int32[n]: the rows' ``max_tokens``, cut to the context.

        ``tails``: of the rows that cannot run; ``asked``: what the prompts will be made of that are
        not there yet.
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
        for i, tail in asked.items():
            all_tails[i] += tail
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


def _ask_tails(tokens: TokenTable, expanded: Expanded) -> dict[int, bytes]:
    """By position, what tells rows apart that get their prompts from the parts before them: the
    prompts of these."""
    found: dict[int, bytes] = {}
    if not expanded.asks:
        return found
    ends = np.cumsum(expanded.sizes)
    for i in expanded.asks:
        group = int(np.searchsorted(ends, i, side="right"))
        begin = int(tokens.offsets[ends[group] - expanded.sizes[group]])
        found[i] = b"ask" + tokens.values[begin : int(tokens.offsets[i])].tobytes()
    return found


def read_rows(
    source: RowSource,
    prompts: Prompts,
    *,
    sampling: SamplingOptions,
    formats: AnswerFormats,
    context_length: int,
    may_retry: bool = False,
    folder: Path | None,
    scratch: Scratch | None = None,
    budgets: Budgets | None = None,
    expansion: Expansion | None = None,
    former: FormerSettings | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Intake:
    """Reads, renders and tokenises every row of ``source`` once, in batches.

    ``formats`` tells what a row's answer must match and what it then begins with; that is put
    behind its prompt, as far as its ``max_tokens`` go. ``budgets`` finds the rows into whose
    budget no answer fits; ``expansion`` says what rows become several. ``may_retry``: greedy rows
    may come to be sampled. ``former``: settings under which the rows' keys are wanted as well.
    ``folder`` takes the token table's files (memory-mapped afterwards); None keeps it in memory.
    The columns are made in ``scratch`` (None: in memory). A row that cannot be run becomes an entry
    of ``errors`` and has no tokens.
    """
    scratch = scratch or Scratch(least_bytes=None)
    reader = _Reader(
        source,
        prompts,
        formats,
        expansion or Expansion(),
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


def _part_starts(reader: _Reader, scratch: Scratch) -> I64 | None:
    sizes = reader.columns.part_sizes.finish()
    if not reader.expander.makes_several:
        return None
    starts = scratch.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=starts[1:])
    return starts


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
        part_starts=_part_starts(reader, scratch),
        asks=asks if len(asks := columns.asks.finish()) else None,
        cut_tokens=cut if len(cut := columns.cut_tokens.finish()) else None,
    )
    scratch.let_go()
    return intake
