"""The first pass over the input: rows → prompts, settings, seeds and content keys, in columns.

It joins `jobs` and `prompts`. Nothing is kept a row but numpy columns, an Arrow column of ids,
and the errors of the rows that have one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchradix.config import DEFAULT_MAX_TOKENS, SamplingOptions
from batchradix.errors import RowError, RowErrorCode
from batchradix.jobs.base import JobSource
from batchradix.jobs.row_settings import SETTING_COLUMNS, RowSettingsReader
from batchradix.pipeline.budget import Budgets, row_place
from batchradix.plan.store import TokenTableWriter
from batchradix.prompts.build import PromptBuilder
from batchradix.types import (
    I32,
    I64,
    U32,
    GrammarSpec,
    RequestTable,
    Row,
    RowSettings,
    TokenTable,
)

BATCH_ROWS = 512
_KEY_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """Every row of the job, by row number.

    ``tokens``: prompts, each with its answer's opening behind it (``requests.num_forced``).
    ``ids``: an Arrow array of the source's id type. ``requests.rng_key`` is zero here: it
    depends on the run's seed. ``seeds``: int64[n], meaningful where ``has_seed``: bool[n].
    ``content_keys``: uint8[n, 16], equal for rows whose answers must be equal; the occurrence
    of an unseeded sampled prompt counts, so two such rows differ. ``base_keys`` are the same
    without occurrence, ``occurrence``: int64[n].
    """

    tokens: TokenTable
    ids: pa.Array
    errors: dict[int, RowError]
    requests: RequestTable
    seeds: I64
    has_seed: NDArray[np.bool_]
    base_keys: NDArray[np.uint8]
    content_keys: NDArray[np.uint8]
    occurrence: I64
    num_cleaned: int

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def prompt_lengths(self) -> I64:
        """int64[n]: tokens of each prompt, without the opening of the answer."""
        num_forced = self.requests.num_forced
        return self.tokens.lengths - (0 if num_forced is None else num_forced)

    @property
    def runnable(self) -> I64:
        """int64[m]: numbers of the rows that have a prompt to run."""
        mask = np.ones(len(self), dtype=bool)
        if self.errors:
            mask[np.fromiter(self.errors, dtype=np.int64, count=len(self.errors))] = False
        return np.flatnonzero(mask).astype(np.int64)


class _Columns:
    """Growing columns, one small array a batch."""

    def __init__(self) -> None:
        self.settings_id: list[I32] = []
        self.max_tokens: list[I32] = []
        self.num_forced: list[I32] = []
        self.seeds: list[I64] = []
        self.has_seed: list[NDArray[np.bool_]] = []
        self.ids: list[pa.Array] = []
        self.base_keys = bytearray()


@dataclass(slots=True)
class _Settings:
    """Distinct `RowSettings`, numbered in order of first appearance."""

    grammar: GrammarSpec | None
    numbers: dict[SamplingOptions, int] = field(default_factory=dict)
    numbered: dict[RowSettings, int] = field(default_factory=dict)

    def number(self, options: SamplingOptions) -> int:
        found = self.numbers.get(options)
        if found is None:
            settings = RowSettings(
                temperature=float(options.temperature),
                top_p=float(options.top_p),
                top_k=max(0, options.top_k),
                min_p=float(options.min_p),
                repetition_penalty=float(options.repetition_penalty),
                presence_penalty=float(options.presence_penalty),
                frequency_penalty=float(options.frequency_penalty),
                stop=options.stop,
                grammar=self.grammar,
                probabilities=options.probabilities,
                choose=options.choose,
            )
            found = self.numbered.setdefault(settings, len(self.numbered))
            self.numbers[options] = found
        return found


def _too_long(row: Row, num_tokens: int, context_length: int) -> RowError:
    return RowError(
        RowErrorCode.PROMPT_TOO_LONG,
        f"{row_place(row)}: the prompt has {num_tokens:,} tokens and the model takes "
        f"{context_length:,} with the answer; shorten it or use a model with a longer context",
    )


def read_rows(
    source: JobSource,
    prompts: PromptBuilder,
    *,
    sampling: SamplingOptions,
    grammar: GrammarSpec | None,
    context_length: int,
    folder: Path | None,
    budgets: Budgets | None = None,
    opening: Sequence[int] = (),
    on_progress: Callable[[int], None] | None = None,
) -> Intake:
    """Reads, renders and tokenises every row of ``source`` once, in batches.

    ``opening`` is what every answer under ``grammar`` begins with; it is put behind each
    prompt, as far as the row's ``max_tokens`` go. ``budgets`` finds the rows into whose budget
    no answer fits. ``folder`` takes the token table's files
    (memory-mapped afterwards); None keeps it in memory. A row that cannot be run becomes an
    entry of ``errors`` and has no tokens.
    """
    columns, settings = _Columns(), _Settings(grammar)
    opening_ids = np.array(opening, dtype=np.uint32)
    # The run's seed is no seed of a row: equal rows without one draw differently.
    reader = RowSettingsReader(replace(sampling, seed=None))
    wanted = frozenset(prompts.required_columns) | frozenset(SETTING_COLUMNS)
    writer = TokenTableWriter(folder)
    errors: dict[int, RowError] = {}
    num_cleaned = 0
    num_rows = 0
    for rows in source.batches(wanted, BATCH_ROWS):
        tokens, cleaned = _read_batch(
            rows, source, prompts, reader, settings, columns, errors, context_length, budgets
        )
        num_forced = np.where(
            tokens.lengths > 0, np.minimum(columns.max_tokens[-1], len(opening_ids)), 0
        ).astype(np.int32)
        columns.num_forced.append(num_forced)
        writer.append(_with_opening(tokens, opening_ids, num_forced))
        num_cleaned += cleaned
        num_rows += len(rows)
        if on_progress is not None:
            on_progress(num_rows)
    return _assemble(writer.finish(), source, columns, settings, errors, num_cleaned)


def _read_batch(
    rows: list[Row],
    source: JobSource,
    prompts: PromptBuilder,
    reader: RowSettingsReader,
    settings: _Settings,
    columns: _Columns,
    errors: dict[int, RowError],
    context_length: int,
    budgets: Budgets | None,
) -> tuple[TokenTable, int]:
    """One batch into the columns; its prompts, and how many texts had to be cleaned."""
    batch = prompts.encode(rows)
    n = len(rows)
    settings_id = np.zeros(n, dtype=np.int32)
    max_tokens = np.ones(n, dtype=np.int32)
    seeds = np.zeros(n, dtype=np.int64)
    has_seed = np.zeros(n, dtype=bool)
    lengths = batch.tokens.lengths.copy()
    for i, row in enumerate(rows):
        error = row.error or batch.errors.get(i)
        options = reader.read(row) if error is None else None
        if isinstance(options, RowError):
            error = options
        elif error is None and lengths[i] + 1 > context_length:
            error = _too_long(row, int(lengths[i]), context_length)
        elif budgets is not None and options is not None:
            error = budgets.check_row(row, settings.grammar, options.max_tokens, int(lengths[i]))
        if error is not None or options is None or isinstance(options, RowError):
            error = error or RowError(RowErrorCode.ENGINE_FAILED, f"{row_place(row)} was not read")
            errors[row.index] = error
            lengths[i] = 0
            digest = hashlib.blake2b(digest_size=_KEY_BYTES)
            digest.update(f"error {error.code} {error.message}".encode(errors="replace"))
            columns.base_keys += digest.digest()
            continue
        settings_id[i] = settings.number(options)
        room = context_length - int(lengths[i])
        max_tokens[i] = min(options.max_tokens or DEFAULT_MAX_TOKENS, room)
        if options.seed is not None:
            seeds[i], has_seed[i] = options.seed, True
        columns.base_keys += _base_key(batch.tokens[i], options, int(max_tokens[i]))
    columns.settings_id.append(settings_id)
    columns.max_tokens.append(max_tokens)
    columns.seeds.append(seeds)
    columns.has_seed.append(has_seed)
    columns.ids.append(pa.array([row.id for row in rows], type=source.id_type))
    return _drop_rows(batch.tokens, lengths), batch.num_cleaned


def _base_key(token_ids: NDArray[np.uint32], options: SamplingOptions, max_tokens: int) -> bytes:
    """16 bytes over what determines an answer beside the job's fingerprint."""
    digest = hashlib.blake2b(token_ids.tobytes(), digest_size=_KEY_BYTES)
    sampled = options.temperature > 0
    digest.update(
        repr(
            (
                max_tokens,
                options.temperature,
                (options.top_p, options.top_k, options.min_p, options.seed) if sampled else None,
                options.repetition_penalty,
                options.presence_penalty,
                options.frequency_penalty,
                options.stop,
            )
        ).encode()
    )
    return digest.digest()


