"""Where the time of one step goes."""

from __future__ import annotations

import time

PARTS = ("schedule_s", "forward_s", "mask_s", "sample_s", "collect_s")


class Stopwatch:
    """Started with the step; each lap counts for one of its `PARTS` (see `types.StepStats`).

    ``seconds``: what each part took, 0 for one that did not come up.
    """

    __slots__ = ("_lap_s", "seconds", "started_s")

    def __init__(self) -> None:
        self.started_s = self._lap_s = time.perf_counter()
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def lap(self, part: str) -> None:
        """Counts the time since the last lap for ``part``."""
        now_s = time.perf_counter()
        self.seconds[part] += now_s - self._lap_s
        self._lap_s = now_s

    def without_s(self, part: str) -> float:
        """Seconds of all laps but those of ``part``."""
        return self._lap_s - self.started_s - self.seconds[part]
