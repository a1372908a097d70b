"""The engine: planned jobs in, completions out; one forward pass a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from batchradix.checkpoint.checkpoint import Checkpoint
from batchradix.config import EngineSettings
from batchradix.engine.candidates import find_candidates
from batchradix.engine.grammar.compiled import CompiledGrammar
from batchradix.engine.grammar.compiler import GrammarCompiler
from batchradix.engine.grammar.state import GrammarState, fill_batch
from batchradix.engine.model_runner import ModelRunner
from batchradix.engine.output import RowOutput
from batchradix.engine.row import RunningRow
from batchradix.engine.sampling import SampledTokens, Sampler, SamplingBatch
from batchradix.engine.scheduler import RefusedRow, Scheduler
from batchradix.engine.step import Step
from batchradix.errors import RowError, RowErrorCode, SchemaError
from batchradix.types import (
    I64,
    Completion,
    Detokenizer,
    EngineJob,
    FinishReason,
    RequestTable,
    RowSettings,
    Usage,
)


class Runner(Protocol):
    """What executes steps: `ModelRunner`, or a test's double."""

    def launch(self, step: Step) -> None: ...

    def collect(self, rows: I64 | None = None) -> torch.Tensor:
        """float32[len(rows), vocab_size], logits of the launched step; None for all rows."""
        ...

    def collect_few(self, rows: I64, token_ids: I64) -> torch.Tensor:
        """float32[len(rows), len(token_ids)], the logits of these tokens alone."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class _Job:
    """What the rows of a job need when they are admitted; dropped with the last of them."""

    requests: RequestTable
    grammars: tuple[CompiledGrammar | None, ...]  # by settings id
    num_unfinished: int


@dataclass(slots=True, kw_only=True)
class _Answer:
    """The answer of a running or preempted row."""

    settings: RowSettings
    rng_key: np.uint64
    output: RowOutput


class RadixEngine:
    """Runs jobs over one model, KV pool and radix cache; implements `types.Engine`.

    ``grammars`` may be handed in when schemas were compiled before. Raises `ModelError` when
    the weights cannot be loaded and `OutOfMemoryError` when they or the pool do not fit.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        settings: EngineSettings,
        detokenizer: Detokenizer,
        *,
        grammars: GrammarCompiler | None = None,
        runner: Runner | None = None,
    ) -> None:
        config = checkpoint.config
        tokenizer = checkpoint.tokenizer
        self._context_length = config.context_length
        self._eos_ids = frozenset(tokenizer.eos_ids)
        self._detokenizer = detokenizer
        self._grammars = grammars or GrammarCompiler(
            tokenizer, config.vocab_size, tokenizer.eos_ids
        )
        self._forced_text = settings.forced_text
        self._mask_words = -(-config.vocab_size // 32)
        self._sampler = Sampler(config.vocab_size, tokenizer.vocab_size)
        self._usage = Usage()
        self._scheduler = Scheduler(
            num_slots=settings.kv_tokens,
            batch_size=settings.batch_size,
            prefill_tokens=settings.prefill_tokens,
            prefix_cache=settings.prefix_cache,
            usage=self._usage,
        )
        self._next_job_id = 0
        self._jobs: dict[int, _Job] = {}
        self._answers: dict[int, _Answer] = {}  # by the row's seq
        self._runner: Runner | None = runner or ModelRunner(checkpoint, settings)

    @property
    def context_length(self) -> int:
        """Tokens that prompt and answer of one row may have together."""
        return self._context_length

    @property
    def scheduler(self) -> Scheduler:
        """Pool, cache and running rows, to look at."""
        return self._scheduler

    @property
    def usage(self) -> Usage:
        """Counters since the engine started; the live object."""
        return self._usage

    @property
    def has_work(self) -> bool:
        """Whether a submitted row has no completion yet."""
        return self._runner is not None and self._scheduler.has_work

    def submit(self, job: EngineJob) -> int:
        """Queues a job behind those submitted before and returns its id.

        Grammars are compiled here. Rows whose grammar is rejected get an error completion.
        """
        job_id = self._next_job_id
        self._next_job_id += 1
        grammars: list[CompiledGrammar | None] = []
        refused: dict[int, RowError] = {}
        for settings_id, settings in enumerate(job.requests.settings):
            compiled = None
            if settings.grammar is not None:
                try:
                    compiled = self._grammars.compile(settings.grammar)
                except SchemaError as error:
                    refused[settings_id] = RowError(RowErrorCode.ENGINE_FAILED, str(error))
            grammars.append(compiled)
        if len(job.plan):
            self._jobs[job_id] = _Job(
                requests=job.requests, grammars=tuple(grammars), num_unfinished=len(job.plan)
            )
        self._scheduler.submit(job_id, job, refused)
        return job_id

    def step(self) -> list[Completion]:
        """One forward pass at most; the rows it finished, and rows that cannot run at all."""
        assert self._runner is not None, "the engine is closed"
        decision = self._scheduler.schedule()
        completions = [self._refuse(row) for row in decision.refused]
        for row in decision.admitted:
            self._answers[row.seq] = self._start(row)
        if decision.step is None:
            return completions
        self._runner.launch(decision.step)
        # Rows whose opening was the whole answer have nothing to sample.
        waits = [self._answers[row.seq].output.finish_reason is None for row in decision.rows]
        for row, waiting in zip(decision.rows, waits, strict=True):
            if not waiting:
                completions.append(self._finish(row))
        if any(waits):
            rows = [row for row, waiting in zip(decision.rows, waits, strict=True) if waiting]
            batch = self._sampling_batch(rows)  # while a device computes
            sampled = self._sample(self._runner, np.flatnonzero(waits).astype(np.int64), batch)
            completions += self._take(rows, sampled)
        return completions

    def check(self) -> None:
        """AssertionError unless every KV slot has one owner and every lock a row; after a
        drain nothing is locked and only retained prefixes hold slots."""
        self._scheduler.check()
        if not self._scheduler.has_work:
            assert not self._answers, "an answer outlived its row"
            assert not self._jobs, "a job outlived its rows"

    def close(self) -> None:
        """Releases weights and pool; idempotent. Unfinished rows get no completion."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None
        self._answers.clear()
        self._jobs.clear()

    def _start(self, row: RunningRow) -> _Answer:
        job = self._jobs[row.job_id]
        settings_id = int(job.requests.settings_id[row.row])
        settings = job.requests.settings[settings_id]
        compiled = job.grammars[settings_id]
        output = RowOutput(
            settings=settings,
            max_tokens=int(job.requests.max_tokens[row.row]),
            eos_ids=self._eos_ids,
            detokenizer=self._detokenizer.start(),
            grammar=None if compiled is None else GrammarState(compiled),
        )
        self._force(output, row.opening)
        return _Answer(
            settings=settings,
            rng_key=job.requests.rng_key[row.row],
            output=output,
        )

    def _force(self, output: RowOutput, token_ids: Sequence[int]) -> list[int]:
        """Appends tokens that were not sampled until the answer ends; those appended."""
        appended: list[int] = []
        for token_id in token_ids:
            if output.finish_reason is not None:
                break
            output.push(token_id)
            appended.append(token_id)
        self._usage.forced_tokens += len(appended)
        self._usage.completion_tokens += len(appended)
        return appended

    def _sampling_batch(self, rows: Sequence[RunningRow]) -> SamplingBatch:
        answers = [self._answers[row.seq] for row in rows]
        states: list[GrammarState] = []
        masked = np.zeros(len(rows), dtype=np.bool_)
        for i, answer in enumerate(answers):
            if answer.output.grammar is not None:
                masked[i] = True
                states.append(answer.output.grammar)
        bitmask = None
        if states:
            bitmask = torch.empty((len(rows), self._mask_words), dtype=torch.int32)
            fill_batch(states, bitmask, np.flatnonzero(masked).tolist())
        return SamplingBatch(
            settings=[answer.settings for answer in answers],
            rng_key=np.array([answer.rng_key for answer in answers], dtype=np.uint64),
            num_generated=np.array([a.output.completion_tokens for a in answers], dtype=np.int64),
            prompt_ids=[row.prompt[: len(row.prompt) - row.num_forced] for row in rows],
            generated_ids=[answer.output.token_ids for answer in answers],
            bitmask=bitmask,
            masked_rows=masked,
        )

    def _sample(self, runner: Runner, sources: I64, batch: SamplingBatch) -> SampledTokens:
        """One token a row; ``sources``: int64[R], the rows' places in the launched step.

        Where a row's mask leaves few tokens, only their part of the output layer is computed.
        """
        sampler = self._sampler
        if batch.bitmask is None:
            return sampler.sample(runner.collect(sources), batch)
        found = find_candidates(batch.bitmask.numpy(), batch.masked_rows, sampler.num_choices)
        few, many = np.flatnonzero(found.is_few), np.flatnonzero(~found.is_few)
        if not len(few):
            return sampler.sample(runner.collect(sources), batch)
        logits = runner.collect_few(sources[few], found.token_ids)
        sampled = sampler.sample_among(logits, found.token_ids, batch.take(few))
        if not len(many):
            return sampled
        others = sampler.sample(runner.collect(sources[many]), batch.take(many))
        return sampled.beside(others, few, many)

    def _take(self, rows: Sequence[RunningRow], sampled: SampledTokens) -> list[Completion]:
        """Appends each row's token and what it forces; the rows that ended with it leave."""
        completions = []
        for i, row in enumerate(rows):
            output = self._answers[row.seq].output
            if sampled.non_finite[i]:
                output.fail(_no_token(bool(sampled.nothing_allowed[i])))
                completions.append(self._finish(row))
                continue
            token_id = int(sampled.token_ids[i])
            if row.answer:  # else it came from the prompt's own last hidden state
                self._usage.decode_steps += 1
            self._usage.completion_tokens += 1
            output.push(token_id)
            forced: Sequence[int] = ()
            if self._forced_text and output.finish_reason is None and output.grammar is not None:
                forced = self._force(output, self._grammars.forced.next_ids(output.grammar))
            if output.finish_reason is None:
                self._scheduler.append(row, [token_id, *forced])
            else:
                completions.append(self._finish(row))
        return completions

    def _finish(self, row: RunningRow) -> Completion:
        output = self._answers.pop(row.seq).output
        assert output.finish_reason is not None
        self._scheduler.finish(row)
        self._row_done(row.job_id)
        return Completion(
            job_id=row.job_id,
            row=row.row,
            token_ids=tuple(output.token_ids),
            text=output.text,
            finish_reason=output.finish_reason,
            completion_tokens=output.completion_tokens,
            error=output.error,
        )

    def _refuse(self, row: RefusedRow) -> Completion:
        self._row_done(row.job_id)
        return Completion(
            job_id=row.job_id,
            row=row.row,
            token_ids=(),
            text="",
            finish_reason=FinishReason.ERROR,
            completion_tokens=0,
            error=row.error,
        )

    def _row_done(self, job_id: int) -> None:
        job = self._jobs[job_id]
        job.num_unfinished -= 1
        if job.num_unfinished == 0:
            del self._jobs[job_id]


def _no_token(nothing_allowed: bool) -> RowError:
    if nothing_allowed:
        return RowError(
            RowErrorCode.ENGINE_FAILED,
            "the output grammar allows no token of the model here; simplify the schema",
        )
    return RowError(
        RowErrorCode.NON_FINITE_LOGITS,
        "the model computed NaN or infinity for this row; try --dtype float32",
    )
