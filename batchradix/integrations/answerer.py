"""Answers beside the columns of Arrow tables: what datasets and frames are served by."""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchradix import pipeline
from batchradix.checkpoint.checkpoint import Checkpoint, open_checkpoint, with_chat_template
from batchradix.config import EngineOptions, RunConfig
from batchradix.errors import OptionError
from batchradix.integrations.options import PortableJob, job_config
from batchradix.pipeline.parts import job_identity, may_think
from batchradix.plan.order import FEW_ROWS
from batchradix.prompts.thinking import KWARGS_COLUMN
from batchradix.report.machine import free_memory_bytes, has_bf16, num_threads
from batchradix.report.progress import Progress, Silent
from batchradix.schema.answer_format import AnswerFormat, ValueColumn
from batchradix.schema.row_formats import RESPONSE_FORMAT, JsonTexts
from batchradix.schema.tools import ToolSet
from batchradix.settings import resolve_dtype
from batchradix.sink.columns import result_schema
from batchradix.types import Usage

_LOGGER = logging.getLogger("batchradix")
_ROW_COLUMNS = ("id", "row")  # of a result; an answer stands beside its row instead
_SHARE_OF_FREE_MEMORY = 0.4


class Answerer:
    """Runs one job's options over any number of tables and gives the answers' columns.

    A table's answers have as many rows as it has, in its order; a row that failed has its error
    and nulls. The columns are those of a result but ``id`` and ``row``; with ``unnest`` they are
    the fields of the answer alone. ``result_columns`` names which of the columns beside the
    answer there are (all of them, with ``unnest`` none). One that the table has already is called
    ``answer_<name>``.

    The model's files are opened when they are first needed, its weights load with the first row,
    in the process that answers it; they and the cached prefixes stay until `close`.
    ``options`` are named by `option_names`. Raises `OptionError` and `SchemaError`.
    """

    def __init__(
        self,
        *,
        unnest: bool = False,
        result_columns: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        config = job_config(options)
        if isinstance(result_columns, str):
            result_columns = (result_columns,)
        beside = None if result_columns is None else tuple(result_columns)
        self._set_up(PortableJob.of(config, options), config, unnest, beside)

    def _set_up(
        self,
        job: PortableJob,
        config: RunConfig,
        unnest: bool,
        result_columns: tuple[str, ...] | None,
    ) -> None:
        self._job, self._config = job, config
        self._unnest, self._result_columns = unnest, result_columns
        self._session: pipeline.Session | None = None
        self._former = Usage()
        self._thinks: dict[tuple[str, ...], bool] = {}  # by columns
        if not isinstance(config.schema, ToolSet):
            self._fields((), may_think=True)  # refuses what cannot be

    def __getstate__(self) -> tuple[Any, ...]:
        """Configuration alone: a copy in another process loads the model by itself."""
        return self._job, self._unnest, self._result_columns

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        job, unnest, result_columns = state
        self._set_up(job, job.restored(), unnest, result_columns)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The model's files, config and tokenizer. Raises `ModelError`."""
        return open_checkpoint(self._config.model, lora=self._config.lora)

    @property
    def config(self) -> RunConfig:
        """The job, without an input."""
        return self._config

    @property
    def format(self) -> AnswerFormat | None:
        """What answers must match, None for any text."""
        schema = self._config.schema
        if isinstance(schema, ToolSet):
            model = with_chat_template(self.checkpoint, self._config.chats.chat_template)
            return schema.format_for(model.name, model.chat_template)
        return schema  # type: ignore[no-any-return]

    @property
    def dtype(self) -> str:
        """What the model is computed in on this machine's CPU."""
        return resolve_dtype(self._config.engine.dtype, device="cpu", has_bf16=has_bf16())

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 over all that changes an answer: what the model is (not where it lies), the
        prompts, schema, sampling, precision, and which columns are made.

        Device, batch size and memory do not count. An automatic dtype counts as what this
        machine's CPU makes of it; name one where results of other devices must not be taken for
        these. Raises `ModelError`.
        """
        engine = self._config.engine
        identity = job_identity(
            self._config,
            self.checkpoint,
            self.format,
            schema_column=self._config.schema_column,
            dtype=self.dtype,
        )
        identity |= {
            "row_timeout_s": engine.row_timeout_s,
            "keep_truncated": self._config.output.keep_truncated,
            "unnest": self._unnest,
            "result_columns": self._result_columns,
        }
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    @property
    def usage(self) -> Usage:
        """The engine's counters over all that was answered in this process."""
        return self._former if self._session is None else self._former + self._session.usage

    def answer_schema(self, columns: Collection[str]) -> pa.Schema:
        """The fields of the answers to a table with these columns, whatever its rows hold.

        Raises `OptionError` for ``unnest`` without an object, and unknown ``result_columns``.
        """
        return pa.schema(list(self._fields(columns).values()))

    def _may_think(self, columns: Collection[str]) -> bool:
        """Whether a table with these columns has answers that are thought about first."""
        if self._config.chats.thinking == "off" and KWARGS_COLUMN not in columns:
            return False
        key = tuple(columns)
        if key not in self._thinks:
            self._thinks[key] = may_think(self._config, self.checkpoint, key, self.format)
        return self._thinks[key]

    def _fields(
        self, columns: Collection[str], may_think: bool | None = None
    ) -> dict[str, pa.Field]:
        """The answers' fields as they are called beside ``columns``, by their names in a result;
        those of an unnested value by ``value.`` and their name."""
        values = self._values(columns)
        if self._unnest and values is None:
            raise OptionError("`unnest` needs a schema whose top is an object; there is no schema")
        scored = self._config.sampling.probabilities and values is not None
        results = result_schema(
            id_type=pa.string(),
            value_type=None if values is None else values.arrow_type,
            choices=values.choices if values is not None and scored else None,
            keep_truncated=self._config.output.keep_truncated,
            has_reasoning=self._may_think(columns) if may_think is None else may_think,
            metadata={},
        )
        wanted = self._wanted([n for n in results.names if n not in (*_ROW_COLUMNS, "value")])
        found: dict[str, pa.Field] = {}
        for field in results:
            if field.name == "value":
                assert values is not None
                found |= self._value_fields(values.arrow_field("value"))
            elif field.name in wanted:
                found[field.name] = field
        return _named_apart(found, columns)

    def _wanted(self, beside: list[str]) -> Collection[str]:
        """Which of the columns ``beside`` the answer there are."""
        if self._result_columns is None:
            return () if self._unnest else beside
        unknown = [name for name in self._result_columns if name not in beside]
        if unknown:
            raise OptionError(
                f"`result_columns` has no {unknown[0]!r}; there are: {', '.join(beside)}"
            )
        return self._result_columns

    def _value_fields(self, field: pa.Field) -> dict[str, pa.Field]:
        if not self._unnest:
            return {"value": field}
        if not pa.types.is_struct(field.type):
            raise OptionError(
                f"`unnest` needs a schema whose top is an object with properties; its values are "
                f"{field.type}"
            )
        return {f"value.{child.name}": child.with_nullable(True) for child in field.type}

    def _values(self, columns: Collection[str]) -> ValueColumn | None:
        if self._config.schema_column is not None or RESPONSE_FORMAT in columns:
            return JsonTexts()
        return self.format

    def arranged(self, results: pa.Table, columns: Collection[str]) -> pa.Table:
        """Of the table of a run the answers, beside a table with these columns."""
        fields = self._fields(columns)
        arrays = []
        for name in fields:
            if not name.startswith("value."):
                arrays.append(results[name])
                continue
            value = results["value"]
            place = value.type.get_field_index(name.removeprefix("value."))
            parts = [chunk.flatten()[place] for chunk in value.chunks]  # null below a null
            arrays.append(pa.chunked_array(parts, value.type.field(place).type))
        return pa.table(arrays, schema=pa.schema(list(fields.values())))

    def answers(self, rows: pa.Table | list[Mapping[str, Any]], rank: int | None = None) -> Any:
        """The answers to a batch of rows, a ``pa.Table`` of `answer_schema`.

        ``rank``: the number of this process among several that answer side by side.
        """
        if isinstance(rows, pa.Table):
            columns: Collection[str] = rows.column_names
        else:
            columns = list(dict.fromkeys(name for row in rows for name in row))
        session = self._opened(rank)
        # In a worker no more at once than are sorted without Polars.
        step = FEW_ROWS if _is_worker() else max(1, len(rows))
        parts = [
            session.table(replace(self._config, input=rows[start : start + step]))
            for start in range(0, max(1, len(rows)), step)
        ]
        return self.arranged(pa.concat_tables(parts), columns)

    def run(
        self,
        input: Any,
        columns: Collection[str],
        *,
        path: Path | None = None,
        restart: bool = False,
        progress: Progress,
    ) -> pa.Table | None:
        """The answers to all rows of ``input``, a table in memory with these columns, as one job.

        With ``path`` results are committed while it runs, the same call goes on after a crash,
        and the table of the run is in that file (None is returned; `arranged` takes its parts).
        """
        output = replace(self._config.output, path=path, restart=restart)
        outcome = pipeline.run(replace(self._config, input=input, output=output), progress=progress)
        self._former += outcome.summary.usage
        if isinstance(progress, Silent):  # others have said it
            for text in outcome.summary.warnings:
                _LOGGER.warning(text)
        return None if outcome.table is None else self.arranged(outcome.table, columns)

    def stream(self, reader: pa.RecordBatchReader, *, batch_rows: int = 64) -> Any:
        """A ``pa.RecordBatchReader`` of the rows of ``reader`` with their answers behind them.

        Rows are taken and answered ``batch_rows`` at a time, when they are asked for; prefixes
        stay in the cache from one batch to the next. For input whose equal prompts do not stand
        together, a run over the whole table computes less. ``reader`` may be whatever has the
        Arrow stream interface.
        """
        if batch_rows < 1:
            raise OptionError(f"`batch_rows` must be at least 1, not {batch_rows}")
        source = pa.RecordBatchReader.from_stream(reader)
        schema = pa.schema([*source.schema, *self.answer_schema(source.schema.names)])

        def batches() -> Iterator[pa.RecordBatch]:
            for table in _regrouped(source, batch_rows):
                answers = self.answers(table)
                columns = [*table.columns, *answers.columns]
                yield from pa.table(columns, schema=schema).combine_chunks().to_batches()

        return pa.RecordBatchReader.from_batches(schema, batches())

    def _opened(self, rank: int | None) -> pipeline.Session:
        if self._session is None:
            options = _own_share(self._config.engine, rank)
            self._session = pipeline.Session(self.checkpoint, options)
        return self._session

    def close(self) -> None:
        """Frees weights and cache; the next batch loads them again. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            session.close()
            self._former += session.usage


def _named_apart(fields: dict[str, pa.Field], columns: Collection[str]) -> dict[str, pa.Field]:
    taken = set(columns)
    named: dict[str, pa.Field] = {}
    for key, field in fields.items():
        name = field.name
        while name in taken:
            name = f"answer_{name}"
        taken.add(name)
        named[key] = field.with_name(name)
    return named


def _regrouped(source: pa.RecordBatchReader, batch_rows: int) -> Iterator[pa.Table]:
    """The rows of a stream in tables of ``batch_rows``, the last one with what is left."""
    waiting: list[pa.RecordBatch] = []
    num_waiting = 0
    for batch in source:
        while num_waiting + batch.num_rows >= batch_rows:
            head = batch.slice(0, batch_rows - num_waiting)
            yield pa.Table.from_batches([*waiting, head], schema=source.schema)
            batch = batch.slice(head.num_rows)
            waiting, num_waiting = [], 0
        if batch.num_rows:
            waiting.append(batch)
            num_waiting += batch.num_rows
    if waiting:
        yield pa.Table.from_batches(waiting, schema=source.schema)


def _own_share(options: EngineOptions, rank: int | None) -> EngineOptions:
    """``options`` for this process, which may be one of several that ``num_proc`` started.

    Each of those takes one thread and, of the memory for keys and values, as much as is there for
    one core, unless the options say more. On GPUs each needs a rank, and takes the GPU of that
    number. Raises `OptionError` where that cannot be.
    """
    if not _is_worker():
        return options
    if options.device != "cpu":
        options = _own_gpu(options, rank)
    if options.device.startswith("cuda"):
        return options
    changes: dict[str, Any] = {"plan_memory_bytes": sys.maxsize}  # it is sorted in one go
    if options.num_threads is None:
        changes["num_threads"] = 1
    if options.kv_tokens is None and options.kv_memory_bytes is None:
        room = _SHARE_OF_FREE_MEMORY * free_memory_bytes()
        changes["kv_memory_bytes"] = max(1, int(room) // num_threads())
    return replace(options, **changes)


def _is_worker() -> bool:
    modules = [multiprocessing, sys.modules.get("multiprocess")]  # the one datasets uses
    return any(module is not None and module.parent_process() is not None for module in modules)


def _own_gpu(options: EngineOptions, rank: int | None) -> EngineOptions:
    import torch

    if torch.cuda._is_in_bad_fork():
        raise OptionError(
            "this process was forked from one that uses the GPU already, and so it cannot; leave "
            "out `num_proc`, or call multiprocess.set_start_method('spawn') before the map"
        )
    if options.device == "auto" and not torch.cuda.is_available():
        return replace(options, device="cpu")
    if ":" in options.device:
        return options
    num_gpus = torch.cuda.device_count()
    if rank is None:
        raise OptionError(
            "several processes would share one GPU, each with a model of its own; leave out "
            "`num_proc`, or give `with_rank=True` and as many processes as there are GPUs "
            f"({num_gpus}), so that each takes one of its own"
        )
    if rank >= max(1, num_gpus):
        raise OptionError(
            f"process {rank + 1} has no GPU of its own: there are {num_gpus}; lower `num_proc`"
        )
    return replace(options, device=f"cuda:{rank}")