def _drop_rows(tokens: TokenTable, lengths: I64) -> TokenTable:
    """The table without the tokens of rows whose length was set to zero."""
    if np.array_equal(tokens.lengths, lengths):
        return tokens
    keep = np.repeat(lengths > 0, tokens.lengths)
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return TokenTable(tokens.values[keep], offsets)


def _with_opening(tokens: TokenTable, opening: U32, num_forced: I32) -> TokenTable:
    """The table with the first ``num_forced[i]`` tokens of the opening behind each row."""
    if not num_forced.any():
        return tokens
    parts: list[U32] = []
    for row, count in enumerate(num_forced.tolist()):
        parts += [tokens[row], opening[:count]]
    offsets = np.zeros(len(tokens) + 1, dtype=np.int64)
    np.cumsum(tokens.lengths + num_forced, out=offsets[1:])
    return TokenTable(np.concatenate(parts), offsets)


def _occurrences(keys: NDArray[np.uint8]) -> I64:
    """int64[n]: how many earlier rows have the same key."""
    n = len(keys)
    occurrence = np.zeros(n, dtype=np.int64)
    if n == 0:
        return occurrence
    halves = np.ascontiguousarray(keys).view(np.uint64).reshape(n, 2)
    order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable
    same = np.zeros(n, dtype=bool)
    same[1:] = (halves[order[1:]] == halves[order[:-1]]).all(axis=1)
    position = np.arange(n, dtype=np.int64)
    group_start = np.maximum.accumulate(np.where(same, 0, position))
    occurrence[order] = position - group_start
    return occurrence


