"""The engine: planned jobs in, completions out; one forward pass a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from batchradix.checkpoint.checkpoint import Checkpoint
from batchradix.config import EngineSettings
from batchradix.engine.answer import Answer
from batchradix.engine.grammar.choices import CompiledChoices
from batchradix.engine.grammar.compiler import GrammarCompiler
from batchradix.engine.grammar.limits import AnswerLimits
from batchradix.engine.grammar.state import AnyGrammar, start
from batchradix.engine.model_runner import ModelRunner
from batchradix.engine.output import RowOutput
from batchradix.engine.row import RunningRow
from batchradix.engine.sampling import SampledTokens
from batchradix.engine.scheduler import RefusedRow, Scheduler
from batchradix.engine.scored import ScoredAnswer
from batchradix.engine.selection import Logits, Selector
from batchradix.engine.step import Step
from batchradix.errors import RowError, RowErrorCode, SchemaError
from batchradix.types import (
    Completion,
    Detokenizer,
    EngineJob,
    FinishReason,
    GrammarSpec,
    RequestTable,
    Usage,
)


class Runner(Logits, Protocol):
    """What executes steps: `ModelRunner`, or a test's double."""

    def launch(self, step: Step) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class _Job:
    """What the rows of a job need when they are admitted; dropped with the last of them."""

    requests: RequestTable
    grammars: tuple[AnyGrammar | None, ...]  # by settings id
    limits: dict[GrammarSpec, AnswerLimits]
    num_unfinished: int


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
        self._repetition_guard = settings.repetition_guard
        self._selector = Selector(config.vocab_size, tokenizer.vocab_size)
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
        self._answers: dict[int, Answer] = {}  # by the row's seq
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
        grammars: list[AnyGrammar | None] = []
        refused: dict[int, RowError] = {}
        for settings_id, settings in enumerate(job.requests.settings):
            compiled = None
            if settings.grammar is not None:
                try:
                    compiled = self._grammars.compile(settings.grammar)
                except SchemaError as error:
                    refused[settings_id] = RowError(RowErrorCode.ENGINE_FAILED, str(error))
            if settings.is_scored and not isinstance(compiled, CompiledChoices):
                refused.setdefault(settings_id, _no_choices())
            grammars.append(compiled)
        if len(job.plan):
            self._jobs[job_id] = _Job(
                requests=job.requests,
                grammars=tuple(grammars),
                limits={one.spec: self._limits(one) for one in grammars if one is not None},
                num_unfinished=len(job.plan),
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
            batch = self._selector.prepare(rows, [self._answers[row.seq] for row in rows])
            sources = np.flatnonzero(waits).astype(np.int64)
            sampled = self._selector.select(self._runner, sources, batch)
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

    def _start(self, row: RunningRow) -> Answer:
        job = self._jobs[row.job_id]
        settings_id = int(job.requests.settings_id[row.row])
        settings = job.requests.settings[settings_id]
        compiled = job.grammars[settings_id]
        output = RowOutput(
            settings=settings,
            max_tokens=int(job.requests.max_tokens[row.row]),
            eos_ids=self._eos_ids,
            detokenizer=self._detokenizer.start(),
            grammar=None if compiled is None else start(compiled),
            limits=None if compiled is None else job.limits[compiled.spec],
        )
        rng_key = job.requests.rng_key[row.row]
        answer: Answer
        if settings.is_scored and isinstance(compiled, CompiledChoices):
            answer = ScoredAnswer(
                settings=settings,
                rng_key=rng_key,
                output=output,
                usage=self._usage,
                choices=compiled,
                max_tokens=int(job.requests.max_tokens[row.row]),
            )
        else:
            answer = Answer(
                settings=settings,
                rng_key=rng_key,
                output=output,
                forced=self._grammars.forced if self._forced_text else None,
                usage=self._usage,
            )
        answer.open(row.opening)
        return answer

    def _limits(self, compiled: AnyGrammar) -> AnswerLimits:
        forced = self._grammars.forced
        return AnswerLimits(compiled, forced, repetition_guard=self._repetition_guard)

    def _take(self, rows: Sequence[RunningRow], sampled: SampledTokens) -> list[Completion]:
        """Appends each row's token and what it forces; the rows that ended with it leave."""
        completions = []
        for i, row in enumerate(rows):
            answer = self._answers[row.seq]
            if sampled.non_finite[i]:
                answer.output.fail(_no_token(bool(sampled.nothing_allowed[i])))
                completions.append(self._finish(row))
                continue
            if row.answer:  # else it came from the prompt's own last hidden state
                self._usage.decode_steps += 1
            token_ids = answer.take(int(sampled.token_ids[i]))
            if answer.output.finish_reason is None:
                if answer.num_kept is not None:
                    self._scheduler.rewind(row, answer.num_kept)
                self._scheduler.append(row, token_ids)
            else:
                completions.append(self._finish(row))
        return completions

    def _finish(self, row: RunningRow) -> Completion:
        answer = self._answers.pop(row.seq)
        output = answer.output
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
            cut_at=output.cut_at,
            choice_logprobs=answer.choice_logprobs if answer.settings.probabilities else None,
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


def _no_choices() -> RowError:
    return RowError(
        RowErrorCode.ENGINE_FAILED,
        "probabilities and choosing by them need an answer out of a few; give such a schema",
    )


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
