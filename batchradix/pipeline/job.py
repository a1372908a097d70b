"""The whole job in one place: rows → prompts → plan → engine → sink.

`open_parts` refuses what can be refused before weights load, `plan_rows` reads and orders the
rows, `run` drives any `types.Engine` over them and writes the table.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import pyarrow as pa

from batchradix.checkpoint.cache_folder import cache_folder
from batchradix.checkpoint.checkpoint import Checkpoint
from batchradix.config import EngineOptions, RunConfig
from batchradix.errors import TooManyFailuresError
from batchradix.pipeline.answers import Answers, StopRequested, drive
from batchradix.pipeline.asking import Asking
from batchradix.pipeline.failed_rows import check_failed_rows, write_failed_rows
from batchradix.pipeline.forecasts import Meter, Observers, expected_answer_tokens, forecast
from batchradix.pipeline.former import find_former, remedy
from batchradix.pipeline.gold import check_gold, score, write_scores
from batchradix.pipeline.parts import (
    Parts,
    file_metadata,
    fingerprint,
    names_in_words,
    open_parts,
)
from batchradix.pipeline.planned import (
    Planned,
    check_budget,
    check_device,
    check_disk,
    check_scores,
    plan_rows,
    settle_engine,
    shortages,
)
from batchradix.pipeline.retries import open_retries
from batchradix.pipeline.sample import estimated, sample_metadata, take_sample
from batchradix.pipeline.sharding import take_shard
from batchradix.pipeline.table import Table
from batchradix.pipeline.tracing import Tracing
from batchradix.prompts.detokenise import IncrementalDetokenizer
from batchradix.report.estimate import WorkTimes
from batchradix.report.machine import num_oom_kills, peak_rss_bytes
from batchradix.report.progress import Progress, Silent
from batchradix.report.summary import Summary
from batchradix.schema.answer_format import AnswerFormat
from batchradix.scratch import Scratch
from batchradix.settings import EngineSettings
from batchradix.sink.about import About, write_about
from batchradix.sink.fold import all_starts
from batchradix.sink.folder import acquire, check_fingerprint
from batchradix.sink.merge import shard_metadata
from batchradix.types import Engine, EngineJob, GrammarSpec, Observable

_ROWS_BETWEEN = 256  # at least, between two times at which the columns' pages are let go


class EngineMaker(Protocol):
    """Makes one engine for a job that was found good."""

    def opening(self, spec: GrammarSpec) -> Sequence[int]:
        """The tokens with which every answer under a grammar begins, () to sample them too."""
        ...

    def check_scores(self, spec: GrammarSpec) -> None:
        """Raises `SchemaError` where a grammar's choices are too many to look at each."""
        ...

    def __call__(self, settings: EngineSettings) -> Engine: ...


EngineFactory = Callable[[Checkpoint, AnswerFormat | None], EngineMaker]
"""First refuses what cannot be run, before weights load; then makes the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """``table`` is None when the results went to a file."""

    summary: Summary
    table: pa.Table | None = None


class RadixEngines:
    """Makes the engine of this package; grammars compile before weights load.

    ``options`` limit what compiling takes.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        schema: AnswerFormat | None = None,
        *,
        options: EngineOptions | None = None,
    ) -> None:
        from batchradix.engine.grammar.compiler import GrammarCompiler
        from batchradix.engine.grammar.disk_cache import GrammarDiskCache

        options = options or EngineOptions()
        self._checkpoint = checkpoint
        tokenizer = checkpoint.tokenizer
        self._grammars = GrammarCompiler(
            tokenizer,
            checkpoint.config.vocab_size,
            tokenizer.eos_ids,
            timeout_s=options.grammar_timeout_s,
            memory_bytes=options.grammar_memory_bytes,
            cache=GrammarDiskCache(cache_folder()),
        )
        self.check(schema)

    def check(self, schema: AnswerFormat | None) -> None:
        """Compiles a schema that is to be used; raises `SchemaError` when it cannot be."""
        if schema is not None:
            self._grammars.compile(schema.grammar)

    def opening(self, spec: GrammarSpec) -> Sequence[int]:
        """The tokens with which every answer under a grammar begins."""
        return self._grammars.opening(spec)

    def check_scores(self, spec: GrammarSpec) -> None:
        """Raises `SchemaError` where a grammar's choices part at too many places."""
        self._grammars.check_scores(spec)

    def close(self) -> None:
        """Ends the process in which grammars compile; another begins when one is needed."""
        self._grammars.close()

    def __call__(self, settings: EngineSettings) -> Engine:
        from batchradix.engine.core import RadixEngine

        self.close()  # its process has no more to do, and weights want the memory
        detokenizer = IncrementalDetokenizer(self._checkpoint.tokenizer.token_bytes)
        return RadixEngine(self._checkpoint, settings, detokenizer, grammars=self._grammars)