def _assemble(
    tokens: TokenTable,
    source: JobSource,
    columns: _Columns,
    settings: _Settings,
    errors: dict[int, RowError],
    num_cleaned: int,
) -> Intake:
    settings_id = np.concatenate([np.zeros(0, dtype=np.int32), *columns.settings_id])
    max_tokens = np.concatenate([np.zeros(0, dtype=np.int32), *columns.max_tokens])
    num_forced = np.concatenate([np.zeros(0, dtype=np.int32), *columns.num_forced])
    seeds = np.concatenate([np.zeros(0, dtype=np.int64), *columns.seeds])
    has_seed = np.concatenate([np.zeros(0, dtype=bool), *columns.has_seed])
    base_keys = np.frombuffer(bytes(columns.base_keys), dtype=np.uint8).reshape(-1, _KEY_BYTES)
    distinct = tuple(settings.numbered)
    greedy = np.array([s.temperature == 0 for s in distinct] or [True])
    draws = ~greedy[settings_id] & ~has_seed
    if errors:
        draws[np.fromiter(errors, dtype=np.int64, count=len(errors))] = False
    occurrence = np.where(draws, _occurrences(base_keys), 0)
    content_keys = base_keys.copy()
    # Fold the occurrence into the key's last eight bytes; zero leaves it as it is.
    content_keys[:, 8:] ^= (
        (occurrence.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.uint8).reshape(-1, 8)
    )
    if not distinct:
        distinct = (RowSettings(grammar=settings.grammar),)
    return Intake(
        tokens=tokens,
        ids=pa.chunked_array(columns.ids, type=source.id_type).combine_chunks(),
        errors=errors,
        requests=RequestTable(
            settings=distinct,
            settings_id=settings_id,
            max_tokens=max_tokens,
            rng_key=np.zeros(len(tokens), dtype=np.uint64),
            num_forced=num_forced,
        ),
        seeds=seeds,
        has_seed=has_seed,
        base_keys=base_keys,
        content_keys=content_keys,
        occurrence=occurrence,
        num_cleaned=num_cleaned,
    )
