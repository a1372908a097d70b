"""What keeps prompts from sharing more: places of a template before text that rows share.

Prompts are looked at field by field. Rows share a field's tokens where all fields before it are
the same too, so a field that differs from row to row breaks whatever comes behind it. What that
costs is measured by putting it last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from batchradix.types import I32, I64

_LEAST_SHARE = 0.01  # of all tokens, that a finding is worth telling


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """The fields of ``n`` prompts, ``k`` of them, in order: texts of the template, and places.

    ``codes``: int64[n, k], equal in a column for rows whose text is the same; ``tokens``: int32[n,
    k], about how many tokens it has. ``is_place``: bool[k].
    """

    codes: I64
    tokens: I32
    is_place: np.ndarray

    def __len__(self) -> int:
        return len(self.codes)

    def first(self, order: Sequence[int]) -> int:
        """Tokens to be computed where the fields stand in this order."""
        group = np.zeros(len(self), dtype=np.int64)
        num_groups, total = 1, 0
        for field in order:
            if not len(self):
                break
            if num_groups < len(self):
                keys = group * (int(self.codes[:, field].max()) + 1) + self.codes[:, field]
                _, firsts, group = np.unique(keys, return_index=True, return_inverse=True)
                num_groups = len(firsts)
                total += int(self.tokens[firsts, field].sum(dtype=np.int64))
            else:
                total += int(self.tokens[:, field].sum(dtype=np.int64))
        return total

    def num_values(self, field: int) -> int:
        return len(np.unique(self.codes[:, field]))

    def shareable(self, field: int) -> int:
        """Tokens of a field that would not have to be computed if it stood first."""
        return int(self.tokens[:, field].sum(dtype=np.int64)) - self.first([field])


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Fields that break what stands behind them, and about how many tokens that costs."""

    fields: tuple[int, ...]
    lost_tokens: int


def lint(fields: Fields) -> list[Finding]:
    """What breaks sharing, the dearest first; a hundredth of all tokens is the least told.

    Places go to the end one by one, those first that have the least to share; what the template
    has behind its last place stays there. A place that gains nothing until another has gone as well
    is told with it.
    """
    places = np.flatnonzero(fields.is_place).tolist()
    order = list(range(places[-1] + 1 if places else 0))
    start = list(order)
    places.sort(key=lambda field: (fields.shareable(field), -field))
    least = max(1, int(_LEAST_SHARE * int(fields.tokens.sum(dtype=np.int64))))
    before = fields.first(order)
    findings: list[Finding] = []
    waiting: list[int] = []
    moved: list[int] = []

    def without(kept: Sequence[int]) -> list[int]:
        """The order in which all but the places ``kept`` have moved."""
        last = [field for field in moved if field not in kept]
        return [field for field in start if field not in last] + last

    for place in places:
        was = list(order)
        moved.insert(0, place)
        order = without(())
        if order == was:
            continue
        waiting.append(place)
        gain = before - fields.first(order)
        if gain >= least:
            idle: list[int] = []  # had nothing to do with it
            for other in waiting[:-1]:
                if before - fields.first(without([*idle, other])) > gain - least:
                    idle.append(other)
            breaking = tuple(sorted(set(waiting) - set(idle)))
            findings.append(Finding(fields=breaking, lost_tokens=gain))
            before -= gain
            waiting = []
    return sorted(findings, key=lambda finding: -finding.lost_tokens)
