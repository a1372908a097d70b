"""Results of a small typed job, and a folder to commit them to."""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from batchradix.errors import RowError, RowErrorCode
from batchradix.sink.columns import shard_schema
from batchradix.sink.shards import RunFolder, ShardWriter, acquire, check_fingerprint
from batchradix.types import FinishReason, Result, Status

FINGERPRINT = {"model": "m", "sampling": {"temperature": 0.0}}


def _value_type(json_type: pa.DataType) -> pa.DataType:
    return pa.struct(
        [
            ("name", pa.string()),
            ("note", pa.string()),
            ("n", pa.int64()),
            ("kind", pa.dictionary(pa.int32(), pa.string())),
            ("tags", pa.list_(pa.string())),
            ("inner", pa.struct([("a", pa.int32()), ("b", pa.list_(pa.float64()))])),
            ("price", pa.decimal128(38, 4)),
            ("day", pa.date32()),
            ("at", pa.timestamp("us", "UTC")),
            ("time", pa.time64("us")),
            ("any", json_type),
            ("blob", pa.binary()),
            ("score", pa.float64()),
        ]
    )


VALUE_TYPE = _value_type(pa.json_())


def encode_values(values: list[Any]) -> pa.Array:
    # pa.array builds no extension arrays inside structs, a cast does
    return pa.array(values, _value_type(pa.string())).cast(VALUE_TYPE)


def value_of(row: int) -> dict[str, Any]:
    return {
        "name": f'row {row} "é中\u2028\\',
        "note": None if row % 3 else f"note {row}",
        "n": 2**63 - 1 - row,
        "kind": ("red", "green", "blue", "grün")[row * 7 % 4],
        "tags": [f"t{i}" for i in range(row % 4)],
        "inner": None if row % 5 == 4 else {"a": row, "b": [row / 3, None]},
        "price": Decimal(f"1234567890123456789012345678901{row % 10}.0250"),
        "day": dt.date(2024, 2, 29) + dt.timedelta(days=row),
        "at": dt.datetime(2024, 1, 2, 3, 4, 5, row, tzinfo=dt.UTC),
        "time": dt.time(1, 2, 3, row),
        "any": ("7", '"7"', "null", "7.5", '{"k": [1]}', None)[row % 6],
        "blob": bytes([row % 256, 0, 255]),
        "score": row / 7,
    }


def key_of(row: int) -> bytes:
    return hashlib.blake2b(str(row).encode(), digest_size=16).digest()


def result_of(row: int, **changes: Any) -> Result:
    """The result of a row: every eleventh an error, every seventh truncated, else ok."""
    fields: dict[str, Any] = {
        "row": row,
        "id": f"id-{row}",
        "status": Status.OK,
        "value": value_of(row),
        "text": f'{{"row":{row}}}' + "x" * (row % 17),
        "error": None,
        "finish_reason": FinishReason.STOP,
        "prompt_tokens": 10 + row,
        "cached_tokens": row % 10,
        "completion_tokens": 3,
        "content_key": key_of(row),
    }
    if row % 11 == 10:
        fields |= {
            "status": Status.ERROR,
            "value": None,
            "text": None,
            "error": RowError(RowErrorCode.PROMPT_TOO_LONG, f"row {row} is too long, by 3"),
            "finish_reason": FinishReason.ERROR,
        }
    elif row % 7 == 6:
        fields |= {"status": Status.TRUNCATED, "value": None, "finish_reason": FinishReason.LENGTH}
    return Result(**(fields | changes))


@pytest.fixture(scope="session")
def job() -> SimpleNamespace:
    """The small job's parts, for tests and the processes they start."""
    return SimpleNamespace(
        id_type=pa.string(),
        value_type=VALUE_TYPE,
        encode_values=encode_values,
        result_of=result_of,
        value_of=value_of,
        key_of=key_of,
        shard_schema=shard_schema(id_type=pa.string(), value_type=VALUE_TYPE),
        fingerprint=FINGERPRINT,
    )


@pytest.fixture
def open_folder(tmp_path: Path) -> Iterator[Callable[..., RunFolder]]:
    """Takes an output in the test's folder for this job; all are let go at the end."""
    held: list[RunFolder] = []

    def take(name: str = "out.arrow", *, restart: bool = False) -> RunFolder:
        folder = acquire(tmp_path / name)
        held.append(folder)
        check_fingerprint(folder, FINGERPRINT, restart=restart)
        return folder

    yield take
    for folder in held:
        folder.close()


@pytest.fixture
def commit(job: SimpleNamespace) -> Callable[..., ShardWriter]:
    """Commits rows to a folder as one shard a group."""

    def write(folder: RunFolder, *groups: Any) -> ShardWriter:
        writer = ShardWriter(folder, job.shard_schema, job.encode_values)
        for group in groups:
            for row in group:
                writer.append(result_of(row) if isinstance(row, int) else row)
            writer.commit()
        return writer

    return write
