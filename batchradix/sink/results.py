"""Results as they lie in a file of any output format, or in the shards of a run that goes on.

Whatever the format, a row is a dictionary of what JSON knows, with floats as `decimal.Decimal`, so
that no digit is lost. Cells of CSV, which has no types, are `Cell` texts.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal
from itertools import islice
from json.encoder import encode_basestring as quote
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from batchradix.errors import InputError, SinkError
from batchradix.sink.columns import CONTENT_KEY
from batchradix.sink.folder import WORK_SUFFIX, came_to_its_end
from batchradix.sink.json_text import json_texts, object_texts
from batchradix.sink.shards import shard_batches
from batchradix.types import Cell

ResultRow = dict[str, Any]

FORMATS = (".arrow", ".parquet", ".jsonl", ".csv")
_NESTED_IN_CSV = ("value", "error", "samples", "probabilities")
_BATCH_ROWS = 256
_CSV_FIELD_BYTES = 2**31 - 1
_decode = json.JSONDecoder(parse_float=Decimal, parse_constant=lambda _: None).decode


class Results:
    """The rows of a result file, or those that a run has committed so far.

    ``path`` is the file or the work folder that is read, ``is_finished`` says which.
    """

    def __init__(self, path: Path, is_finished: bool) -> None:
        self.path = path
        self.is_finished = is_finished

    @property
    def work(self) -> Path:
        """The work folder, which need not be there."""
        if not self.is_finished:
            return self.path
        path = Path(os.path.realpath(self.path))
        return path.with_name(path.name + WORK_SUFFIX)

    def shape(self) -> ResultRow | None:
        """A row of nulls that has all columns, and where values are objects all their fields; None
        where only reading all rows tells. Raises as `rows` does."""
        with self._readable():
            schema = self._schema()
        if schema is None:
            return None
        row: ResultRow = dict.fromkeys(field.name for field in schema if field != CONTENT_KEY)
        if "value" in row:
            type_ = schema.field("value").type
            if pa.types.is_struct(type_):
                row["value"] = {type_.field(i).name: None for i in range(type_.num_fields)}
        return row

    def _schema(self) -> pa.Schema | None:
        if not self.is_finished:
            first = next(_committed_batches(self.path), None)
            return None if first is None else first.schema
        match self.path.suffix.lower():
            case ".arrow":
                return pa.ipc.open_file(pa.memory_map(os.fspath(self.path))).schema
            case ".parquet":
                import pyarrow.parquet as pq

                return pq.read_schema(self.path)
        return None

    def rows(self, columns: Collection[str] | None = None) -> Iterator[ResultRow]:
        """The rows in the order of the input; of Arrow and Parquet only ``columns`` are read (None:
        all). Raises `InputError` where something cannot be read."""
        with self._readable():
            yield from self._rows(columns)

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(
                f"{self.path} cannot be read: {error.strerror or error}; is it a result file?"
            ) from None
        except (pa.ArrowException, SinkError, UnicodeDecodeError, csv.Error) as error:
            raise InputError(
                f"{self.path} is no result file, or is damaged: {error}; name another, or run the "
                f"job again"
            ) from None

    def _rows(self, columns: Collection[str] | None) -> Iterator[ResultRow]:
        if not self.is_finished:
            yield from _rows_of(_committed_batches(self.path), columns)
            return
        match self.path.suffix.lower():
            case ".arrow":
                file = pa.ipc.open_file(pa.memory_map(os.fspath(self.path)))
                batches = (file.get_batch(i) for i in range(file.num_record_batches))
                yield from _rows_of(batches, columns)
            case ".parquet":
                import pyarrow.parquet as pq

                parquet = pq.ParquetFile(self.path)
                names = parquet.schema_arrow.names
                wanted = None if columns is None else [name for name in names if name in columns]
                yield from _rows_of(parquet.iter_batches(_BATCH_ROWS, columns=wanted), columns)
            case ".csv":
                yield from _csv_rows(self.path)
            case _:
                yield from _json_rows(self.path)


def open_results(path: str | os.PathLike[str]) -> Results:
    """The results at ``path``: an output, finished or not, or a work folder.

    Of an output whose run has not finished it the committed rows are read. Raises `InputError`.
    """
    shown = Path(path)
    real = Path(os.path.realpath(shown))
    if real.is_dir():
        if (real / "shards").is_dir():
            return Results(real, False)
        raise InputError(f"{shown} is a folder and no work folder of a run; name a result file")
    work = real.with_name(real.name + WORK_SUFFIX)
    has_shards = (work / "shards").is_dir()
    try:
        goes_on = has_shards and not came_to_its_end(work)
    except SinkError:
        goes_on = False
    if goes_on or (has_shards and not real.exists()):
        return Results(work, False)
    if not real.exists():
        raise InputError(f"there is no result file {shown}, and no run that writes it")
    if shown.suffix.lower() not in FORMATS:
        raise InputError(
            f"{shown} is no result file: its name must end in one of {', '.join(FORMATS)}"
        )
    return Results(shown, True)


def _rows_of(
    batches: Iterator[pa.RecordBatch], columns: Collection[str] | None
) -> Iterator[ResultRow]:
    for whole in batches:
        for begin in range(0, whole.num_rows, _BATCH_ROWS):
            batch = whole.slice(begin, _BATCH_ROWS)
            fields = [f for f in batch.schema if columns is None or f.name in columns]
            fields = [field for field in fields if field != CONTENT_KEY]
            texts = [json_texts(batch.column(field.name), field) for field in fields]
            names = [quote(field.name) for field in fields]
            for line in object_texts(names, texts, batch.num_rows):
                yield _decode(line)


def _committed_batches(work: Path) -> Iterator[pa.RecordBatch]:
    """The committed results, one a row of the input, by its number. Nothing is cleaned up: a run
    may hold the folder. Memory: a few numbers a row, and a batch."""
    paths: list[Path] = []
    latest: dict[int, tuple[bytes, int, int]] = {}
    for path, batch in shard_batches(work, ("row", CONTENT_KEY.name)):
        keys = batch.column(CONTENT_KEY.name).to_pylist()
        for place, (row, key) in enumerate(zip(batch.column("row").to_pylist(), keys, strict=True)):
            found = latest.get(row)
            if found is None or found[0] != key:  # of equal records the first counts
                latest[row] = key, len(paths), place
        paths.append(path)
    order = sorted(latest)
    loaded: dict[int, pa.RecordBatch] = {}
    for begin in range(0, len(order), _BATCH_ROWS):
        for row in order[begin : begin + _BATCH_ROWS]:
            _, number, place = latest[row]
            if number not in loaded:
                if len(loaded) >= 64:  # rows were answered in another order than the input's
                    loaded.pop(next(iter(loaded)))
                loaded[number] = next(b for _, b in shard_batches(work, None, [paths[number]]))
            yield loaded[number].slice(place, 1)


def _json_rows(path: Path) -> Iterator[ResultRow]:
    first = next(islice(_lines(path), 1), None)
    beside = path.with_name(f"{path.stem}.errors{path.suffix}")
    if (first is None or _is_response(first)) and beside.is_file():
        for name in (path, beside):
            yield from map(_from_response, _lines(name))
        return
    make = _from_response if first is not None and _is_response(first) else dict
    yield from map(make, _lines(path))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                found = _decode(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{path}, line {number} is no JSON: {error}") from None
            if not isinstance(found, dict):
                raise InputError(f"{path}, line {number} is no JSON object but {line.strip()[:40]}")
            yield found


def _is_response(row: Mapping[str, Any]) -> bool:
    return "custom_id" in row and "response" in row


def _from_response(line: Mapping[str, Any]) -> ResultRow:
    """A line of the output or error file of OpenAI's Batch API, as a result row."""
    response = line.get("response") or {}
    body = response.get("body") or {}
    error = line.get("error") or body.get("error")
    choices = body.get("choices") or []
    usage = body.get("usage") or {}
    texts = [_choice_text(choice) for choice in choices]
    row: ResultRow = {
        "id": line.get("custom_id"),
        "status": "error" if error else "ok",
        "text": texts[0] if texts else None,
        "error": error and {name: error.get(name) for name in ("code", "message")},
        "finish_reason": choices[0].get("finish_reason") if choices else "error",
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
    }
    calls = [(choice.get("message") or {}).get("tool_calls") for choice in choices]
    if any(calls):
        row["tool_calls"] = calls[0] if len(calls) == 1 else calls
    if len(texts) > 1:
        row["samples"] = texts
    return row


def _choice_text(choice: Mapping[str, Any]) -> Any:
    if "message" in choice:
        return (choice["message"] or {}).get("content")
    return choice.get("text")


def _csv_rows(path: Path) -> Iterator[ResultRow]:
    csv.field_size_limit(_CSV_FIELD_BYTES)
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file, strict=True)
        names = next(reader, None)
        if names is None:
            return
        for cells in reader:
            if len(cells) != len(names):
                raise InputError(
                    f"{path}, line {reader.line_num} has {len(cells)} cells under "
                    f"{len(names)} names"
                )
            yield {name: _cell(name, text) for name, text in zip(names, cells, strict=True)}


def _cell(name: str, text: str) -> Any:
    if name in _NESTED_IN_CSV and re.match(r"[{\[]", text):
        try:
            return _decode(text)
        except ValueError:
            return Cell(text)
    return Cell(text)


def count_rows(work: Path) -> int:
    """How many rows a run has committed so far."""
    rows = [b.column("row").to_numpy() for _, b in shard_batches(work, ("row",))]
    return len(np.unique(np.concatenate(rows))) if rows else 0
