"""An engine without a model that some rows are too much for, for tests of real processes."""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from batchradix.types import Completion, EngineJob, FinishReason, Usage

POISON, SLEEP = 77, 88


@dataclass(frozen=True)
class BrittleEngines:
    """Makes a `BrittleEngine`; it writes the process's number and node into ``folder``."""

    folder: Path

    def __call__(self) -> BrittleEngine:
        import ray

        node = ray.get_runtime_context().get_node_id()
        (self.folder / f"engine-{os.getpid()}").write_text(node)
        return BrittleEngine(self.folder)


class BrittleEngine:
    """Answers a row a step with its own tokens. Its process ends at a row that ends in `POISON`,
    and sleeps for long at the first in all processes that ends in `SLEEP`."""

    context_length = 99
    notices = ("it is brittle",)

    def __init__(self, folder: Path) -> None:
        self.usage = Usage()
        self._folder = folder
        self._waiting: deque[tuple[int, int, tuple[int, ...]]] = deque()
        self._next_job_id = 0

    def submit(self, job: EngineJob) -> int:
        rows = [(row, tuple(job.tokens[row].tolist())) for row in job.plan.order.tolist()]
        self._waiting.extend((self._next_job_id, *row) for row in rows)
        self._next_job_id += 1
        return self._next_job_id - 1

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def step(self) -> list[Completion]:
        job_id, row, tokens = self._waiting.popleft()
        if tokens[-1] == POISON:
            os._exit(1)
        if tokens[-1] == SLEEP:
            try:
                (self._folder / "slept").touch(exist_ok=False)
                time.sleep(600)
            except FileExistsError:
                pass
        time.sleep(0.01)
        self.usage.forward_steps += 1
        return [
            Completion(
                job_id=job_id,
                row=row,
                token_ids=tokens,
                text="",
                finish_reason=FinishReason.STOP,
                completion_tokens=len(tokens),
            )
        ]

    def close(self) -> None:
        self._waiting.clear()
