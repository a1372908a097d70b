"""What a user may ask for of several workers on Ray.

None of it changes what a row is answered, so none of it is part of a job's identity: a job that
was stopped goes on with another number of workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from batchradix.errors import OptionError

DEFAULT_WORKER_TIMEOUT_S = 900.0
MAX_WORKERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """``workers``: how many engines share the job, each in a process of its own; ``auto`` is one
    for each GPU, or one for each machine without any; None is this process alone. ``ray_address``:
    of the Ray cluster that they run on (``auto``: the one that this machine belongs to); None
    starts a Ray of its own that ends with the run. ``worker_timeout_s``: a worker that takes no
    step for so long is ended and replaced."""

    workers: int | Literal["auto"] | None = None
    ray_address: str | None = None
    worker_timeout_s: float = DEFAULT_WORKER_TIMEOUT_S

    def __post_init__(self) -> None:
        count = self.workers
        is_count = type(count) is int and 1 <= count <= MAX_WORKERS
        if count not in (None, "auto") and not is_count:
            raise OptionError(f"`workers` must be auto or from 1 to {MAX_WORKERS}, not {count!r}")
        address = self.ray_address
        if address is not None and (not isinstance(address, str) or not address):
            raise OptionError(f"`ray_address` must be the address of a cluster, not {address!r}")
        seconds = self.worker_timeout_s
        is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not is_number or not 0 < seconds <= 1e6:
            raise OptionError(
                f"`worker_timeout_s` must be a number of seconds above 0 (at most 1e6), not "
                f"{seconds!r}"
            )

    @property
    def is_wanted(self) -> bool:
        """Whether the job runs on workers at all."""
        return self.workers is not None or self.ray_address is not None

    @classmethod
    def parse(
        cls, workers: str | None, ray_address: str | None, worker_timeout_s: float | None
    ) -> FleetOptions:
        """From the command line's texts; raises `OptionError`."""
        count = int(workers) if workers is not None and workers.isdecimal() else workers
        return cls(
            workers=count,  # type: ignore[arg-type]  # checked above
            ray_address=ray_address,
            worker_timeout_s=(
                DEFAULT_WORKER_TIMEOUT_S if worker_timeout_s is None else worker_timeout_s
            ),
        )
