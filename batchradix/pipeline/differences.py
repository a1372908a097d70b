"""Two tables of results read beside each other, in whatever order and format their rows lie."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np

from batchradix.errors import InputError, OptionError
from batchradix.report.diff import PLACES, TableDiff, flat
from batchradix.sink.results import ResultRow, Results, open_results
from batchradix.types import I64

_MOST_IDS = 5


@dataclass(frozen=True, slots=True)
class _Side:
    """A table that was read once for its ids. ``keys``: int64[n], equal for rows of one id that
    has occurred equally often before; ``columns`` and ``fields`` (of ``value``) that it has."""

    results: Results
    keys: I64
    columns: frozenset[str]
    fields: frozenset[str]

    def flat_names(self, taken: Collection[str]) -> set[str]:
        """The names that its rows have once they are flat."""
        row: ResultRow = dict.fromkeys(self.columns)
        if self.fields:
            row["value"] = dict.fromkeys(self.fields)
        return set(flat(row, taken))


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    columns: Collection[str] = (),
    ignore: Collection[str] = (),
    tolerance: Decimal = Decimal(0),
    most_shown: int = 10,
) -> TableDiff:
    """Compares two tables of results by id, the ``n``-th row of an id with the ``n``-th of the
    other table; by row number where there are no ids.

    ``columns``: what is compared (columns, and fields of the answers), when empty all but
    `PLACES` and ``ignore``. Numbers are equal to the last digit, or within ``tolerance``.

    Both are read twice, and held are some bytes a row, and rows of which the counterpart stands
    further back: nothing where both are in one order. Raises `InputError` where one cannot be read,
    or has no such column.
    """
    one, other = _read_keys(open_results(a)), _read_keys(open_results(b))
    taken = (one.columns & one.fields) | (other.columns & other.fields)
    names_a, names_b = (side.flat_names(taken) for side in (one, other))
    every = names_a | names_b
    fields = {
        f"value.{name}" if f"value.{name}" in every else name for name in one.fields | other.fields
    }
    wanted = _wanted(every, fields & every, columns, ignore)
    table = TableDiff(
        a=os.fspath(a),
        b=os.fspath(b),
        columns=tuple(name for name in wanted if name in names_a and name in names_b),
        columns_only_a=tuple(name for name in wanted if name not in names_b),
        columns_only_b=tuple(name for name in wanted if name not in names_a),
        tolerance=tolerance,
        most_shown=most_shown,
        rows_a=len(one.keys),
        rows_b=len(other.keys),
    )
    in_both_a, in_both_b = np.isin(one.keys, other.keys), np.isin(other.keys, one.keys)
    table.only_a, table.only_b = int((~in_both_a).sum()), int((~in_both_b).sum())
    left = _common(one, in_both_a, table.first_only_a)
    right = _common(other, in_both_b, table.first_only_b)
    for row_a, row_b in _pairs(left, right):
        table.add(_id(row_a), flat(row_a, taken), flat(row_b, taken))
    table.finish()
    return table


def _wanted(
    every: set[str], fields: set[str], columns: Collection[str], ignore: Collection[str]
) -> list[str]:
    """The names that are compared; ``value`` stands for all fields of answers."""

    def meant(names: Collection[str]) -> set[str]:
        found: set[str] = set()
        for name in names:
            here = {name} & every
            if name == "value":
                here |= fields
            if not here:
                raise OptionError(
                    f"neither table has a column or field {name!r}; there are: "
                    f"{', '.join(sorted(every))}"
                )
            found |= here
        return found

    return sorted((meant(columns) if columns else every - {*PLACES}) - meant(ignore))


def _read_keys(results: Results) -> _Side:
    shape = results.shape()
    hashes: list[int] = []
    columns, fields = set(shape or ()), set((shape or {}).get("value") or ())
    for row in results.rows(None if shape is None else ("id", "row")):
        hashes.append(hash(_id(row)))
        if shape is None:
            columns |= row.keys()
            value = row.get("value")
            if isinstance(value, dict):
                fields |= value.keys()
    return _Side(results, _with_occurrence(hashes), frozenset(columns), frozenset(fields))


def _id(row: ResultRow) -> str:
    """What tells a row from others, as text."""
    for name in ("id", "row"):
        if row.get(name) is not None:
            return str(row[name])
    raise InputError(
        f"a row has neither an id nor a row number, so it is no result; its columns are: "
        f"{', '.join(row)}"
    )


def _with_occurrence(hashes: list[int]) -> I64:
    """int64[n]: the hashes, mixed with how often each stood there before."""
    keys: I64 = np.array(hashes, dtype=np.int64)
    order = np.argsort(keys, kind="stable")
    begins = np.flatnonzero(np.diff(keys[order], prepend=0) != 0)
    begins = np.union1d(begins, [0]) if len(keys) else begins
    sizes = np.diff(begins, append=len(keys))
    before = np.empty_like(keys)
    before[order] = np.arange(len(keys)) - np.repeat(begins, sizes)
    mixed: I64 = keys ^ (before * np.int64(0x1E3779B97F4A7C15))
    return mixed


def _common(
    side: _Side, is_common: np.ndarray, first_others: list[str]
) -> Iterator[tuple[int, ResultRow]]:
    """The rows that the other side has too, with their keys; ids of the first others are noted."""
    num_rows = 0
    for num_rows, row in enumerate(side.results.rows(), 1):
        if num_rows > len(side.keys):
            break
        if is_common[num_rows - 1]:
            yield int(side.keys[num_rows - 1]), row
        elif len(first_others) < _MOST_IDS:
            first_others.append(_id(row))
    if num_rows != len(side.keys):
        raise InputError(
            f"{side.results.path} changed while it was read; compare it once its run has ended"
        )


def _pairs(
    left: Iterator[tuple[int, ResultRow]], right: Iterator[tuple[int, ResultRow]]
) -> Iterator[tuple[ResultRow, ResultRow]]:
    """Rows of equal keys, of which both sides have the same ones; those that came before their
    counterparts wait."""
    waiting_a: dict[int, Any] = {}
    waiting_b: dict[int, Any] = {}
    for (key_a, row_a), (key_b, row_b) in zip(left, right, strict=True):
        if key_a == key_b:
            yield row_a, row_b
            continue
        if key_a in waiting_b:
            yield row_a, waiting_b.pop(key_a)
        else:
            waiting_a[key_a] = row_a
        if key_b in waiting_a:
            yield waiting_a.pop(key_b), row_b
        else:
            waiting_b[key_b] = row_b
