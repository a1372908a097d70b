"""Workers as Ray actors, one process each, on a Ray of their own or on a cluster."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from batchradix.errors import BatchradixError
from batchradix.fleet.crew import Lost, Report
from batchradix.fleet.worker import Worker
from batchradix.types import Engine, EngineJob

_REPORT_EVERY_S = 1.0
_CALLS_AT_ONCE = 8  # of one actor: `report` waits while `submit` comes in


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a worker gets of a machine: CPU threads, GPUs, and how many workers share it."""

    num_threads: int
    num_gpus: int
    num_sharing: int


class WorkerActor:
    """A `Worker` in a process of its own, which Ray starts."""

    def __init__(self, make_engine: Callable[[], Engine]) -> None:
        # Before torch loads: threads that spin while they wait stall on busy cores.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        self._worker = Worker(make_engine)

    def ready(self) -> Report:
        return self._worker.ready()

    def report(self, timeout_s: float) -> Report:
        return self._worker.report(timeout_s)

    def submit(self, part: int, job: EngineJob) -> None:
        self._worker.submit(part, job)


class RayCrew:
    """A `Crew` of Ray actors. ``make_engine`` is called in each of them; ``end`` when all have
    been ended. Ray must be started."""

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        num_workers: int,
        place: Place,
        end: Callable[[], None],
    ) -> None:
        import ray

        self._ray = ray
        self._num_workers = num_workers
        self._end = end
        self._make_engine = ray.put(make_engine)
        self._actor = ray.remote(
            num_cpus=place.num_threads,
            num_gpus=place.num_gpus,
            max_concurrency=_CALLS_AT_ONCE,
            max_restarts=0,
            scheduling_strategy="SPREAD",
        )(WorkerActor)
        self._actors: dict[int, Any] = {}
        self._calls: dict[Any, int] = {}  # what each worker was asked last
        self._is_ready: set[int] = set()
        self._is_closed = False

    @property
    def num_workers(self) -> int:
        return self._num_workers

    def start(self, worker: int) -> None:
        """Starts an actor; Ray waits until the cluster has room for it."""
        self._is_ready.discard(worker)
        self._actors[worker] = self._actor.remote(self._make_engine)
        self._calls[self._actors[worker].ready.remote()] = worker

    def send(self, worker: int, part: int, job: EngineJob) -> None:
        """Sends a part; whether it arrived shows in what comes back."""
        self._actors[worker].submit.remote(part, job)

    def wait(self, timeout_s: float) -> list[tuple[int, Report | Lost]]:
        """The reports that have come, and who was lost. Raises what `WorkerActor.ready` raised."""
        done, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=timeout_s)
        if done:
            done, _ = self._ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
        return [self._news(call, self._calls.pop(call)) for call in done]

    def _news(self, call: Any, worker: int) -> tuple[int, Report | Lost]:
        from ray.exceptions import RayError, RayTaskError

        try:
            report: Report = self._ray.get(call)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            if worker not in self._is_ready and isinstance(cause, BatchradixError):
                raise cause from None
            self.kill(worker)
            return worker, Lost(f"{type(cause).__name__}: {_first_line(cause)}")
        except RayError as error:
            self.kill(worker)
            # What creating it raised stands at the end of what Ray says, else there are but hints.
            began = worker in self._is_ready or "creation task" not in str(error)
            last = str(error).strip().splitlines()[-1].strip()
            return worker, Lost("its process ended" if began else f"it did not begin: {last}")
        self._is_ready.add(worker)
        self._calls[self._actors[worker].report.remote(_REPORT_EVERY_S)] = worker
        return worker, report

    def kill(self, worker: int) -> None:
        """Ends an actor's process; what it was asked is forgotten."""
        self._calls = {call: one for call, one in self._calls.items() if one != worker}
        self._ray.kill(self._actors.pop(worker))

    def close(self) -> None:
        """Ends all actors, and a Ray that was started for them; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            for worker in list(self._actors):
                self.kill(worker)
        finally:
            self._end()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"
