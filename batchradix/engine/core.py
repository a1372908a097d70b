"""The engine: planned jobs in, completions out; one forward pass a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol

import numpy as np
import torch

from batchradix.checkpoint.checkpoint import Checkpoint
from batchradix.engine.accelerator import Accelerator, open_accelerator
from batchradix.engine.answer import Answer
from batchradix.engine.answer_maker import AnswerMaker
from batchradix.engine.attention.registry import missing_kernels
from batchradix.engine.cache.spill import open_space
from batchradix.engine.cache.store import open_store
from batchradix.engine.cache.tiers import Tiers
from batchradix.engine.draft import DraftedPlace
from batchradix.engine.flight import Flight
from batchradix.engine.grammar.choices import CompiledChoices
from batchradix.engine.grammar.compiler import GrammarCompiler
from batchradix.engine.grammar.limits import AnswerLimits
from batchradix.engine.grammar.state import AnyGrammar
from batchradix.engine.model_runner import ModelRunner, forward_retreat
from batchradix.engine.row import RunningRow
from batchradix.engine.sampling import SampledTokens
from batchradix.engine.scheduler import RefusedRow, Schedule, Scheduler
from batchradix.engine.scored import ScoredAnswer
from batchradix.engine.selection import Choice, Logits, Selector
from batchradix.engine.speculation import Speculator
from batchradix.engine.step import Step
from batchradix.engine.stopwatch import Stopwatch
from batchradix.errors import RowError, RowErrorCode, SchemaError
from batchradix.settings import EngineSettings
from batchradix.types import (
    Completion,
    Detokenizer,
    EngineJob,
    FinishReason,
    GrammarSpec,
    RequestTable,
    StepObserver,
    StepStats,
    Usage,
)


class Runner(Logits, Protocol):
    """What executes steps: `ModelRunner`, or a test's double."""

    @property
    def num_slots(self) -> int:
        """Of its KV pool."""
        ...

    @property
    def notices(self) -> list[str]: ...

    def launch(self, step: Step, chosen: torch.Tensor | None = None) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class _Job:
    """What the rows of a job need when they are admitted; dropped with the last of them."""

    requests: RequestTable
    grammars: tuple[AnyGrammar | None, ...]  # by settings id
    limits: dict[GrammarSpec, AnswerLimits]
    num_unfinished: int


