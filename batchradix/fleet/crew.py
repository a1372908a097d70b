"""What the driver of several workers and the workers say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from batchradix.types import Completion, EngineJob, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a worker did since its last report: ``completions``, each with the number of its part
    and the row's place in it. ``usage``, ``notices`` and ``num_steps`` are of its whole life."""

    completions: tuple[tuple[int, Completion], ...] = ()
    usage: Usage
    notices: tuple[str, ...] = ()
    num_steps: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker has ended and will not report again; why, in words without a full stop."""

    reason: str


class Crew(Protocol):
    """Workers by number; each has an engine of its own and runs the parts that it is sent."""

    @property
    def num_workers(self) -> int: ...

    def start(self, worker: int) -> None:
        """Starts a worker, or another in the place of one that is lost. Returns at once."""
        ...

    def send(self, worker: int, part: int, job: EngineJob) -> None:
        """Queues a part with a worker; of one that was lost meanwhile nothing is heard."""
        ...

    def wait(self, timeout_s: float) -> list[tuple[int, Report | Lost]]:
        """What workers have to say, nothing when none does in time; their first report says that
        they are ready. Raises what an engine cannot be made for."""
        ...

    def kill(self, worker: int) -> None:
        """Ends a worker at once; nothing is heard of it any more."""
        ...

    def close(self) -> None:
        """Ends all workers; idempotent."""
        ...
