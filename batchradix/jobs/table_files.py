"""Files of typed columns, one after the other, as one table: their schemas joined."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from batchradix.errors import InputError
from batchradix.jobs.arrow_values import plain_type
from batchradix.jobs.files import InputFile, Partition
from batchradix.jobs.tables import TableSource


class TableFile(ABC):
    """One file, looked at but not read: ``schema`` and ``num_rows`` are those it says it has."""

    file: InputFile
    schema: pa.Schema
    num_rows: int

    @abstractmethod
    def batches(self, columns: list[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
        """All rows with these of its columns, at most ``batch_rows`` at a time (fewer where rows
        are big). Raises `InputError` when the file is damaged or has changed."""


class TableFilesSource(TableSource):
    """Files one after the other. What their folders say of them (`InputFile.partition`) is in
    columns behind those of the files, which go first."""

    def __init__(
        self,
        name: str,
        files: Sequence[TableFile],
        *,
        id_column: str | None = None,
        limit: int | None = None,
    ) -> None:
        self._files = tuple(files)
        self._constants = [_constants(file) for file in files]
        schemas = []
        for file, constants in zip(files, self._constants, strict=True):
            fields = [pa.field(name, value.type) for name, value in constants.items()]
            schemas.append((file.file.name, pa.schema([*file.schema, *fields])))
        schema = schemas[0][1] if len(schemas) == 1 else unify_schemas(schemas)
        num_rows = sum(file.num_rows for file in files)
        super().__init__(name, schema, num_rows, id_column=id_column, limit=limit)

    def _record_batches(self, columns: list[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
        for file, constants in zip(self._files, self._constants, strict=True):
            there = set(file.schema.names)
            chosen = {c: constants[c] for c in columns if c in constants}
            for batch in file.batches([c for c in columns if c in there], batch_rows):
                yield _with_constants(batch, chosen) if chosen else batch


def _constants(file: TableFile) -> dict[str, pa.Scalar]:
    partition: Partition = file.file.partition
    there = set(file.schema.names)
    return {
        name: pa.scalar(value, pa.int64() if isinstance(value, int) else pa.string())
        for name, value in partition.items()
        if name not in there
    }


def _with_constants(batch: pa.RecordBatch, constants: dict[str, pa.Scalar]) -> pa.RecordBatch:
    arrays = [pa.repeat(value, batch.num_rows) for value in constants.values()]
    return pa.RecordBatch.from_arrays(
        [*batch.columns, *arrays], names=[*batch.schema.names, *constants]
    )


def unify_schemas(schemas: list[tuple[str, pa.Schema]]) -> pa.Schema:
    """One plain schema for several files, given as (file name, schema).

    Columns stand in the order in which they first appear. Types may differ where the wider one
    holds every value of the other (integers, text, null, structs with fields of their own).
    Raises `InputError` otherwise.
    """
    found: dict[str, tuple[pa.DataType, str]] = {}
    for file, schema in schemas:
        for field in schema:
            type_ = plain_type(field.type)
            known, first_file = found.setdefault(field.name, (type_, file))
            if known != type_:
                wider = _wider(known, type_)
                if wider is None:
                    raise InputError(
                        f"the column {field.name!r} is {known} in {first_file} and {type_} in "
                        f"{file}; make the types equal or give the files one by one"
                    )
                found[field.name] = (wider, first_file)
    return pa.schema([(name, type_) for name, (type_, _) in found.items()])


def _wider(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    try:
        pair = [pa.schema([("c", a)]), pa.schema([("c", b)])]
        wider = pa.unify_schemas(pair, promote_options="permissive").field("c").type
        for type_ in (a, b):
            pc.cast(pa.array([], type_), wider)
    except pa.ArrowException:
        return None
    return wider if _holds_all(a, wider) and _holds_all(b, wider) else None


def _holds_all(type_: pa.DataType, wider: pa.DataType) -> bool:
    """Whether a type that Arrow's cast made of another one has all of its values, and shows them
    alike. (What a time in a finer unit cannot hold is found when it is cast.)"""
    types = pa.types
    if types.is_integer(type_):
        # int64 with float64 would round large integers, ids among them.
        return bool(types.is_integer(wider)) and (type_ != pa.uint64() or wider == type_)
    if _is_text(type_) and not _is_text(wider):
        return False  # bytes show otherwise in a prompt
    return type_.num_fields == 0 or all(
        _holds_all(_field(type_, i).type, _field(wider, _field(type_, i).name, i).type)
        for i in range(type_.num_fields)
    )


def _is_text(type_: pa.DataType) -> bool:
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))


def _field(type_: pa.DataType, which: str | int, otherwise: int = 0) -> pa.Field:
    """A struct's field of this name; of other nested types the one at a place."""
    if isinstance(which, str) and not pa.types.is_struct(type_):
        which = otherwise
    return type_.field(which)
