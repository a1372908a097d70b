"""What a step costs by the number of its tokens, learnt from the steps that were run."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

import numpy as np

_BUCKETS_AN_OCTAVE = 4
_KEPT_STEPS = 9  # of each size; their median is not moved by a few slow ones


class StepCost:
    """Seconds of a step as a function of its tokens: medians of like steps, never falling."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[tuple[int, float]]] = {}
        self._curve: tuple[list[float], list[float]] | None = None

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Notes a step that was run; ``num_tokens`` is at least 1."""
        bucket = round(_BUCKETS_AN_OCTAVE * math.log2(num_tokens))
        kept = self._seen.setdefault(bucket, deque(maxlen=_KEPT_STEPS))
        kept.append((num_tokens, seconds))
        self._curve = None

    def seconds(self, num_tokens: int) -> float:
        """What a step of so many tokens takes: between sizes seen a straight line, beyond the
        largest the slope over all. 0.0 before anything was seen."""
        if not self._seen:
            return 0.0
        sizes, seconds = self._measured()
        if num_tokens <= sizes[-1] or len(sizes) == 1:
            return float(np.interp(num_tokens, sizes, seconds))
        slope = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])
        return seconds[-1] + slope * (num_tokens - sizes[-1])

    def _measured(self) -> tuple[list[float], list[float]]:
        if self._curve is None:
            buckets = [self._seen[bucket] for bucket in sorted(self._seen)]
            sizes = [sum(n for n, _ in kept) / len(kept) for kept in buckets]
            medians = [median(s for _, s in kept) for kept in buckets]
            self._curve = sizes, np.maximum.accumulate(medians).tolist()
        return self._curve
