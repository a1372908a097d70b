"""The whole job in one place: rows → prompts → plan → engine → sink.

`open_parts` refuses what can be refused before weights load, `plan_rows` reads and orders the
rows, `run` drives any `types.Engine` over them and writes the table. Nothing else knows more
than one room.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa

from batchradix._version import VERSION
from batchradix.checkpoint.checkpoint import Checkpoint, open_checkpoint
from batchradix.config import (
    DEFAULT_BATCH_SIZE,
    EngineSettings,
    RunConfig,
    resolve_engine,
)
from batchradix.errors import InputError, RowError, RowErrorCode
from batchradix.intake import Intake, read_rows
from batchradix.jobs.base import JobSource
from batchradix.jobs.detect import open_job
from batchradix.plan.cached import PlanSummary, demand_tokens, plan_summary, shared_prefix
from batchradix.plan.dedupe import drop_followers, find_duplicates
from batchradix.plan.order import make_plan
from batchradix.plan.tree import build_tree, flat_tree
from batchradix.prompts.build import PromptBuilder
from batchradix.prompts.detokenise import IncrementalDetokenizer
from batchradix.prompts.view import PromptView
from batchradix.report.machine import machine, peak_rss_bytes
from batchradix.report.progress import Progress, Silent
from batchradix.report.summary import Summary
from batchradix.schema.answers import InvalidAnswer
from batchradix.schema.load import load_schema
from batchradix.schema.output_schema import OutputSchema
from batchradix.sink.folder import acquire, check_fingerprint
from batchradix.table import Table
from batchradix.types import (
    I32,
    I64,
    U64,
    Completion,
    Engine,
    EngineJob,
    FinishReason,
    Plan,
    Result,
    Row,
    Status,
)

EngineFactory = Callable[[Checkpoint, OutputSchema | None], Callable[[EngineSettings], Engine]]
"""First refuses what cannot be run, before weights load; then makes the engine."""
StopRequested = Callable[[], int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A job whose files, model, schema and prompts have been found good; no weights yet."""

    config: RunConfig
    source: JobSource
    checkpoint: Checkpoint
    schema: OutputSchema | None
    prompts: PromptBuilder
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Every row read and ordered. ``plan`` holds all rows that can run, ``cached``:
    int32[n] what each shares over the whole job, ``leaders``: int64[n] whose answer it takes.
    ``rng_key``: uint64[n]."""

    rows: Intake
    plan: Plan
    leaders: I64
    cached: I32
    rng_key: U64
    summary: PlanSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """``table`` is None when the results went to a file."""

    summary: Summary
    table: pa.Table | None = None


def open_parts(
    config: RunConfig, *, progress: Progress, checkpoint: Checkpoint | None = None
) -> Parts:
    """Opens input, model and schema and checks them against each other; reads no weights.

    ``checkpoint`` is a model that is open already. Raises the `UsageError` of whatever is
    wrong.
    """
    schema = None if config.schema is None else load_schema(config.schema)
    with ExitStack() as stack:
        source = open_job(config.input, id_column=config.id_column, limit=config.limit)
        stack.callback(source.close)
        checkpoint = checkpoint or open_checkpoint(config.model, notify=progress.message)
        source.scan()
        prompts = PromptBuilder(
            checkpoint,
            config.prompt,
            columns=source.columns if source.num_rows else None,
            schema_text=None if schema is None else schema.text,
        )
        if config.output.keep:
            source.keep_schema(config.output.keep)
        stack.pop_all()
    warnings = [*prompts.warnings, *_schema_notices(schema)]
    if source.num_duplicate_ids:
        warnings.append(f"{source.num_duplicate_ids:,} rows have an id that an earlier row has")
    for text in warnings:
        progress.warn(text)
    return Parts(
        config=config,
        source=source,
        checkpoint=checkpoint,
        schema=schema,
        prompts=prompts,
        warnings=tuple(warnings),
    )


def _schema_notices(schema: OutputSchema | None) -> Iterator[str]:
    """What decoding does not enforce of a schema, in words."""
    if schema is not None and schema.validated_keywords:
        places = ", ".join(f"{word} at #{place}" for place, word in schema.validated_keywords)
        yield (
            f"not enforced while decoding, but checked on every answer (a row that breaks it "
            f"becomes an error row): {places}"
        )
    if schema is not None and schema.ignored_keywords:
        places = ", ".join(f"{word} at #{place}" for place, word in schema.ignored_keywords)
        yield f"JSON Schema does not define, so nothing checks: {places}"


def plan_rows(parts: Parts, *, folder: Path | None, progress: Progress) -> Planned:
    """Reads, tokenises, orders and deduplicates every row; ``folder`` takes the token files."""
    from batchradix.engine.rng import rng_keys

    rows = read_rows(
        parts.source,
        parts.prompts,
        sampling=parts.config.sampling,
        grammar=None if parts.schema is None else parts.schema.grammar,
        context_length=parts.checkpoint.config.context_length,
        folder=folder,
    )
    if rows.num_cleaned:
        progress.warn(f"{rows.num_cleaned:,} prompts held lone surrogates, replaced by U+FFFD")
    plan = make_plan(rows.tokens, rows.runnable)
    rng_key = rng_keys(
        parts.config.sampling.seed or 0,
        rows.base_keys,
        rows.occurrence,
        rows.seeds,
        rows.has_seed,
    )
    greedy = np.array([settings.temperature == 0 for settings in rows.requests.settings])
    leaders = find_duplicates(
        rows.tokens,
        plan,
        settings_id=rows.requests.settings_id,
        max_tokens=rows.requests.max_tokens,
        rng_key=rng_key,
        is_greedy=greedy[rows.requests.settings_id],
    )
    alone = drop_followers(plan, leaders)
    codes = [error.code for error in rows.errors.values()]
    summary = plan_summary(
        rows.tokens,
        alone,
        build_tree(alone, rows.tokens.lengths),
        num_rows=len(rows),
        num_duplicates=len(plan) - len(alone),
        num_over_long=codes.count(RowErrorCode.PROMPT_TOO_LONG),
    )
    return Planned(
        rows=rows,
        plan=plan,
        leaders=leaders,
        cached=shared_prefix(plan, len(rows)),
        rng_key=rng_key,
        summary=summary,
    )


def settle_engine(parts: Parts, planned: Planned) -> EngineSettings:
    """The engine's open options from machine, model and plan."""
    from batchradix.engine.device import find_device

    options, model = parts.config.engine, parts.checkpoint.config
    device, free_device_memory_bytes = find_device(options.device)
    alone = drop_followers(planned.plan, planned.leaders)
    lengths = planned.rows.tokens.lengths
    tree = (build_tree if options.prefix_cache else flat_tree)(alone, lengths)
    demand = demand_tokens(
        alone, tree, planned.rows.requests.max_tokens, options.batch_size or DEFAULT_BATCH_SIZE
    )
    return resolve_engine(
        options,
        machine(device, free_device_memory_bytes),
        num_kv_elements_per_token=model.num_kv_elements_per_token,
        weight_bytes_float32=4 * model.num_parameters,
        demand_tokens=demand,
    )