class RadixEngine:
    """Runs jobs over one model, KV pool and radix cache; implements `types.Engine` and
    `types.Observable`.

    ``grammars`` may be handed in when schemas were compiled before; ``clock`` (seconds) decides
    which rows took longer than ``settings.row_timeout_s``. Raises `ModelError` when
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
        accelerator: Accelerator | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = checkpoint.config
        tokenizer = checkpoint.tokenizer
        self._context_length = config.context_length
        self._eos_ids = frozenset(tokenizer.eos_ids)
        self._grammars = grammars or GrammarCompiler(
            tokenizer, config.vocab_size, tokenizer.eos_ids
        )
        self._repetition_guard = settings.repetition_guard
        self._forced = self._grammars.forced if settings.forced_text else None
        self._speculator = Speculator(
            settings.speculate,
            token_bytes=tokenizer.token_bytes,
            eos_ids=self._eos_ids,
            forced=self._forced,
        )
        accelerator = accelerator or open_accelerator(torch.device(settings.device))
        self._selector = Selector(config.vocab_size, tokenizer.vocab_size, accelerator)
        self._overlap = settings.overlap
        self._flight: Flight | None = None
        self._usage = Usage()
        self._maker = AnswerMaker(
            eos_ids=self._eos_ids,
            detokenizer=detokenizer,
            forced=self._forced,
            usage=self._usage,
            has_guard=settings.repetition_guard,
        )
        self._missing = missing_kernels(settings.attention, settings.device)
        self._store = open_store(checkpoint, settings)
        self._space = open_space(checkpoint, settings)
        self._row_timeout_s = settings.row_timeout_s
        self._clock = clock
        self._next_job_id = 0
        self._jobs: dict[int, _Job] = {}
        self._answers: dict[int, Answer] = {}  # by the row's seq
        self._observer: StepObserver | None = None
        self._retreat = forward_retreat()
        runner = runner or ModelRunner(
            checkpoint, settings, self._store, self._space, self._retreat, accelerator
        )
        self._runner: Runner | None = runner
        self._scheduler = Scheduler(
            num_slots=runner.num_slots,
            batch_size=settings.batch_size,
            prefill_tokens=settings.prefill_tokens,
            prefix_cache=settings.prefix_cache,
            usage=self._usage,
            tiers=Tiers(self._store, self._space),
        )

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
    def notices(self) -> list[str]:
        """What slows this engine down, or went wrong with the tiers below the KV pool."""
        runner = self._runner
        sources = (self._store, self._space, self._retreat, self._selector.retreat, runner)
        texts = [text for source in sources if source is not None for text in source.notices]
        return texts if self._missing is None else [self._missing, *texts]

    @property
    def has_work(self) -> bool:
        """Whether a submitted row has no completion yet."""
        return self._runner is not None and self._scheduler.has_work

    def observe(self, observer: StepObserver | None) -> None:
        """Hands `StepStats` of every further step to ``observer``; None ends that."""
        self._observer = observer

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
        """One forward pass at most; the rows it finished, and rows that cannot run at all.

        With overlap the pass is launched while the tokens of the one before are still being
        chosen, and it is those that are read before this returns.
        """
        assert self._runner is not None, "the engine is closed"
        watch, began_s = Stopwatch(), self._clock()
        completions: list[Completion] = []
        begun = self._rows_begun()
        ahead = self._flight is not None and self._go_ahead(self._flight)
        if not ahead:
            completions += self._land(watch)
            self._draft()
        decision = self._scheduler.schedule()
        completions += [self._refuse(row) for row in decision.refused]
        for row in decision.admitted:
            self._answers[row.seq] = self._start(row)
        watch.lap("schedule_s")
        if decision.step is not None:
            chosen = None if self._flight is None else self._flight.chosen.token_ids
            self._runner.launch(decision.step, chosen)
            watch.lap("forward_s")
        completions += self._land(watch)
        if decision.step is not None:
            completions += self._choose(self._runner, decision, decision.step.num_tokens, watch)
            if not self._overlap:
                completions += self._land(watch)
        if self._row_timeout_s is not None:
            completions += self._time_out(begun, self._clock() - began_s, self._row_timeout_s)
        if not self._scheduler.has_work:
            self._flight = None  # all its rows took too long
        if self._observer is not None:
            self._observer(self._stats(decision, watch, len(completions)))
        return completions

    def _rows_begun(self) -> list[RunningRow]:
        """The rows that a step costs some of their time."""
        if self._row_timeout_s is None:
            return []
        return [row for row in self._scheduler.running if row.is_answering]

    def _go_ahead(self, flight: Flight) -> bool:
        """Lets the rows of a flight that surely get one token more go on with it unread; whether
        the next step can be scheduled before the tokens are there."""
        places = {
            row: place
            for place, row in flight.alone()
            if len(row.answer) < row.max_tail
            and not isinstance(self._answers.get(row.seq), ScoredAnswer | None)
        }
        return self._scheduler.go_ahead(places)

    def _choose(
        self, logits: Logits, decision: Schedule, num_tokens: int, watch: Stopwatch
    ) -> list[Completion]:
        """Lets a token be chosen wherever the launched step has one to choose; the rows that ended
        without. A row that went ahead has none where its last token was not all it got."""
        completions = []
        live = []
        for place, row in enumerate(decision.rows):
            answer = self._answers.get(row.seq)
            if answer is None or row.num_pending:
                continue
            if answer.output.finish_reason is None:
                live.append(place)
            else:  # its opening was the whole answer
                completions.append(self._finish(row))
        if live:
            rows = [decision.rows[place] for place in live]
            batch = self._selector.prepare(rows, self._choices(rows))
            watch.lap("mask_s")
            self._flight = Flight(
                rows=rows,
                chosen=self._selector.launch(logits, np.array(live, dtype=np.int64), batch),
                first_tokens=frozenset(row.seq for row in rows if not row.answer),
                num_tokens=num_tokens,
            )
            for row in rows:
                row.is_awaited = True
            watch.lap("sample_s")
        return completions

    def _land(self, watch: Stopwatch) -> list[Completion]:
        """Reads the tokens that are being chosen, if any are; the rows that ended with them."""
        flight, self._flight = self._flight, None
        if flight is None:
            return []
        sampled = flight.chosen.get()
        watch.lap("sample_s")
        self._speculator.note_step(flight.num_tokens, watch.without_s("schedule_s"))
        completions = self._take(flight, sampled)
        watch.lap("collect_s")
        return completions

    def _take(self, flight: Flight, sampled: SampledTokens) -> list[Completion]:
        """Appends each row's tokens and what they force; the rows that ended with them leave."""
        completions = []
        for row, group in groupby(range(len(flight.rows)), key=flight.rows.__getitem__):
            row.is_awaited = False
            if row.seq not in self._answers:  # it took too long
                continue
            if not self._take_row(row, list(group), sampled, row.seq in flight.first_tokens):
                completions.append(self._finish(row))
        return completions

    def _stats(self, decision: Schedule, watch: Stopwatch, num_finished: int) -> StepStats:
        return StepStats(
            started_s=watch.started_s,
            **watch.seconds,
            model_tokens=0 if decision.step is None else decision.step.num_tokens,
            running_rows=decision.num_running,
            waiting_rows=decision.num_waiting,
            finished_rows=num_finished,
            kv_tokens=decision.num_kv_tokens,
            usage=replace(self._usage),
        )

    def check(self) -> None:
        """AssertionError unless every KV slot has one owner and every lock a row; after a
        drain nothing is locked and only retained prefixes hold slots."""
        self._scheduler.check()
        if not self._scheduler.has_work:
            assert not self._answers, "an answer outlived its row"
            assert not self._jobs, "a job outlived its rows"
            assert self._flight is None, "a step outlived its rows"

    def close(self) -> None:
        """Releases weights and pool; idempotent. Unfinished rows get no completion."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None
        self._flight = None
        self._answers.clear()
        self._jobs.clear()

    def _time_out(
        self, begun: Sequence[RunningRow], took_s: float, most_s: float
    ) -> list[Completion]:
        """Charges a step to the rows whose answers had begun before it, and ends those that
        have had more than their time. Preempted rows wait, which costs them nothing."""
        late = []
        for row in begun:
            answer = self._answers.get(row.seq)
            if answer is None:  # it ended with this step
                continue
            answer.ran_s += took_s
            if answer.ran_s > most_s:
                answer.output.fail(_too_slow(answer.num_generated, most_s))
                late.append(self._finish(row))
        return late

    def _start(self, row: RunningRow) -> Answer:
        job = self._jobs[row.job_id]
        settings_id = int(job.requests.settings_id[row.row])
        compiled = job.grammars[settings_id]
        answer = self._maker.make(
            job.requests.settings[settings_id],
            rng_key=job.requests.rng_key[row.row],
            max_tokens=int(job.requests.max_tokens[row.row]),
            compiled=compiled,
            limits=None if compiled is None else job.limits[compiled.spec],
        )
        answer.open(row.opening)
        return answer

    def _limits(self, compiled: AnyGrammar) -> AnswerLimits:
        forced = self._grammars.forced
        return AnswerLimits(compiled, forced, repetition_guard=self._repetition_guard)

    def _take_row(
        self, row: RunningRow, places: Sequence[int], sampled: SampledTokens, is_first: bool
    ) -> bool:
        """Appends what was chosen at a row's places, as far as its draft came true and one
        token further; whether the row goes on."""
        answer = self._answers[row.seq]
        pieces = [] if row.draft is None else row.draft.pieces
        taken: list[int] = []
        num_drafted = num_true = 0
        if not is_first and not sampled.non_finite[places[0]]:
            self._usage.decode_steps += 1  # else the prompt's own last hidden state led to it
        for number, i in enumerate(places):
            if sampled.non_finite[i]:
                answer.output.fail(_no_token(bool(sampled.nothing_allowed[i])))
                break
            token_ids = answer.take(int(sampled.token_ids[i]))
            taken += token_ids
            if number == len(pieces):
                break
            if pieces[number][0] == token_ids[0]:
                num_true += 1
            if answer.output.finish_reason is not None or tuple(token_ids) != pieces[number]:
                break
            if row.draft is not None and row.draft.states[number] is None and answer.grammar:
                break  # its thinking ended, and what was guessed behind knew of no grammar
            num_drafted += len(token_ids)
        if row.draft is not None:
            self._speculator.note_checked(row, row.draft, num_true)
            self._usage.accepted_tokens += num_drafted
        if answer.output.finish_reason is not None:
            return False
        if answer.num_kept is not None:
            self._scheduler.rewind(row, answer.num_kept)
        self._scheduler.append(row, taken, num_drafted)
        return True

    def _draft(self) -> None:
        """Lets rows guess ahead for the next step."""
        rows = [(row, self._answers[row.seq]) for row in self._scheduler.running]
        self._speculator.draft(rows, self._scheduler.num_waiting_tokens)

    def _choices(self, rows: Sequence[RunningRow]) -> list[Choice]:
        """Where each row chooses: first its answer as it stands, then behind its draft's pieces."""
        choices: list[Choice] = []
        for row, group in groupby(rows):
            answer = self._answers[row.seq]
            choices.append(answer)
            for number, _ in enumerate(list(group)[1:]):
                assert row.draft is not None
                choices.append(
                    DraftedPlace(
                        settings=answer.settings,
                        rng_key=answer.rng_key,
                        grammar=row.draft.states[number],
                        num_generated=answer.num_generated + row.draft.places[number + 1],
                    )
                )
        return choices

    def _finish(self, row: RunningRow) -> Completion:
        answer = self._answers.pop(row.seq)
        output = answer.output
        assert output.finish_reason is not None
        self._speculator.forget(row)
        self._scheduler.finish(row)
        self._row_done(row.job_id)
        return Completion(
            job_id=row.job_id,
            row=row.row,
            token_ids=tuple(output.token_ids),
            text=output.text,
            finish_reason=output.finish_reason,
            completion_tokens=output.completion_tokens + answer.num_thought,
            error=output.error,
            cut_at=output.cut_at,
            choice_logprobs=answer.choice_logprobs if answer.settings.probabilities else None,
            reasoning=answer.reasoning,
            reasoning_tokens=answer.num_thought,
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
            self._speculator.forget_job(job_id)


def _no_choices() -> RowError:
    return RowError(
        RowErrorCode.ENGINE_FAILED,
        "probabilities and choosing by them need an answer out of a few; give such a schema",
    )


def _too_slow(num_tokens: int, most_s: float) -> RowError:
    return RowError(
        RowErrorCode.ROW_TIMEOUT,
        f"the answer had {num_tokens:,} tokens and no end after {most_s:g} s; raise "
        f"--row-timeout, or lower --max-tokens or --batch-size, and run again with --retry error",
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
