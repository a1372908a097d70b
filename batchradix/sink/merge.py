"""The parts of a table that several workers wrote, joined to the table that one would have written.

A part is a finished Arrow file that holds some of the input's rows. Its metadata say which part it
is of how many and, beside that, what those of the whole table say.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from batchradix.config import Shard
from batchradix.errors import InputError, OutputMismatchError, SinkError
from batchradix.scratch import Scratch
from batchradix.sink.dictionaries import DictionaryUnion, map_types, recode
from batchradix.sink.durable import publish
from batchradix.sink.finalise import KeptColumns
from batchradix.sink.folder import RunFolder
from batchradix.sink.formats import check_format, open_writer, output_format
from batchradix.sink.ordering import Piece, in_order
from batchradix.types import Status

SHARD = "batchradix.shard"
_LAST_RESULT_COLUMN = "completion_tokens"  # kept columns stand behind it
_KEPT_ROWS = 1024  # as sources give them


def shard_metadata(shard: Shard, num_rows: int) -> dict[str, str]:
    """What a part says of itself; ``num_rows`` are those of the whole table."""
    facts = {"number": shard.number, "count": shard.count, "rows": num_rows}
    return {SHARD: json.dumps(facts)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A finished part of a table of ``num_rows`` rows; ``schema`` is that of the whole."""

    path: Path
    shard: Shard
    num_rows: int
    schema: pa.Schema


def find_parts(output: Path) -> list[Path]:
    """The parts of ``output`` that lie beside it, as `Shard.part_of` names them.

    Raises `InputError` where there are none, or those of another split as well.
    """
    name = re.compile(re.escape(output.name) + r"\.(\d+)-of-(\d+)\.arrow")
    found: dict[int, list[Path]] = {}
    for path in sorted(output.parent.glob("*")):
        match = name.fullmatch(path.name)
        if match is not None and path.is_file():
            found.setdefault(int(match[2]), []).append(path)
    if not found:
        raise InputError(
            f"there is no part of {output} beside it, such as {Shard(1, 4).part_of(output).name}; "
            f"run the job with --shard 1/4 and so on, or name the parts"
        )
    if len(found) > 1:
        splits = ", ".join(f"{len(found[count])} of {count}" for count in sorted(found))
        raise InputError(
            f"parts of several splits of {output} lie beside it ({splits}); name those to join"
        )
    [parts] = found.values()
    return parts


def open_parts(paths: Sequence[Path]) -> list[Part]:
    """The parts by number, each there once and of one job.

    Raises `InputError` where one cannot be read, is missing, or is of another job or split.
    """
    parts = sorted((_open_part(path) for path in paths), key=lambda part: part.shard.number)
    if not parts:
        raise InputError("there are no parts to join; name at least one")
    first = parts[0]
    for part in parts[1:]:
        if (part.shard.count, part.num_rows) != (first.shard.count, first.num_rows) or (
            not part.schema.equals(first.schema, check_metadata=True)
        ):
            raise InputError(
                f"{part.path} is not of the same job as {first.path} ({_difference(first, part)}); "
                f"run the parts with the same command and input, but for --shard"
            )
    numbers = [part.shard.number for part in parts]
    twice = next((number for number in numbers if numbers.count(number) > 1), None)
    if twice is not None:
        raise InputError(f"part {twice} of {first.shard.count} is given twice; give it once")
    missing = sorted(set(range(1, first.shard.count + 1)) - set(numbers))
    if missing:
        shown = ", ".join(map(str, missing[:10])) + (" ..." if len(missing) > 10 else "")
        raise InputError(
            f"of {first.shard.count} parts {len(missing)} are missing ({shown}); run the job with "
            f"--shard {missing[0]}/{first.shard.count} to its end first"
        )
    return parts


def merge_parts(folder: RunFolder, parts: Sequence[Part], scratch: Scratch) -> dict[Status, int]:
    """Writes the output of a folder from parts (of `open_parts`), rows in input order, and renames
    it into place last; how many rows have each status.

    The file is what one run writes, to the byte. Memory is bounded as in `finalise.finalise`.
    Raises `OutputMismatchError` where the folder has results of its own, `OptionError` where the
    format cannot hold the columns, and `SinkError` when rows are missing or the file cannot be
    written; the output is what it was before then.
    """
    if folder.run_file.exists():
        raise OutputMismatchError(
            f"{folder.shown} holds the results of a run of its own; give another output to join "
            f"the parts in"
        )
    schema, num_rows = parts[0].schema, parts[0].num_rows
    check_format(folder.shown, schema)
    counts = dict.fromkeys(Status, 0)
    extension = output_format(folder.shown)
    partial = folder.tmp / f"output{extension}"
    try:
        columns = _Columns(schema)
        _check_rows(parts, num_rows, scratch)
        ordered = in_order(
            _pieces(parts, columns, scratch), num_rows, folder.tmp / "spool.arrow", scratch
        )
        writer = open_writer(partial, extension, schema)
        try:
            for batch in columns.finished(ordered):
                writer.write_batch(batch)
                for status in batch.column("status").value_counts().to_pylist():
                    counts[Status(status["values"])] += status["counts"]
            writer.close()
        except BaseException:
            writer.abandon()
            raise
        publish(partial, folder.output)
    except (OSError, pa.ArrowException) as e:
        what = getattr(e, "strerror", None) or str(e)
        raise SinkError(f"the output {folder.shown} cannot be written: {what}") from e
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    return counts