def make_job(
    planned: Planned, todo: I64, *, prefix_cache: bool, retain: bool = False
) -> tuple[EngineJob, I64]:
    """What the engine gets, and int64[n]: for each row of ``todo`` the row that runs for it.

    Of several rows with one answer the first in ``todo`` runs, so that a run that was stopped
    between a row and its duplicates can go on. Elsewhere the second array is -1.
    """
    runs_for = np.full(len(planned.rows), -1, dtype=np.int64)
    _, first, group = np.unique(planned.leaders[todo], return_index=True, return_inverse=True)
    runs_for[todo] = todo[first][group]
    plan = drop_followers(planned.plan, runs_for)
    requests = planned.rows.requests
    job = EngineJob(
        tokens=planned.rows.tokens,
        plan=plan,
        tree=(build_tree if prefix_cache else flat_tree)(plan, planned.rows.tokens.lengths),
        requests=replace(requests, rng_key=planned.rng_key),
        retain=retain,
    )
    return job, runs_for


class Answers:
    """Turns completions and row errors into `Result`s, duplicates included."""

    def __init__(self, parts: Parts, planned: Planned) -> None:
        self._schema = parts.schema
        self._planned = planned
        self._lengths = planned.rows.tokens.lengths

    def failed(self, row: int) -> Result:
        """The result of a row that has an error and no prompt."""
        return self._result(row, Status.ERROR, None, None, self._planned.rows.errors[row])

    def finished(self, completion: Completion, rows: Sequence[int]) -> Iterator[Result]:
        """The results of all ``rows`` that this completion answers."""
        status, value, error = self._judge(completion)
        for row in rows:
            yield self._result(row, status, value, completion, error)

    def _judge(self, completion: Completion) -> tuple[Status, Any, RowError | None]:
        if completion.finish_reason is FinishReason.ERROR:
            return Status.ERROR, None, completion.error
        if self._schema is None:
            return Status.OK, None, None
        if completion.finish_reason is FinishReason.LENGTH:
            return Status.TRUNCATED, None, None
        try:
            return Status.OK, self._schema.parse(completion.text), None
        except InvalidAnswer as invalid:
            return Status.ERROR, None, invalid.row_error

    def _result(
        self,
        row: int,
        status: Status,
        value: Any,
        completion: Completion | None,
        error: RowError | None,
    ) -> Result:
        rows = self._planned.rows
        return Result(
            row=row,
            id=rows.ids[row].as_py(),
            status=status,
            value=value,
            text=None if completion is None else completion.text,
            error=error,
            finish_reason=FinishReason.ERROR if completion is None else completion.finish_reason,
            prompt_tokens=int(self._lengths[row]),
            cached_tokens=int(self._planned.cached[row]),
            completion_tokens=0 if completion is None else completion.completion_tokens,
            content_key=rows.content_keys[row].tobytes(),
        )


