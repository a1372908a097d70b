"""Two tables of results, row by row and field by field."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from batchradix.report.compare import difference, same

PLACES = ("id", "row", "cached_tokens")
"""Columns that say where a row stands among others, and nothing of its answer; they are compared
where they are asked for."""


@dataclass(slots=True)
class FieldDiff:
    """In how many rows a field is equal and different; ``largest``: how far two numbers of it are
    apart at most."""

    equal: int = 0
    different: int = 0
    largest: Decimal | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDiff:
    """A row that differs: the fields that do, with both values."""

    id: str
    row_a: Any
    row_b: Any
    fields: dict[str, tuple[Any, Any]]


@dataclass(slots=True, kw_only=True)
class TableDiff:
    """The comparison of two tables ``a`` and ``b`` in ``columns``; rows are told by their ids.

    ``only_a`` and ``only_b`` count rows without a counterpart, ``first_only_a`` and
    ``first_only_b`` are the first of their ids; ``columns_only_a`` and ``columns_only_b`` are not
    compared. ``first`` are the first ``most_shown`` rows that differ.
    """

    a: str
    b: str
    columns: tuple[str, ...]
    tolerance: Decimal = Decimal(0)
    most_shown: int = 10
    rows_a: int = 0
    rows_b: int = 0
    equal: int = 0
    different: int = 0
    only_a: int = 0
    only_b: int = 0
    first_only_a: list[str] = field(default_factory=list)
    first_only_b: list[str] = field(default_factory=list)
    columns_only_a: tuple[str, ...] = ()
    columns_only_b: tuple[str, ...] = ()
    fields: dict[str, FieldDiff] = field(init=False)
    first: list[RowDiff] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.fields = {name: FieldDiff() for name in self.columns}

    def add(self, id: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
        """Compares two rows (of `flat`)."""
        differing = {}
        for name in self.columns:
            a, b = one.get(name), other.get(name)
            if same(a, b, self.tolerance):
                continue
            differing[name] = a, b
            found = self.fields[name]
            found.different += 1
            apart = difference(a, b)
            if apart is not None and (found.largest is None or apart > found.largest):
                found.largest = apart
        if not differing:
            self.equal += 1
            return
        self.different += 1
        if len(self.first) < self.most_shown:
            rows = one.get("row"), other.get("row")
            self.first.append(RowDiff(id=id, row_a=rows[0], row_b=rows[1], fields=differing))

    def finish(self) -> None:
        """Counts, once all rows were added, in how many each field is equal."""
        for found in self.fields.values():
            found.equal = self.equal + self.different - found.different

    @property
    def is_equal(self) -> bool:
        """Whether the tables have the same rows and columns, and what is compared is the same."""
        return not (
            self.different
            or self.only_a
            or self.only_b
            or self.columns_only_a
            or self.columns_only_b
        )

    def to_json(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        return {
            "a": self.a,
            "b": self.b,
            "is_equal": self.is_equal,
            "rows_a": self.rows_a,
            "rows_b": self.rows_b,
            "equal": self.equal,
            "different": self.different,
            "only_a": self.only_a,
            "only_b": self.only_b,
            "first_only_a": self.first_only_a,
            "first_only_b": self.first_only_b,
            "columns_only_a": list(self.columns_only_a),
            "columns_only_b": list(self.columns_only_b),
            "fields": {
                name: {
                    "equal": one.equal,
                    "different": one.different,
                    "largest_difference": one.largest,
                }
                for name, one in self.fields.items()
            },
            "differences": [
                {
                    "id": row.id,
                    "row_a": row.row_a,
                    "row_b": row.row_b,
                    "fields": {name: {"a": a, "b": b} for name, (a, b) in row.fields.items()},
                }
                for row in self.first
            ],
        }

    def lines(self) -> list[tuple[str, str]]:
        """Name and value pairs for a person, without the fields and rows that differ."""
        lines = [
            ("A", f"{self.a}: {self.rows_a:,} rows"),
            ("B", f"{self.b}: {self.rows_b:,} rows"),
            (
                "rows",
                f"{self.equal:,} equal, {self.different:,} different, {self.only_a:,} only in A, "
                f"{self.only_b:,} only in B",
            ),
        ]
        for name, ids, count in (
            ("only in A", self.first_only_a, self.only_a),
            ("only in B", self.first_only_b, self.only_b),
        ):
            if ids:
                lines.append((name, ", ".join(ids) + (" …" if count > len(ids) else "")))
        for side, names in (("A", self.columns_only_a), ("B", self.columns_only_b)):
            if names:
                lines.append(("columns", f"only in {side}, so not compared: {', '.join(names)}"))
        return lines


def flat(row: Mapping[str, Any], taken: Collection[str] = ()) -> dict[str, Any]:
    """A row with a name a field where its ``value`` is an object, as `--unnest` calls them; those
    that have the name of another column, or one that is ``taken``, are called ``value.<name>``."""
    value = row.get("value")
    found = {name: one for name, one in row.items() if name != "value" or value is not None}
    if isinstance(value, dict):
        del found["value"]
        for name, one in value.items():
            found[f"value.{name}" if name in row or name in taken else name] = one
    return found