def _open_part(path: Path) -> Part:
    try:
        schema = _reader(path).schema
        metadata = {k.decode(): v.decode() for k, v in (schema.metadata or {}).items()}
        facts = json.loads(metadata.pop(SHARD))
        shard = Shard(facts["number"], facts["count"])
        return Part(
            path=path,
            shard=shard,
            num_rows=int(facts["rows"]),
            schema=schema.with_metadata(metadata or None),
        )
    except OSError as e:
        raise InputError(f"the part {path} cannot be read: {e.strerror or e}") from None
    except (pa.ArrowException, KeyError, ValueError, TypeError):
        raise InputError(
            f"{path} is no finished part of a table; run the job with --shard to its end"
        ) from None


def _difference(one: Part, other: Part) -> str:
    """What tells two parts apart, shortly."""
    if one.shard.count != other.shard.count:
        return f"it is one of {other.shard.count}, the other one of {one.shard.count}"
    metadata: list[Mapping[bytes, bytes]] = [p.schema.metadata or {} for p in (one, other)]
    keys = metadata[0].keys() | metadata[1].keys()
    changed = sorted(
        key.decode().removeprefix("batchradix.")
        for key in keys
        if metadata[0].get(key) != metadata[1].get(key)
    )
    names = [name for name in changed if name != "table"]
    return f"other {', '.join(names)}" if names else "other rows, ids or columns"


def _reader(path: Path) -> pa.RecordBatchFileReader:
    return pa.ipc.open_file(pa.memory_map(os.fspath(path)))


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    reader = _reader(path)
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)


def _check_rows(parts: Sequence[Part], num_rows: int, scratch: Scratch) -> None:
    seen = scratch.zeros(num_rows, np.bool_)
    num_found = 0
    for part in parts:
        for batch in _batches(part.path):
            rows = batch.column("row").to_numpy()
            num_found += len(rows)
            seen[rows[(rows >= 0) & (rows < num_rows)]] = True
    num_there = int(np.count_nonzero(seen))
    if num_found != num_rows or num_there != num_rows:
        raise SinkError(
            f"the parts do not make up the {num_rows:,} rows of the table: "
            f"{num_rows - num_there:,} missing, {num_found - num_there:,} doubled or beyond it; "
            f"run them with the same version on the same input"
        )


def _pieces(parts: Sequence[Part], columns: _Columns, scratch: Scratch) -> Iterator[Piece]:
    for part in parts:
        for batch in _batches(part.path):
            yield columns.sortable(batch), batch.column("row").to_numpy()
            scratch.let_go()


class _Columns:
    """Takes dictionaries out of a table's batches, so that rows can be sorted, and puts them back.

    Values of results get the dictionaries that a run gives them, kept columns those they had.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        num_results = schema.get_field_index(_LAST_RESULT_COLUMN) + 1
        self._results = list(schema)[:num_results]
        self._union = DictionaryUnion(pa.schema(list(schema)[num_results:]))
        plain = [f.with_type(map_types(f.type, lambda d: d.value_type)) for f in self._results]
        self._sortable = pa.schema([*plain, *self._union.index_schema])

    def sortable(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A batch of a part with plain values, and indices in place of kept dictionaries."""
        num_results = len(self._results)
        results = [
            recode(batch.column(i), self._sortable.field(i).type) for i in range(num_results)
        ]
        kept = self._union.index(self._kept(batch, self._union.schema))
        return pa.RecordBatch.from_arrays([*results, *kept.columns], schema=self._sortable)

    def finished(self, ordered: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Batches of the table from sortable ones in order, cut as a run cuts them."""
        row = 0
        for window in ordered:
            for part in self._cut(window, row):
                results = [
                    recode(column, field.type)
                    for column, field in zip(part.columns, self._results, strict=False)
                ]
                kept = self._union.restore(self._kept(part, self._union.index_schema))
                yield pa.RecordBatch.from_arrays([*results, *kept.columns], schema=self._schema)
            row += window.num_rows

    def _kept(self, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        columns = batch.columns[len(self._results) :]
        if not columns:
            return pa.RecordBatch.from_arrays([], schema=schema)
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def _cut(self, window: pa.RecordBatch, row: int) -> Iterator[pa.RecordBatch]:
        """A window that begins at ``row``, in pieces whose kept columns are of bounded size."""
        if not len(self._union.schema):
            yield window
            return
        kept = self._union.restore(self._kept(window, self._union.index_schema))
        cuts = [0, *range(_KEPT_ROWS - row % _KEPT_ROWS, window.num_rows, _KEPT_ROWS)]
        pieces = (
            kept.slice(begin, stop - begin)
            for begin, stop in zip(cuts, [*cuts[1:], window.num_rows], strict=True)
        )
        columns = KeptColumns(pieces, window.num_rows)
        start = 0
        while start < window.num_rows:
            size = columns.take(window.num_rows - start).num_rows
            yield window.slice(start, size)
            start += size
