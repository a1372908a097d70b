"""An engine for tests of everything but the model: it answers each row at once."""

from __future__ import annotations

from collections.abc import Sequence

from batchradix.checkpoint.checkpoint import Checkpoint
from batchradix.schema.answer_format import AnswerFormat
from batchradix.settings import EngineSettings
from batchradix.types import Completion, EngineJob, FinishReason, GrammarSpec, Usage

TEXT = "yes"


class EchoEngine:
    """Implements `types.Engine`: every row's answer is `TEXT`, ``batch_size`` rows a step, in
    the order of the plan. Keeps nothing a row."""

    notices = ()

    def __init__(self, context_length: int, batch_size: int) -> None:
        self._context_length = context_length
        self._batch_size = batch_size
        self._usage = Usage()
        self._jobs: dict[int, tuple[EngineJob, int]] = {}
        self._next_job_id = 0

    @property
    def context_length(self) -> int:
        return self._context_length

    def submit(self, job: EngineJob) -> int:
        job_id, self._next_job_id = self._next_job_id, self._next_job_id + 1
        if len(job.plan):
            self._jobs[job_id] = job, 0
        return job_id

    def step(self) -> list[Completion]:
        if not self._jobs:
            return []
        job_id, (job, begin) = next(iter(self._jobs.items()))
        stop = min(begin + self._batch_size, len(job.plan))
        done = []
        for row, shared in zip(
            job.plan.order[begin:stop].tolist(), job.plan.lcp[begin:stop].tolist(), strict=True
        ):
            num_tokens = len(job.tokens[row])
            self._usage.computed_tokens += num_tokens - shared
            self._usage.cached_tokens += shared
            done.append(
                Completion(
                    job_id=job_id,
                    row=row,
                    token_ids=tuple(TEXT.encode()),
                    text=TEXT,
                    finish_reason=FinishReason.STOP,
                    completion_tokens=len(TEXT) + 1,
                )
            )
        self._usage.completion_tokens += len(done) * (len(TEXT) + 1)
        self._usage.forward_steps += 1
        if stop == len(job.plan):
            del self._jobs[job_id]
        else:
            self._jobs[job_id] = job, stop
        return done

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    @property
    def usage(self) -> Usage:
        return self._usage

    def close(self) -> None:
        self._jobs = {}


class EchoEngines:
    """A `pipeline.EngineMaker` of echo engines, for jobs without a schema."""

    def __init__(self, checkpoint: Checkpoint, schema: AnswerFormat | None = None) -> None:
        assert schema is None
        self._context_length = checkpoint.config.context_length

    def opening(self, spec: GrammarSpec) -> Sequence[int]:
        return ()

    def check_scores(self, spec: GrammarSpec) -> None: ...

    def __call__(self, settings: EngineSettings) -> EchoEngine:
        return EchoEngine(self._context_length, settings.batch_size)
