"""What runs in a worker's process: one engine, stepped by a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from queue import Empty, SimpleQueue

from batchradix.fleet.crew import Report
from batchradix.types import Completion, Engine, EngineJob, Usage


class Worker:
    """Makes an engine and steps it while parts are there; every method may be called from any
    thread.

    What the engine raises, while it is made or later, ``report`` raises.
    """

    def __init__(self, make_engine: Callable[[], Engine]) -> None:
        self._make_engine = make_engine
        self._parts: SimpleQueue[tuple[int, EngineJob] | None] = SimpleQueue()
        self._news = threading.Condition()
        self._completions: list[tuple[int, Completion]] = []
        self._usage = Usage()
        self._notices: tuple[str, ...] = ()
        self._num_steps = 0
        self._is_ready = False
        self._failure: BaseException | None = None
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def submit(self, part: int, job: EngineJob) -> None:
        """Queues a part."""
        self._parts.put((part, job))

    def ready(self) -> Report:
        """Waits until the engine is made; raises what that raised."""
        with self._news:
            self._news.wait_for(lambda: self._is_ready or self._failure is not None)
            return self._report()

    def report(self, timeout_s: float) -> Report:
        """What is new, as soon as rows are finished, or after ``timeout_s`` seconds."""
        with self._news:
            self._news.wait_for(lambda: self._completions or self._failure, timeout_s)
            return self._report()

    def _report(self) -> Report:
        if self._failure is not None and not self._completions:
            raise self._failure
        completions, self._completions = tuple(self._completions), []
        return Report(
            completions=completions,
            usage=self._usage,
            notices=self._notices,
            num_steps=self._num_steps,
        )

    def _run(self) -> None:
        try:
            engine = self._make_engine()
            with self._news:
                self._is_ready = True
                self._news.notify_all()
            self._step(engine)
        except BaseException as failure:
            with self._news:
                self._failure = failure
                self._news.notify_all()

    def _step(self, engine: Engine) -> None:
        parts: dict[int, int] = {}  # by job id
        while True:
            try:
                while (sent := self._parts.get(block=not engine.has_work)) is not None:
                    parts[engine.submit(sent[1])] = sent[0]
            except Empty:
                pass
            finished = [(parts[one.job_id], one) for one in engine.step()]
            with self._news:
                self._num_steps += 1
                self._completions += finished
                self._usage, self._notices = replace(engine.usage), tuple(engine.notices)
                if finished:
                    self._news.notify_all()