def check_parts(parts: Parts, engines: EngineFactory | None) -> EngineMaker:
    """Refuses what rows need not be read for; what then makes the engine.

    Raises the `UsageError` of whatever is wrong.
    """
    config = parts.config
    engines = engines or partial(RadixEngines, options=config.engine)
    make_engine = engines(parts.checkpoint, parts.schema)
    check_device(config)
    check_disk(config)
    check_budget(parts)
    parts.folds(None)  # refuses rules of combining
    if config.output.failed_rows is not None:
        check_failed_rows(config.output, parts.source)
    check_scores(parts, make_engine.check_scores)
    if config.trial.gold is not None:
        check_gold(parts, config.trial.gold)
    return make_engine


def run(
    config: RunConfig,
    *,
    progress: Progress | None = None,
    stop_requested: StopRequested = lambda: None,
    warnings: Iterable[str] = (),
    engines: EngineFactory | None = None,
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
        warnings = [*warnings]
        if folder is not None and folder.killed is not None:
            warnings.append(killed_sentence(folder.killed, num_oom_kills()))
            progress.warn(warnings[-1])
        parts = open_parts(config, progress=progress)
        stack.callback(parts.source.close)
        make_engine = check_parts(parts, engines)
        identity = fingerprint(parts)
        former = None
        if folder is not None:
            folder.names = names_in_words(parts)
            folder.errors = _resolved(config.output.errors_path)
            former = find_former(folder, identity, config.output)
            if former is None:
                check_fingerprint(
                    folder,
                    identity,
                    restart=config.output.restart,
                    remedy=partial(remedy, options=config.output),
                )
            write_about(folder.path, _about(parts))
        trace = None if folder is None or not config.output.trace else folder.trace
        if trace is not None:
            with suppress(OSError):  # whoever writes to it says so
                trace.mkdir(exist_ok=True)  # there, and empty, where no step will come
        scratch = Scratch()
        # The token files stay mapped; their names go at once, so that a kill leaves none behind.
        with TemporaryDirectory(prefix="batchradix-") as tokens_folder:
            planned = plan_rows(
                parts,
                folder=Path(tokens_folder),
                progress=progress,
                opening=make_engine.opening,
                former=None if former is None else former.settings,
                scratch=scratch,
            )
        if former is not None and folder is not None:
            former.take_over(folder, identity, planned.rows)
        metadata = file_metadata(parts, identity)
        if config.shard is not None:
            planned, sentence = take_shard(planned, config.shard)
            metadata |= shard_metadata(config.shard, len(planned.rows))
            progress.message(sentence)
        whole, trial, folds = planned, config.trial, parts.folds(planned.rows)
        if trial.sample is not None:
            seed = config.sampling.seed if trial.sample_seed is None else trial.sample_seed
            planned, sentence = take_sample(planned, trial.sample, seed or 0, all_starts(folds))
            metadata |= sample_metadata(trial.sample, seed or 0, parts.source.num_rows or 0)
            progress.message(sentence)
        table = Table(
            planned.rows,
            source=parts.source,
            schema=parts.values,
            options=config.output,
            metadata=metadata,
            fingerprint=identity,
            folder=folder,
            cached_tokens=planned.cached,
            scratch=scratch,
            probabilities=config.sampling.probabilities,
            members=planned.members,
            folds=folds,
            has_cut_tokens=config.long_rows.truncates,
            has_reasoning=parts.prompts.may_think,
        )
        summary = Summary(
            model=parts.checkpoint.name,
            distinct_tokens=planned.summary.distinct_tokens,
            prompt_tokens=planned.summary.prompt_tokens,
            opening_tokens=planned.summary.opening_tokens,
            duplicate_rows=planned.summary.duplicates,
            output=path,
            warnings=[*warnings, *parts.warnings, *planned.warnings, *table.warnings],
            plan_s=time.monotonic() - started_s,
        )
        for text in table.warnings:
            progress.warn(text)
        times = _answer(
            parts, planned, table, make_engine, summary, progress, stop_requested, trace
        )
        result = table.finish() if summary.stopped_by is None else None
        if trial.gold is not None and summary.stopped_by is None:
            summary.gold = score(parts, table, trial.gold)
            if folder is not None:
                write_scores(folder, summary.gold)
        failed_rows = config.output.failed_rows
        if failed_rows is not None:
            summary.failed_rows = write_failed_rows(failed_rows, parts.source, table.failed)
            left_out = int(table.failed.sum()) - summary.failed_rows
            if left_out:
                summary.warnings.append(
                    f"{left_out:,} of the failed rows are not in {failed_rows}: they could not be "
                    f"read, so mend them in the input"
                )
                progress.warn(summary.warnings[-1])
        table.count(summary)
        if trial.sample is not None and summary.stopped_by is None:
            summary.estimate = estimated(parts, whole, table, summary, times)
        summary.rows_left = table.num_rows - summary.rows
        summary.peak_rss_bytes = peak_rss_bytes()
        return Outcome(summary=summary, table=result)


def _answer(
    parts: Parts,
    planned: Planned,
    table: Table,
    make_engine: EngineMaker,
    summary: Summary,
    progress: Progress,
    stop_requested: StopRequested,
    trace: Path | None,
) -> WorkTimes | None:
    """Every row that is not committed yet gets its result; weights load only if one must run.
    ``trace``: the folder that takes a trace of it. Returns how long what took, None where nothing
    had to run."""
    answers = Answers(planned)
    for row in planned.rows.errors:
        if table.is_waiting[row]:
            table.append(answers.failed(row))
    if table.num_new_errors:
        table.commit()
        _bear(table, parts.config.output.abort_after_failures)
    runs = table.is_waiting.copy()
    runs[planned.rows.errors.rows] = False
    asking = Asking(parts, planned, table, make_engine.opening)
    runs[asking.waiting] = False
    todo = planned.scratch.where(runs)
    if not len(todo) and not len(asking.waiting):
        table.commit()
        return None
    started_s = time.monotonic()
    settings = settle_engine(parts, planned)
    summary.dtype = settings.precision
    model, width = parts.checkpoint.config, settings.kv_element_bytes
    summary.kv_token_bytes = width * model.num_kv_elements_per_token
    summary.expanded_kv_token_bytes = width * model.num_expanded_kv_elements_per_token
    progress.message(
        f"loading {parts.checkpoint.name} in {settings.precision} on {settings.device}, "
        f"{settings.kv_tokens:,} KV tokens, up to {settings.batch_size} rows at once"
    )
    for shortage in shortages(parts, settings):
        summary.warnings.append(shortage)
        progress.warn(shortage)
    retries = open_retries(parts, planned)
    engine = make_engine(settings)
    summary.load_s = time.monotonic() - started_s
    meter = Meter(parts.checkpoint.content_hash, settings)
    tracing = None
    if trace is not None:
        tracing = Tracing(
            trace,
            model=parts.checkpoint.name,
            settings=settings,
            token_bytes=parts.checkpoint.tokenizer.token_bytes,
            scratch=planned.scratch,
            warn=progress.warn,
        )
    if isinstance(engine, Observable):
        engine.observe(meter if tracing is None else Observers((meter, tracing.observer)))
    started_s = time.monotonic()
    times = WorkTimes(started_s)
    progress.start(int(table.is_waiting.sum()) + table.num_done, table.num_done)

    num_seen = table.num_done

    def before(job: EngineJob) -> None:
        if tracing is not None:
            tracing.begin(job)
        summary.forecast = forecast(
            job,
            planned.rows.lengths,
            settings,
            parts.checkpoint.content_hash,
            expected_answer_tokens(parts.config),
        )
        summary.ran_rows = len(job.plan)
        times.begin(time.monotonic())

    def tell() -> None:
        for text in engine.notices:
            if text not in summary.warnings:
                summary.warnings.append(text)
                progress.warn(text)

    def after_step() -> None:
        nonlocal num_seen
        times.after_step(engine.usage, time.monotonic())
        tell()
        if table.num_done >= num_seen + _ROWS_BETWEEN:
            num_seen = table.num_done
            planned.scratch.let_go()
        _bear(table, parts.config.output.abort_after_failures)
        table.commit_if_due()
        progress.update(table.num_done, engine.usage)

    try:
        if len(todo):
            summary.stopped_by = drive(
                engine,
                planned,
                answers,
                todo,
                table.append,
                prefix_cache=settings.prefix_cache,
                retries=retries,
                before=before,
                after_step=after_step,
                stop_requested=stop_requested,
            )
        if summary.stopped_by is None:
            summary.stopped_by = asking.run(
                engine,
                prefix_cache=settings.prefix_cache,
                after_step=after_step,
                stop_requested=stop_requested,
            )
    finally:
        if tracing is not None:
            tracing.close()
        meter.keep()
        progress.stop()
        summary.usage = replace(engine.usage)
        tell()
        if retries is not None:
            summary.retried_rows = retries.num_rows
            summary.discarded_tokens = retries.num_tokens
        summary.run_s = time.monotonic() - started_s
        for name in ("prompt_tokens", "opening_tokens", "distinct_tokens"):
            setattr(summary, name, getattr(summary, name) + getattr(asking, name))
        try:
            table.commit()
        finally:
            engine.close()
    return times


def _about(parts: Parts) -> About:
    """Where the rows come from, as far as they can be read again from another folder."""
    config, name = parts.config, None
    if isinstance(config.input, (str, os.PathLike)) and config.input != "-":
        name = os.fsdecode(config.input)
        name = name if "://" in name else os.path.abspath(name)
    return About(
        input=name,
        limit=config.limit,
        id_column=config.id_column,
        gold=config.trial.gold,
        has_several=bool(parts.folds(None)) or parts.source.starts is not None,
    )


def _resolved(path: Path | None) -> Path | None:
    return None if path is None else Path(os.path.realpath(path))


def killed_sentence(who: str, num_oom_kills: int) -> str:
    """What is known of a run before this one that did not come to its end."""
    because = "it was killed, or its machine stopped"
    if num_oom_kills:
        because = (
            f"it was killed, most likely because memory ran out (the kernel has ended "
            f"{num_oom_kills:,} processes of this control group for that)"
        )
    return (
        f"the run before this one ({who}) did not come to its end: {because}; what it committed is "
        f"kept. Should memory be short, lower --batch-size or --kv-tokens"
    )


def _bear(table: Table, most: int | None) -> None:
    """Gives up where as many rows failed in this run as it may bear."""
    if most is not None and table.num_new_errors >= most:
        raise TooManyFailuresError(
            f"given up after {table.num_new_errors:,} error rows (--abort-after-failures "
            f"{most:,}); what was done is committed: mend the cause and run again with --retry "
            f"error, or allow more"
        )
