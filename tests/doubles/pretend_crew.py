"""Workers without processes and models, for tests of what drives them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from random import Random

from batchradix.fleet.crew import Lost, Report
from batchradix.types import Completion, EngineJob, FinishReason, Usage

Row = tuple[int, ...]


class _Pretend:
    """A worker that remembers every prefix it has computed, and finishes one row a report."""

    def __init__(self) -> None:
        self.prefixes: set[Row] = set()
        self.waiting: deque[tuple[int, int, Row]] = deque()
        self.usage = Usage()
        self.num_steps = 0
        self.is_new = True


class PretendCrew:
    """A `fleet.crew.Crew` of ``num_workers``. Which of them has news is drawn by ``seed``, worker
    ``i`` as often as ``pace[i]`` says. ``dies(worker, tokens)`` says whether a worker is lost as it
    comes to a row; ``hangs`` are workers that take no step. ``ran`` counts rows by their
    tokens, ``sent`` are the numbers of rows of each part by worker, ``starts`` how often each was
    started.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        seed: int = 0,
        pace: Sequence[float] | None = None,
        dies: Callable[[int, Row], bool] = lambda worker, tokens: False,
        hangs: set[int] | None = None,
    ) -> None:
        self.num_workers = num_workers
        self.hangs = hangs or set()
        self.ran: Counter[Row] = Counter()
        self.sent: list[list[int]] = [[] for _ in range(num_workers)]
        self.jobs: list[tuple[int, EngineJob]] = []
        self.starts = [0] * num_workers
        self.closed = False
        self.computed_tokens = 0
        self._random = Random(seed)
        self._pace = pace or [1.0] * num_workers
        self._dies = dies
        self._workers: dict[int, _Pretend] = {}

    def start(self, worker: int) -> None:
        self.starts[worker] += 1
        self._workers[worker] = _Pretend()

    def send(self, worker: int, part: int, job: EngineJob) -> None:
        assert worker in self._workers, "sent to a worker that is not there"
        self.sent[worker].append(len(job.plan))
        self.jobs.append((worker, job))
        rows = [(part, row, tuple(job.tokens[row].tolist())) for row in job.plan.order.tolist()]
        self._workers[worker].waiting.extend(rows)

    def wait(self, timeout_s: float) -> list[tuple[int, Report | Lost]]:
        new = [number for number, one in self._workers.items() if one.is_new]
        busy = [number for number, one in self._workers.items() if one.waiting] or new
        if not busy:
            return []
        chosen = new or self._random.choices(busy, [self._pace[number] for number in busy])
        number = chosen[0]
        worker = self._workers[number]
        if worker.is_new or number in self.hangs:
            worker.is_new = False
            return [(number, self._report(worker))]
        part, row, tokens = worker.waiting.popleft()
        if self._dies(number, tokens):
            del self._workers[number]
            return [(number, Lost("it was killed"))]
        worker.num_steps += 1
        self._compute(worker, tokens)
        self.ran[tokens] += 1
        return [(number, self._report(worker, (part, _completion(row, tokens))))]

    def _compute(self, worker: _Pretend, tokens: Row) -> None:
        new = {tokens[: i + 1] for i in range(len(tokens))} - worker.prefixes
        worker.prefixes |= new
        worker.usage.computed_tokens += len(new)
        self.computed_tokens += len(new)

    def _report(self, worker: _Pretend, *completions: tuple[int, Completion]) -> Report:
        return Report(
            completions=completions,
            usage=Usage(computed_tokens=worker.usage.computed_tokens),
            num_steps=worker.num_steps,
        )

    def kill(self, worker: int) -> None:
        del self._workers[worker]

    def close(self) -> None:
        self.closed = True


def _completion(row: int, tokens: Row) -> Completion:
    return Completion(
        job_id=-1,
        row=row,
        token_ids=tokens,
        text="",
        finish_reason=FinishReason.STOP,
        completion_tokens=len(tokens),
    )