def drive(
    engine: Engine,
    planned: Planned,
    answers: Answers,
    todo: I64,
    emit: Callable[[Result], None],
    *,
    prefix_cache: bool,
    retain: bool = False,
    after_step: Callable[[], None] = lambda: None,
    stop_requested: StopRequested = lambda: None,
) -> int | None:
    """Runs the rows ``todo`` to the end; every one is emitted once, in completion order.

    Returns the signal that asked it to stop in between, or None.
    """
    job, runs_for = make_job(planned, todo, prefix_cache=prefix_cache, retain=retain)
    followers = todo[np.argsort(runs_for[todo], kind="stable")]
    led_by = runs_for[followers]
    engine.submit(job)
    while engine.has_work:
        signal = stop_requested()
        if signal is not None:
            return signal
        for completion in engine.step():
            start, stop = np.searchsorted(led_by, [completion.row, completion.row + 1])
            for result in answers.finished(completion, followers[start:stop].tolist()):
                emit(result)
        after_step()
    return None


class RadixEngines:
    """Makes the engine of this package; grammars compile before weights load."""

    def __init__(self, checkpoint: Checkpoint, schema: OutputSchema | None = None) -> None:
        from batchradix.engine.grammar.compiler import GrammarCompiler

        self._checkpoint = checkpoint
        tokenizer = checkpoint.tokenizer
        self._grammars = GrammarCompiler(tokenizer, checkpoint.config.vocab_size, tokenizer.eos_ids)
        self.check(schema)

    def check(self, schema: OutputSchema | None) -> None:
        """Compiles a schema that is to be used; raises `SchemaError` when it cannot be."""
        if schema is not None:
            self._grammars.compile(schema.grammar)

    def __call__(self, settings: EngineSettings) -> Engine:
        from batchradix.engine.core import RadixEngine

        detokenizer = IncrementalDetokenizer(self._checkpoint.tokenizer.token_bytes)
        return RadixEngine(self._checkpoint, settings, detokenizer, grammars=self._grammars)


def fingerprint(parts: Parts) -> dict[str, Any]:
    """What makes results of two runs belong to one table, as a JSON object."""
    config = parts.config
    return {
        "version": VERSION,
        "model": parts.checkpoint.content_hash,
        **asdict(config.prompt),
        **asdict(config.sampling),
        "schema": None if parts.schema is None else parts.schema.text,
        "dtype": config.engine.dtype,
        "id_type": str(parts.source.id_type),
    }


def file_metadata(parts: Parts, identity: Mapping[str, Any]) -> dict[str, str]:
    """What the finished file says about itself."""
    checkpoint = parts.checkpoint
    facts = {**identity, "model": checkpoint.name, "model_hash": identity["model"]}
    facts["revision"] = checkpoint.revision
    facts["input"] = parts.source.name
    if checkpoint.is_demonstration:
        facts["note"] = "answers of a small demonstration model"
    return {
        f"batchradix.{name}": fact if isinstance(fact, str) else json.dumps(fact)
        for name, fact in facts.items()
        if fact is not None
    }


