"""What every job source offers: rows for prompts, ids for results, columns passed through."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, Self

from batchradix.errors import InputError
from batchradix.types import I64, Row

if TYPE_CHECKING:
    import pyarrow as pa

RESULT_COLUMNS = (
    "id",
    "row",
    "status",
    "value",
    "text",
    "error",
    "finish_reason",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
)
"""Columns every result has; a column passed through may not take one of these names."""

NO_ID_COLUMN = ""
"""As the name of the id column: ids are row numbers, whatever columns there are."""

DEFAULT_BATCH_ROWS = 1024
BATCH_BYTES = 32 << 20
"""A batch of rows ends early once it holds about this much."""

KeepColumns = Sequence[str] | Literal["all"]


class Closable(Protocol):
    def close(self) -> None: ...


class JobSource(ABC):
    """An input that can be read any number of times, always in the same order.

    ``name`` is what messages and metadata call the input. ``typed`` is True where columns have
    Arrow types of their own (Parquet, Arrow, frames) and False where they are inferred (JSONL,
    CSV, lists). ``paths`` are the files it reads, none for a pipe, an address or what is in
    memory; ``folder`` is the one that was named, if one was. ``notices`` are sentences that a
    person should read before the rows are run.

    The id of a row is the column ``id_column``, or a column called ``id``, or else the row
    number as text (with `NO_ID_COLUMN` always that). Ids are never required to be unique. Usable
    as a context manager.
    """

    typed: bool
    is_requests = False
    """Whether the input is an OpenAI batch file."""
    requested_model: str | None = None
    """The model that requests name, known once `scan` has been called."""

    def __init__(self, name: str, *, id_column: str | None, limit: int | None) -> None:
        self.name = name
        self.paths: tuple[Path, ...] = ()
        self.folder: Path | None = None
        self.notices: list[str] = []
        self._wanted_id_column = id_column
        self._limit = limit
        self._held: list[Closable] = []

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...] | None:
        """Top-level column names in input order; None for untyped input before `scan`."""

    @property
    @abstractmethod
    def num_rows(self) -> int | None:
        """Rows within the limit, unreadable ones included; None before `scan` if untyped."""

    @property
    @abstractmethod
    def id_column(self) -> str | None:
        """The column ids come from, None for row numbers; may `scan` untyped input."""

    @property
    @abstractmethod
    def id_type(self) -> pa.DataType:
        """The Arrow type of `Row.id`: the column's own where typed, else string."""

    @property
    @abstractmethod
    def num_duplicate_ids(self) -> int | None:
        """Rows whose id an earlier row had already; None where there are too many to count."""

    @abstractmethod
    def scan(self) -> None:
        """Reads untyped input once to learn rows, columns and types; idempotent, else a no-op.

        Raises `InputError` when the id column is in no row or the input cannot be read.
        """

    @abstractmethod
    def batches(
        self, columns: Collection[str] | None, batch_rows: int = DEFAULT_BATCH_ROWS
    ) -> Iterator[list[Row]]:
        """Rows from the beginning, in input order, at most ``batch_rows`` at a time.

        ``columns`` names the top-level columns wanted in ``Row.values`` (None: all); names the
        input has not are ignored. The id is always read and goes to ``Row.id``. Unscanned
        untyped input is scanned first. Raises `InputError` when the input is damaged or has
        changed since it was opened; a bad row is a `Row` with ``error`` set.
        """

    @property
    def starts(self) -> I64 | None:
        """int64[num_rows + 1]: where the rows of each input row begin among those of `batches`,
        where some are several (requests for ``n`` answers); None where each is one."""
        return None

    def input_batches(
        self, columns: Collection[str] | None, batch_rows: int = DEFAULT_BATCH_ROWS
    ) -> Iterator[list[Row]]:
        """The rows as they stand in the input, one each, with the columns that they have there;
        else as `batches`, of which these are the very rows unless `is_requests`."""
        return self.batches(columns, batch_rows)

    @abstractmethod
    def _keep_field(self, column: str) -> pa.Field:
        """The Arrow field under which a column is passed through; `InputError` if it cannot."""

    @abstractmethod
    def _keep_batches(
        self, columns: list[str], schema: pa.Schema, batch_rows: int
    ) -> Iterator[pa.RecordBatch]:
        """Record batches of ``schema``, one field a column, rows in input order."""

    def keep_schema(self, columns: KeepColumns) -> pa.Schema:
        """The schema of `keep_batches`; scans untyped input.

        A column named ``id`` that is the id column is left out: every result has it already.
        A column that has another result column's name is refused when it is asked for by name
        and becomes ``input_<name>`` under ``"all"``. Raises `InputError` for a column that is
        not there, or whose type no file format can hold.
        """
        import pyarrow as pa

        names = self._keep_names(columns)
        return pa.schema([self._keep_field(c).with_name(out) for c, out in names.items()])

    def keep_batches(
        self, columns: KeepColumns, batch_rows: int = DEFAULT_BATCH_ROWS
    ) -> Iterator[pa.RecordBatch]:
        """The columns passed through, exactly `num_rows` rows, null where a row is broken."""
        schema = self.keep_schema(columns)
        return self._keep_batches(list(self._keep_names(columns)), schema, batch_rows)

    def own_schema(self) -> pa.Schema:
        """The schema of `own_batches`; raises as `keep_schema` does."""
        import pyarrow as pa

        return pa.schema([self._keep_field(column) for column in self._known_columns()])

    def own_batches(self, batch_rows: int = DEFAULT_BATCH_ROWS) -> Iterator[pa.RecordBatch]:
        """All columns under their own names, ids too; else as `keep_batches`."""
        return self._keep_batches(list(self._known_columns()), self.own_schema(), batch_rows)

    def column_batches(
        self, column: str, batch_rows: int = DEFAULT_BATCH_ROWS
    ) -> Iterator[pa.RecordBatch]:
        """One column under its own name, whatever that is; else as `keep_batches`. Raises
        `InputError` where it is not there."""
        import pyarrow as pa

        if column not in self._known_columns():
            raise self._missing_column(column, "compare with")
        return self._keep_batches([column], pa.schema([self._keep_field(column)]), batch_rows)

    def kind_batches(self) -> Iterator[pa.RecordBatch]:
        """One column ``request``, a row each input row: what kind of response it wants. Of OpenAI
        batch files alone."""
        raise NotImplementedError

    def hold(self, resource: Closable) -> None:
        """Has `close` close something else as well, such as a temporary copy of the input."""
        self._held.append(resource)

    def close(self) -> None:
        """Lets go of temporary copies; idempotent. Nothing can be read afterwards."""
        while self._held:
            self._held.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _known_columns(self) -> tuple[str, ...]:
        self.scan()
        columns = self.columns
        assert columns is not None
        return columns

    def _missing_column(self, column: str, purpose: str) -> InputError:
        there = ", ".join(self._known_columns()) or "none"
        return InputError(
            f"{self.name} has no column {column!r} to {purpose}; its columns are: {there}"
        )

    def _keep_names(self, columns: KeepColumns) -> dict[str, str]:
        """Input column → name in the result, without the id column where that is ``id``."""
        known = dict.fromkeys(self._known_columns())
        everything = columns == "all"
        names: dict[str, str] = {}
        for column in known if everything else dict.fromkeys(columns):
            if column not in known:
                raise self._missing_column(column, "keep")
            if column not in RESULT_COLUMNS:
                names[column] = column
            elif column == "id" and self.id_column == "id":
                continue
            elif everything:
                name = f"input_{column}"
                while name in known:
                    name = f"input_{name}"
                names[column] = name
            else:
                raise InputError(
                    f"the column {column!r} of {self.name} cannot be kept under that name, "
                    f"because every result has a column {column!r} of its own; rename it in the "
                    f"input, or keep all columns, which calls it 'input_{column}'"
                )
        return names
