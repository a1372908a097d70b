"""An engine without a model, for tests of what is around the engine."""

from __future__ import annotations

from typing import Any

from batchradix.types import Completion, EngineJob, FinishReason, GrammarSpec, Usage


class InstantEngine:
    """A `types.Engine`, and its own `pipeline.EngineFactory` and `EngineMaker`.

    Answers one row a step, in the order of the input; subclasses say with which `text`, or with
    which `completion`. ``submitted`` are the rows it was asked for.
    """

    context_length = 512
    notices = ()

    def __init__(self) -> None:
        self.usage = Usage()
        self.submitted: list[int] = []
        self.closed = False
        self._waiting: list[int] = []

    def text(self, row: int) -> str:
        raise NotImplementedError

    def completion(self, row: int, **changes: Any) -> Completion:
        values: dict[str, Any] = {
            "job_id": 0,
            "row": row,
            "token_ids": (1,),
            "finish_reason": FinishReason.STOP,
            "completion_tokens": 1,
        }
        return Completion(**({"text": self.text(row)} | values | changes))

    def submit(self, job: EngineJob) -> int:
        self.job = job
        rows = sorted(job.plan.order.tolist())
        self._waiting = rows[::-1]
        self.submitted += rows
        return 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def step(self) -> list[Completion]:
        return [self.completion(self._waiting.pop())]

    def close(self) -> None:
        self.closed = True

    def opening(self, spec: GrammarSpec) -> tuple[int, ...]:
        return ()

    def check_scores(self, spec: GrammarSpec) -> None:
        return

    def __call__(self, *parts: object) -> Any:
        return self
