"""The table a run fills: committed shards and then a file, or memory.

It joins the columns of `intake` with the `sink`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchradix.config import OutputOptions
from batchradix.errors import TRANSIENT_CODES
from batchradix.jobs.base import JobSource
from batchradix.pipeline.failed_rows import chosen_rows
from batchradix.pipeline.intake import Intake
from batchradix.report.summary import Summary
from batchradix.schema.answer_format import ValueColumn
from batchradix.scratch import Scratch
from batchradix.sink.columns import result_schema, shard_schema
from batchradix.sink.finalise import KeptColumns, committed_in_order, finalise
from batchradix.sink.folder import RunFolder, is_finished, mark_unfinished
from batchradix.sink.formats import check_format
from batchradix.sink.memory import MemorySink
from batchradix.sink.openai_batch import REQUEST
from batchradix.sink.samples import SAMPLES, samples_field
from batchradix.sink.shards import (
    Committed,
    ShardWriter,
    forget_rows,
    load_shard,
    match_rows,
    read_committed,
)
from batchradix.sink.takeover import copy_records, find_twins
from batchradix.types import I32, I64, Result, Status


def finished_schema(
    source: JobSource,
    values: ValueColumn | None,
    options: OutputOptions,
    *,
    probabilities: bool,
    metadata: Mapping[str, str],
    has_reasoning: bool = False,
) -> pa.Schema:
    """The schema of the finished file, the answer's field as ``values`` marks it (JSON text or
    not); answers to requests in OpenAI's format have the kinds of their requests beside them.
    Raises `OptionError` and `InputError` for columns that cannot stand together."""
    columns = result_schema(
        id_type=source.id_type,
        value_type=None if values is None else values.arrow_type,
        choices=_choices(values, probabilities),
        keep=_keep_schema(source, options),
        unnest=options.unnest,
        keep_truncated=options.keep_truncated,
        has_reasoning=has_reasoning,
        has_samples=source.starts is not None,
        metadata=metadata,
    )
    if values is None or "value" not in columns.names:
        return columns
    columns = columns.set(columns.get_field_index("value"), values.arrow_field("value"))
    if SAMPLES in columns.names:
        columns = columns.set(columns.get_field_index(SAMPLES), samples_field(columns))
    return columns


def _keep_schema(source: JobSource, options: OutputOptions) -> pa.Schema | None:
    """The columns that come from the input, None where there are none."""
    if options.format is not None:
        return pa.schema([REQUEST])
    return source.keep_schema(options.keep) if options.keep else None


def _keep_batches(source: JobSource, options: OutputOptions) -> Iterator[pa.RecordBatch] | None:
    """The batches of `_keep_schema`."""
    if options.format is not None:
        return source.kind_batches()
    return source.keep_batches(options.keep) if options.keep else None


def _choices(values: ValueColumn | None, probabilities: bool) -> tuple[str, ...] | None:
    """What a column of probabilities lists, None where there is none."""
    return values.choices if values is not None and probabilities else None


class Table:
    """Takes every row's result once and becomes the finished table.

    With a ``folder`` (its fingerprint checked) rows that an earlier run committed are done
    already; without one results stay in memory. ``metadata`` goes into the finished file.
    ``probabilities``: there is a column of those of the schema's choices, ``has_reasoning``: one of
    thinking. ``cached_tokens``:
    int32[n], what each row's prompt shares, for rows that take a committed row's answer.
    ``members``: bool[n], the rows that the table is to hold, all when None.
    """

    def __init__(
        self,
        rows: Intake,
        *,
        source: JobSource,
        schema: ValueColumn | None,
        options: OutputOptions,
        metadata: Mapping[str, str],
        fingerprint: Mapping[str, Any],
        folder: RunFolder | None,
        cached_tokens: I32,
        probabilities: bool = False,
        has_reasoning: bool = False,
        members: NDArray[np.bool_] | None = None,
        scratch: Scratch | None = None,
    ) -> None:
        self._scratch = scratch or Scratch(least_bytes=None)
        self._members = np.ones(len(rows), dtype=bool) if members is None else members
        self._rows = rows
        self._source = source
        self._options = options
        self._folder = folder
        self._fingerprint = fingerprint
        self._counts = Summary()
        self._starts = source.starts
        self._groups = None if self._starts is None else _Groups(self._starts)
        self._failed = np.zeros(len(rows), dtype=bool)
        self._answer_lengths = [0, 0, 0]
        self.warnings: tuple[str, ...] = ()
        value_type = None if schema is None else schema.arrow_type
        choices = _choices(schema, probabilities)
        keep = _keep_schema(source, options)
        if folder is not None and options.format is not None:
            metadata = {**metadata, "batchradix.created": str(folder.begun_s)}
        self._schema = finished_schema(
            source,
            schema,
            options,
            probabilities=probabilities,
            has_reasoning=has_reasoning,
            metadata={**metadata, "batchradix.table": self._digest(keep)},
        )
        encode = None if schema is None else schema.to_arrow
        inner = shard_schema(
            id_type=source.id_type,
            value_type=value_type,
            choices=choices,
            has_reasoning=has_reasoning,
        )
        done = np.zeros(len(rows), dtype=bool)
        self._sink: ShardWriter | MemorySink
        if folder is None:
            self._sink = MemorySink(inner, encode)
        else:
            check_format(folder.output, self._schema, options.format)
            done = self._resume(folder, cached_tokens)
            self._sink = ShardWriter(folder, inner, encode)
        self.is_waiting = self._members & ~done
        """bool[n]: rows of the table that had no committed answer when it was opened."""
        self._num_resumed = self._num_done = int(done.sum())
        self.num_new_errors = 0
        """Error rows among the results taken by `append`."""

    def _digest(self, keep: pa.Schema | None) -> str:
        """Names what the finished file is made of beside the committed answers."""
        rows = self._rows
        digest = hashlib.sha256()
        for part in self._scratch.windows(len(rows)):
            digest.update(rows.content_keys[part].tobytes())
            ids = rows.ids.slice(part.start, part.stop - part.start).combine_chunks()
            digest.update(pa.record_batch([ids], names=["id"]).serialize())
        options = self._options
        shape = [options.unnest, options.keep_truncated]
        digest.update(json.dumps([*shape, options.format] if options.format else shape).encode())
        if self._starts is not None:
            digest.update(self._starts.tobytes())
        if keep is not None:
            digest.update(keep.serialize())
            for batch in _keep_batches(self._source, options) or ():
                digest.update(batch.serialize())
        return digest.hexdigest()

    def _resume(self, folder: RunFolder, cached_tokens: I32) -> NDArray[np.bool_]:
        """bool[n]: rows whose answers are committed and stay; counts them."""
        committed = read_committed(folder, scratch=self._scratch)
        self.warnings = committed.warnings
        forget = self._to_forget(folder, committed)
        if forget.any():
            mark_unfinished(folder)
            committed = forget_rows(folder, committed, forget, scratch=self._scratch)
        scratch = self._scratch
        record_of_row = self._match(committed)
        if self._copy_twins(folder, committed, record_of_row, cached_tokens):
            committed = read_committed(folder, scratch=scratch)
            record_of_row = self._match(committed)
        row_of_record = scratch.full(len(committed), -1, np.int64)
        done = np.zeros(len(self._rows), dtype=bool)
        for part in scratch.windows(len(done)):
            found = record_of_row[part]
            done[part] = (found >= 0) & self._members[part]
            row_of_record[found[done[part]]] = part.start + np.flatnonzero(done[part])
        for path, records in committed.by_shard():
            rows = row_of_record[records]
            here = np.flatnonzero(rows >= 0)
            if len(here):
                batch = load_shard(folder, path)
                batch = batch.take(pa.array(committed.positions[records][here]))
                self._count_batch(batch, rows[here])
        scratch.let_go()
        return done

    def _match(self, committed: Committed) -> I64:
        keys = self._rows.content_keys
        return match_rows(committed, len(self._rows), keys, scratch=self._scratch)

    def _copy_twins(
        self, folder: RunFolder, committed: Committed, record_of_row: I64, cached_tokens: I32
    ) -> bool:
        """Commits what is committed of equal rows for those that have no record; whether any."""
        waits = self._members & (record_of_row < 0)
        waits[self._rows.errors.rows] = False  # they have their own sentence, and cost nothing
        rows = np.flatnonzero(waits)
        if not len(committed) or not len(rows):
            return False
        records = find_twins(committed, rows, self._rows.content_keys)
        rows, records = rows[records >= 0], records[records >= 0]
        if len(rows):
            ids = self._rows.ids
            copy_records(folder, committed, records, rows, ids=ids, cached_tokens=cached_tokens)
        return bool(len(rows))

    def _to_forget(self, folder: RunFolder, committed: Committed) -> NDArray[np.bool_]:
        """bool[m]: committed records that are tried again: transient failures always, others
        where the run was told so."""
        forget = np.zeros(len(committed), dtype=bool)
        for status in self._options.retry:
            forget |= committed.has_status(Status(status))
        failed = committed.has_status(Status.ERROR) & ~forget
        for path, records in committed.by_shard():
            here = np.flatnonzero(failed[records])
            if len(here):
                errors = load_shard(folder, path).column("error").to_pylist()
                positions = committed.positions[records][here].tolist()
                forget[records.start + here] = [
                    errors[at]["code"] in TRANSIENT_CODES for at in positions
                ]
        return forget

    def _count_batch(self, batch: pa.RecordBatch, rows: I64) -> None:
        for row, status, error, tokens in zip(
            rows.tolist(),
            batch.column("status").to_pylist(),
            batch.column("error").to_pylist(),
            batch.column("completion_tokens").to_pylist(),
            strict=True,
        ):
            self._count(row, Status(status), None if error is None else error["code"], tokens)

    def _count(self, row: int, status: Status, error_code: str | None, num_tokens: int) -> None:
        self._counts.completion_tokens += num_tokens
        if num_tokens or status is not Status.ERROR:
            self._answer_lengths[0] += 1
            self._answer_lengths[1] += num_tokens
            self._answer_lengths[2] += num_tokens * num_tokens
        self._failed[row] = status is not Status.OK
        whole = (status, error_code)
        if self._groups is not None:
            found = self._groups.add(row, status, error_code)
            if found is None:
                return
            whole = found
        self._counts.count(*whole)

    @property
    def num_rows(self) -> int:
        """Rows of the finished table."""
        if self._starts is None:
            return int(np.count_nonzero(self._members))
        return int(np.count_nonzero(self._input_members(self._starts)))

    @property
    def answer_lengths(self) -> tuple[int, int, int]:
        """Of all answers so far: how many, their tokens, and the squares of these summed up."""
        count, total, squares = self._answer_lengths
        return count, total, squares

    def _input_members(self, starts: I64) -> NDArray[np.bool_]:
        """bool[m]: input rows, of those that have several results, that the table is to hold."""
        return self._members[starts[:-1]]

    @property
    def failed(self) -> NDArray[np.bool_]:
        """bool[n]: rows of the finished table that have a result which is not ok."""
        if self._starts is None:
            return self._failed
        return np.logical_or.reduceat(self._failed, self._starts[:-1])

    @property
    def num_done(self) -> int:
        """Rows that have their result."""
        return self._num_done

    def append(self, result: Result) -> None:
        """Takes one result; commits when it is time to. Raises `SinkError`."""
        self._num_done += 1
        code = None if result.error is None else result.error.code
        self._count(result.row, result.status, code, result.completion_tokens)
        self.num_new_errors += result.status is Status.ERROR
        self._sink.append(result)

    def commit_if_due(self) -> None:
        """Commits what has waited for some seconds. Raises `SinkError`."""
        self._sink.commit_if_due()

    def commit(self) -> None:
        """Commits everything taken so far. Raises `SinkError`."""
        self._sink.commit()

    def count(self, summary: Summary) -> None:
        """Writes the counts of all rows that are done into ``summary``."""
        for name in ("rows", "ok", "truncated", "errors", "completion_tokens", "error_codes"):
            setattr(summary, name, getattr(self._counts, name))
        summary.resumed_rows = self._num_resumed
        if self._starts is not None:
            done = np.logical_and.reduceat(~self.is_waiting, self._starts[:-1])
            summary.resumed_rows = int((done & self._input_members(self._starts)).sum())

    def finish(self) -> pa.Table | None:
        """The finished table: written to its file (None), or returned.

        A file that is finished already is left as it is. Raises `SinkError` and, when kept
        columns no longer fit the rows, `InputError`.
        """
        options = self._options
        if isinstance(self._sink, MemorySink):
            return self._sink.finish(
                schema=self._schema,
                num_rows=len(self._rows),
                keep_batches=self._kept(),
                unnest=options.unnest,
                starts=self._starts,
                rows=self._chosen,
            )
        assert self._folder is not None
        assert options.path is not None
        self._sink.commit()
        metadata = {k.decode(): v.decode() for k, v in self._schema.metadata.items()}
        if not is_finished(self._folder, self._fingerprint, options.path, metadata):
            finalise(
                self._folder,
                options.path,
                schema=self._schema,
                num_rows=len(self._rows),
                key_of_row=self._rows.content_keys,
                keep_batches=self._kept(),
                unnest=options.unnest,
                ids=self._rows.ids,
                rows=self._chosen,
                format_=options.format,
                starts=self._starts,
                scratch=self._scratch,
            )
        return None

    def _kept(self) -> Any:
        batches = _keep_batches(self._source, self._options)
        return batches if batches is None else self._of_members(batches)

    def _of_members(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Of columns of the whole input those rows that the table is to hold."""
        if self._members.all():
            return batches
        members = self._members if self._starts is None else self._input_members(self._starts)
        return chosen_rows(batches, members)

    @property
    def _chosen(self) -> I64 | None:
        """int64: the results that the table is to hold, all of them when None."""
        return None if self._members.all() else self._scratch.where(self._members)

    def results(self, column: str) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
        """All results as they are in shards, in input order, each batch beside an input column.

        Call `finish` before. Raises `InputError` where the column is not there, or the input has
        changed, and `SinkError`.
        """
        rows = self._chosen
        num_rows = len(self._rows) if rows is None else len(rows)
        if isinstance(self._sink, MemorySink):
            ordered = self._sink.ordered(num_rows, rows)
        else:
            assert self._folder is not None
            keys = self._rows.content_keys
            ordered = committed_in_order(
                self._folder, len(self._rows), keys, rows=rows, scratch=self._scratch
            )
        beside = KeptColumns(self._of_members(self._source.column_batches(column)), num_rows)
        for batch in ordered:
            begin = 0
            while begin < batch.num_rows:
                kept = beside.take(batch.num_rows - begin)
                yield batch.slice(begin, kept.num_rows), kept
                begin += kept.num_rows
        beside.finish()


class _Groups:
    """Counts input rows of several results each: when the last of them is there, by the worst."""

    _ranks = (Status.OK, Status.TRUNCATED, Status.ERROR)

    def __init__(self, starts: I64) -> None:
        self._starts = starts
        self._left = np.diff(starts).astype(np.int32)
        self._worst = np.zeros(len(self._left), dtype=np.uint8)
        self._codes: dict[int, str | None] = {}  # of those that are not complete yet

    def add(
        self, row: int, status: Status, error_code: str | None
    ) -> tuple[Status, str | None] | None:
        """Takes the result ``row``; what became of its input row, once all are there."""
        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        self._left[group] -= 1
        self._worst[group] = max(self._worst[group], self._ranks.index(status))
        if error_code is not None:
            self._codes.setdefault(group, error_code)
        if self._left[group]:
            return None
        return self._ranks[self._worst[group]], self._codes.pop(group, None)
