"""Several results to one row of the finished table, brought together as the file is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchradix.types import I64, Status

CUT_TOKENS = "cut_tokens"
RANK = {Status.OK.value: 0, Status.TRUNCATED.value: 1, Status.ERROR.value: 2}
PART_COLUMNS = (
    "status",
    "value",
    "text",
    "reasoning",
    "error",
    "finish_reason",
    "completion_tokens",
    "reasoning_tokens",
)
"""What a list of several results says of each, as far as they have it."""
TOTALS = ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens")
"""What is added up of several results."""


class Fold(Protocol):
    """Makes one row of several. ``starts``: int64[m + 1], where the rows of each begin.
    ``identity``: what else its rows are a function of."""

    @property
    def identity(self) -> str: ...

    @property
    def starts(self) -> I64: ...

    def field(self, columns: pa.Schema) -> pa.Field:
        """The column that it adds beside the result columns ``columns``."""
        ...

    def fold(self, batch: pa.RecordBatch, offsets: I64, first: int) -> pa.RecordBatch:
        """``offsets``: int64[k + 1], where the rows of ``batch`` that belong together begin;
        ``first``: the number of the first of the k rows that come of it."""
        ...


def folded(
    batches: Iterator[pa.RecordBatch], fold: Fold, starts: I64 | None = None
) -> Iterator[pa.RecordBatch]:
    """Batches of shard columns in order to batches with a row for each of a fold's.

    ``starts``: where the rows of each begin if the batches do not hold all of them, as
    `chosen_groups` gives it.
    """
    starts = fold.starts if starts is None else starts
    group, row = 0, 0  # the first row that is not out yet, and where it begins
    rest: pa.RecordBatch | None = None
    for batch in batches:
        whole = batch if rest is None else pa.concat_batches([rest, batch])
        end = int(np.searchsorted(starts, row + whole.num_rows, side="right")) - 1
        count = int(starts[end]) - row
        if end > group:
            yield fold.fold(whole.slice(0, count), starts[group : end + 1] - row, group)
        rest = whole.slice(count)
        group, row = end, row + count
    assert rest is None or not rest.num_rows, "a row lacks results"


def all_starts(folds: Sequence[Fold]) -> I64 | None:
    """int64[m + 1]: where the results of each row of the table begin; None for one each."""
    starts: I64 | None = None
    for fold in folds:
        starts = fold.starts if starts is None else starts[fold.starts]
    return starts


def chosen_groups(starts: I64, rows: I64) -> tuple[I64, I64]:
    """Of rows that belong together (``starts`` as in `Fold`) those of the ascending numbers
    ``rows`` (int64[n], all of a group or none): int64[k], the numbers of their groups, and
    int64[k + 1], where these begin among the n rows."""
    groups = np.flatnonzero(np.isin(starts[:-1], rows, assume_unique=True))
    chosen = np.zeros(len(groups) + 1, dtype=np.int64)
    np.cumsum(np.diff(starts)[groups], out=chosen[1:])
    return groups, chosen


class Shown(NamedTuple):
    """``batch``: of each k rows that belong together the first of the worst. ``place``: int64[k],
    where it stands. ``ranks``: int64[n], how bad each of the n rows is."""

    batch: pa.RecordBatch
    place: I64
    ranks: I64


def shown(batch: pa.RecordBatch, offsets: I64) -> Shown:
    """Rows that belong together (``offsets`` as in `Fold.fold`) are as bad as their worst."""
    firsts = offsets[:-1]
    ranks = np.array([RANK[status] for status in batch.column("status").to_pylist()], np.int64)
    worst = np.maximum.reduceat(ranks, firsts)
    is_worst = ranks == np.repeat(worst, np.diff(offsets))
    place = np.minimum.reduceat(np.where(is_worst, np.arange(len(ranks)), len(ranks)), firsts)
    return Shown(batch.take(pa.array(place)), place, ranks)


def put_column(batch: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    """The batch with another array for a column that it has."""
    index = batch.schema.get_field_index(name)
    field = batch.schema.field(index)
    return batch.set_column(
        index, field, column if column.type == field.type else column.cast(field.type)
    )


def put_totals(
    into: pa.RecordBatch, batch: pa.RecordBatch, offsets: I64, names: Sequence[str]
) -> pa.RecordBatch:
    """``into`` with the sums over rows that belong together of these columns of ``batch``, where it
    has them."""
    for name in set(names).intersection(batch.schema.names):
        totals = np.add.reduceat(batch.column(name).to_numpy(), offsets[:-1])
        into = put_column(into, name, pa.array(totals.astype(np.int32)))
    return into


def null_where(values: pa.Array, mask: NDArray[np.bool_] | pa.Array) -> pa.Array:
    """``values``, of any type, with null where ``mask`` (bool[n]) is true."""
    mask = pa.array(mask) if isinstance(mask, np.ndarray) else mask
    if not pc.any(mask).as_py():
        return values
    places = pa.array(np.arange(len(values), dtype=np.int64))
    return values.take(pc.if_else(mask, pa.scalar(None, pa.int64()), places))
