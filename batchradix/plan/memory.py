"""What a job's prompts share by how much memory keeps it, exactly and from the plan alone.

In the order of the plan all that a row finds of earlier prompts is the beginning it shares with the
row before. A cache of ``m`` tokens beside the row that runs keeps the first ``m`` of them, and no
way to choose what is kept finds more. So a row finds ``min(lcp, m)`` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchradix.scratch import windows
from batchradix.types import I64, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurve:
    """``found_tokens``: int64[needed + 1], prompt tokens that are found instead of computed where
    that many tokens are kept; more than ``needed_tokens`` find no more. ``num_tokens``: all tokens
    of the planned rows."""

    found_tokens: I64
    num_tokens: int

    @property
    def needed_tokens(self) -> int:
        """The least that has to be kept to compute no token twice."""
        return len(self.found_tokens) - 1

    def share(self, kept_tokens: int) -> float:
        """The share of prompt tokens (0 to 1) that are found where so many are kept."""
        found = int(self.found_tokens[min(kept_tokens, self.needed_tokens)])
        return found / self.num_tokens if self.num_tokens else 0.0

    def points(self) -> list[tuple[int, float]]:
        """The curve at powers of two, and at its end: tokens kept, share found."""
        powers = [1 << bit for bit in range(self.needed_tokens.bit_length())]
        places = sorted({*powers, self.needed_tokens} - {0})
        return [(tokens, self.share(tokens)) for tokens in places]


def memory_curve(plan: Plan, lengths: I64) -> MemoryCurve:
    """The curve of a plan's rows, run one after the other. ``lengths``: int64[num_rows], tokens by
    table row."""
    counts = np.zeros(1, dtype=np.int64)
    num_tokens = 0
    for part in windows(len(plan)):
        some = np.bincount(plan.lcp[part], minlength=len(counts))
        some[: len(counts)] += counts
        counts = some
        num_tokens += int(np.asarray(lengths)[plan.order[part]].sum(dtype=np.int64))
    # The m-th token kept is found by each row that shares as many with the row before.
    finders = np.cumsum(counts[::-1])[::-1]
    found = np.cumsum(np.append(0, finders[1:]))
    return MemoryCurve(found_tokens=found, num_tokens=num_tokens)