def run(
    config: RunConfig,
    *,
    progress: Progress | None = None,
    stop_requested: StopRequested = lambda: None,
    warnings: Iterable[str] = (),
    engines: EngineFactory = RadixEngines,
) -> Outcome:
    """The whole job, from the input to the finished table.

    With ``config.output.path`` results are committed while it runs, the same call continues
    after a crash, and a finished table is left alone; else they come back as a table.
    Raises the errors of `errors` (a `UsageError` before weights load).
    """
    progress = progress or Silent()
    with ExitStack() as stack:
        started_s = time.monotonic()
        path = config.output.path
        folder = None if path is None else stack.enter_context(acquire(path))
        parts = open_parts(config, progress=progress)
        stack.callback(parts.source.close)
        make_engine = engines(parts.checkpoint, parts.schema)
        identity = fingerprint(parts)
        if folder is not None:
            check_fingerprint(folder, identity, restart=config.output.restart)
        tokens_folder = stack.enter_context(TemporaryDirectory(prefix="batchradix-"))
        planned = plan_rows(parts, folder=Path(tokens_folder), progress=progress)
        table = Table(
            planned.rows,
            source=parts.source,
            schema=parts.schema,
            options=config.output,
            metadata=file_metadata(parts, identity),
            fingerprint=identity,
            folder=folder,
        )
        summary = Summary(
            model=parts.checkpoint.name,
            distinct_tokens=planned.summary.distinct_tokens,
            prompt_tokens=planned.summary.prompt_tokens,
            duplicate_rows=planned.summary.duplicates,
            output=path,
            warnings=[*warnings, *parts.warnings, *table.warnings],
            plan_s=time.monotonic() - started_s,
        )
        for text in table.warnings:
            progress.warn(text)
        _answer(parts, planned, table, make_engine, summary, progress, stop_requested)
        result = table.finish() if summary.stopped_by is None else None
        table.count(summary)
        summary.peak_rss_bytes = peak_rss_bytes()
        return Outcome(summary=summary, table=result)


def _answer(
    parts: Parts,
    planned: Planned,
    table: Table,
    make_engine: Callable[[EngineSettings], Engine],
    summary: Summary,
    progress: Progress,
    stop_requested: StopRequested,
) -> None:
    """Every row that is not committed yet gets its result; weights load only if one must run."""
    answers = Answers(parts, planned)
    waiting = table.waiting
    for row in waiting[~np.isin(waiting, planned.plan.order)].tolist():
        table.append(answers.failed(row))
    todo = np.intersect1d(waiting, planned.plan.order)
    if not len(todo):
        table.commit()
        return
    started_s = time.monotonic()
    settings = settle_engine(parts, planned)
    summary.dtype = settings.dtype
    progress.message(
        f"loading {parts.checkpoint.name} in {settings.dtype} on {settings.device}, "
        f"{settings.kv_tokens:,} KV tokens, up to {settings.batch_size} rows at once"
    )
    engine = make_engine(settings)
    summary.load_s = time.monotonic() - started_s
    started_s = time.monotonic()
    progress.start(len(planned.rows), table.num_done)

    def after_step() -> None:
        table.commit_if_due()
        progress.update(table.num_done, engine.usage)

    try:
        summary.stopped_by = drive(
            engine,
            planned,
            answers,
            todo,
            table.append,
            prefix_cache=settings.prefix_cache,
            after_step=after_step,
            stop_requested=stop_requested,
        )
    finally:
        progress.stop()
        summary.usage = replace(engine.usage)
        summary.run_s = time.monotonic() - started_s
        try:
            table.commit()
        finally:
            engine.close()


def plan(config: RunConfig, *, progress: Progress | None = None) -> PlanSummary:
    """What a job shares; tokenises every row, loads no weights."""
    parts = open_parts(config, progress=progress or Silent())
    try:
        with TemporaryDirectory(prefix="batchradix-") as folder:
            return plan_rows(parts, folder=Path(folder), progress=progress or Silent()).summary
    finally:
        parts.source.close()


def preview(config: RunConfig, row: str | None, *, progress: Progress | None = None) -> PromptView:
    """The prompt of the row with id (else number) ``row``, the first without one.

    Raises `InputError` when there is no such row or it has no prompt.
    """
    parts = open_parts(config, progress=progress or Silent())
    try:
        by_number: Row | None = None
        for rows in parts.source.batches(parts.prompts.required_columns):
            for candidate in rows:
                if row is None or str(candidate.id) == row:
                    return _explain(parts, candidate)
                if str(candidate.index) == row:
                    by_number = candidate
        if by_number is not None:
            return _explain(parts, by_number)
    finally:
        parts.source.close()
    what = "has no rows" if row is None else f"has no row with the id or number {row!r}"
    raise InputError(f"{parts.source.name} {what}")


def _explain(parts: Parts, row: Row) -> PromptView:
    view = parts.prompts.explain(row)
    error = row.error or view.error
    if error is not None:
        raise InputError(f"this row has no prompt: {error.message}")
    return view
