"""What a sample says of the whole job: tokens, time and cost.

Prompts need no guess: the whole job is read and planned, so what its prompts hold, share and have
to be computed is known to the token. Guessed are the answers, from the mean of the sample's, and
the time: where the sample's steps were too few to simulate the whole job by (see
`pipeline.forecasts`), in proportion to that of its prompt tokens and of its decode steps.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from batchradix.types import Usage


@dataclass(slots=True)
class WorkTimes:
    """Adds up how long the steps of a run took that had prompt tokens in them, and the others."""

    _last_s: float
    _computed: int = 0
    _decoded: int = 0
    _mixed_s: float = 0.0
    _mixed_decoded: int = 0
    _decode_s: float = 0.0
    _decode_only: int = 0

    def begin(self, now_s: float) -> None:
        """Lets the first step begin now."""
        self._last_s = now_s

    def after_step(self, usage: Usage, now_s: float) -> None:
        """``usage``: the engine's counters after the step that ended at ``now_s``."""
        computed = usage.computed_tokens + usage.recomputed_tokens + usage.loaded_tokens
        took_s, self._last_s = now_s - self._last_s, now_s
        decoded, self._decoded = usage.decode_steps - self._decoded, usage.decode_steps
        if computed > self._computed:
            self._mixed_s += took_s
            self._mixed_decoded += decoded
        else:
            self._decode_s += took_s
            self._decode_only += decoded
        self._computed = computed

    def shares(self) -> tuple[float, float]:
        """Seconds for prompt tokens and for decode steps. A decode step beside prompt tokens is
        taken to be as long as one without; where there are none without, as long as a token."""
        if self._decode_only:
            a_step_s = self._decode_s / self._decode_only
        else:
            a_step_s = self._mixed_s / max(1, self._computed + self._decoded)
        beside_s = min(self._mixed_s, a_step_s * self._mixed_decoded)
        return self._mixed_s - beside_s, self._decode_s + beside_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is to be done, or was: rows that run, prompt tokens computed for them, decode steps."""

    rows: int
    computed_tokens: int
    decode_steps: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The whole job of which ``sampled_rows`` rows ran.

    ``prompt_tokens``, ``opening_tokens`` (forced beginnings of answers), ``distinct_tokens`` and
    ``computed_tokens`` (as long as the cache holds what is shared) are those of its plan, exact.
    ``completion_tokens`` are a guess, right within ``completion_tokens_error`` in 95 of 100
    samples where answers are not too odd. ``seconds`` is the time of one run of it here, loading
    and planning included, None where the sample had nothing to compute; ``cost`` that time at
    ``price_per_hour``.
    """

    rows: int
    sampled_rows: int
    prompt_tokens: int
    opening_tokens: int
    distinct_tokens: int
    computed_tokens: int
    completion_tokens: int
    completion_tokens_error: int
    seconds: float | None
    price_per_hour: float | None
    cost: float | None

    def to_json(self) -> dict[str, Any]:
        """The object under ``estimate`` that ``--json`` prints."""
        return asdict(self)

    def lines(self) -> list[tuple[str, str]]:
        """Name and value pairs for a person."""
        text = (
            f"{self.rows:,} rows: {self.prompt_tokens:,} prompt tokens, "
            f"{self.computed_tokens:,} to compute; about {self.completion_tokens:,} answer tokens "
            f"(± {self.completion_tokens_error:,})"
        )
        lines = [("whole job", text)]
        if self.seconds is None:
            lines.append(("its time", "not known: no row of the sample was computed in this run"))
        else:
            digits = 2 if self.cost is None or self.cost >= 1 else 4
            cost = "" if self.cost is None else f", {self.cost:,.{digits}f}"
            cost += "" if self.cost is None else f" at {self.price_per_hour:g} an hour"
            lines.append(("its time", f"about {lasting(self.seconds)} here{cost}"))
        return lines


def guess_answers(lengths: tuple[int, int, int], num_runnable: int) -> tuple[int, int]:
    """The answer tokens of ``num_runnable`` rows, and the half width of their 95 % interval, from a
    sample's count, sum and sum of squares of answer tokens."""
    count, total, squares = lengths
    if not count:
        return 0, 0
    mean = total / count
    spread = 0.0
    if 1 < count < num_runnable:
        variance = max(0.0, (squares - count * mean * mean) / (count - 1))
        spread = 1.96 * num_runnable * math.sqrt(variance / count * (1 - count / num_runnable))
    return round(mean * num_runnable), round(spread)


def guess_seconds(sample: Work, whole: Work, times: WorkTimes) -> float | None:
    """How long ``whole`` takes, where ``sample`` took ``times``; None where nothing was measured.

    As many rows as in the sample are taken to run at once: a whole job that fills batches better
    is faster."""
    if not sample.rows:
        return None
    prompt_s, decode_s = times.shares()
    by_rows = whole.rows / sample.rows

    def ratio(all_of_it: float, some: float) -> float:
        return all_of_it / some if some else by_rows

    return prompt_s * ratio(whole.computed_tokens, sample.computed_tokens) + decode_s * ratio(
        whole.decode_steps, sample.decode_steps
    )


def lasting(seconds: float) -> str:
    """A time in words."""
    if seconds < 120:
        return f"{seconds:,.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:,.0f} min"
    return f"{seconds / 3600:,.1f} h"
