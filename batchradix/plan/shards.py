"""The plan cut into ranges for several workers, each about as much work as the others.

A range of plan positions is a set of whole subtrees beside the path at which it begins, so what a
cut before position ``k`` costs is that path, computed once more: ``lcp[k]`` tokens. Cuts are put
where that is least, as far as no worker gets noticeably more to do than the best split leaves it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from batchradix.scratch import Scratch
from batchradix.types import I32, I64, Plan

EXPECTED_ANSWER_TOKENS = 128
"""How long an answer is taken to be, where it may be longer: most end long before they must."""

SLACK = 0.02
"""How much more than the best split leaves the busiest worker it may get, to duplicate less."""

_ATTENTION_TOKENS = 4096  # before a token, to attend to which costs as much as all its layers do


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSummary:
    """One shard of a job: its rows, their prompts' tokens, how many of them are computed, how many
    of these the shard before computes as well, and its part of the whole work (0 to 1)."""

    rows: int
    prompt_tokens: int
    distinct_tokens: int
    duplicated_tokens: int
    cost_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanShards:
    """A plan of ``n`` rows split into ``k`` ranges.

    ``cuts``: int64[k + 1]; shard ``i`` has the plan positions ``[cuts[i], cuts[i + 1])``, none
    where there are fewer rows than shards. ``duplicated_tokens``: int64[k], tokens of its prompts
    that the shard before computes as well. ``costs``: float64[k], its work in tokens: those of
    prompts that it computes and those of its answers, each as much more than one as there is
    before it to attend to.
    """

    cuts: I64
    duplicated_tokens: I64
    costs: np.ndarray


def split_plan(
    plan: Plan,
    lengths: I64,
    answer_tokens: I32,
    num_shards: int,
    scratch: Scratch | None = None,
) -> PlanShards:
    """Splits a plan into ``num_shards`` ranges (at least 1); the same for the same arguments,
    wherever it is computed.

    ``lengths``: int64[num_rows], prompt tokens by table row; ``answer_tokens``: int32[num_rows],
    the most an answer may have. The busiest shard costs at most `SLACK` more than in the split into
    ranges that costs its busiest the least. Arrays of a value a row are made in ``scratch`` (None:
    in memory).
    """
    n = len(plan)
    ranges = _Ranges(plan, lengths, answer_tokens, scratch or Scratch(least_bytes=None))
    cuts = np.full(num_shards + 1, n, dtype=np.int64)
    cuts[0] = 0
    used = min(num_shards, n)
    if used > 1:
        cuts[1:used] = ranges.cuts(used)
    begins = cuts[:-1][cuts[:-1] < cuts[1:]]
    duplicated = np.zeros(num_shards, dtype=np.int64)
    duplicated[: len(begins)] = plan.lcp[begins]
    costs = np.diff(ranges.sums[cuts]) + _cost(duplicated)
    return PlanShards(cuts=cuts, duplicated_tokens=duplicated, costs=costs / _ATTENTION_TOKENS / 2)


def _cost(num_tokens: Any) -> Any:
    """Of computing so many tokens (int64, or an int) from the beginning, in units of which one
    token alone takes ``2 * _ATTENTION_TOKENS``. Integers, so that every machine splits alike."""
    return num_tokens * (2 * _ATTENTION_TOKENS) + num_tokens * num_tokens


class _Ranges:
    """What ranges of a plan cost: ``[a, b)`` takes ``sums[b] - begins[a]``, where ``begins[a]`` is
    ``sums[a]`` less what the path costs with which the range begins."""

    def __init__(self, plan: Plan, lengths: I64, answer_tokens: I32, scratch: Scratch) -> None:
        self._lcp = plan.lcp
        self.sums: I64 = scratch.zeros(len(plan) + 1, np.int64)
        self.begins: I64 = scratch.zeros(len(plan), np.int64)
        self._furthest: I64 = scratch.zeros(len(plan), np.int64)  # the largest of begins[: k + 1]
        self._largest_row = furthest = 0
        for part in scratch.windows(len(plan)):
            rows = plan.order[part]
            shared = plan.lcp[part].astype(np.int64)
            own = np.asarray(lengths)[rows].astype(np.int64)
            answers = np.asarray(answer_tokens)[rows].astype(np.int64)
            whole = _cost(own + np.minimum(answers, EXPECTED_ANSWER_TOKENS))
            self._largest_row = max(self._largest_row, int(whole.max()))
            before = int(self.sums[part.start])
            sums = before + np.cumsum(whole - _cost(shared))
            self.sums[part.start + 1 : part.stop + 1] = sums
            begins = np.append(before, sums[:-1]) - _cost(shared)
            self.begins[part] = begins
            self._furthest[part] = np.maximum.accumulate(np.append(furthest, begins))[1:]
            furthest = int(self._furthest[part.stop - 1])

    def cuts(self, count: int) -> I64:
        """int64[count - 1]: where ``count`` ranges part; there are as many rows at least."""
        most = int(self._least_most(count) * (1 + SLACK))
        n = len(self._lcp)
        # From targets[j] on, j ranges can hold all that is left; to be reached by the one before.
        targets = [n]
        while len(targets) < count:
            targets.append(self._first_from_which(targets[-1], most))
        found = []
        begin = 0
        for left in range(count - 1, 0, -1):
            stop = min(self._reach(int(self.begins[begin]), most), n - left)
            places = np.arange(begin + 1, stop + 1)
            places = places[self.begins[places] >= self.sums[targets[left - 1]] - most]
            shared = self._lcp[places]
            least = int(shared.min())
            places = places[shared == least]
            # The ranges behind are likely to begin with as much again.
            rest = int(self.sums[n] - self.begins[begin]) + left * _cost(least)
            even = rest / (left + 1)
            off = np.abs(self.sums[places] - self.begins[begin] - even)
            begin = int(places[off.argmin()])
            found.append(begin)
        return np.array(found, dtype=np.int64)

    def _least_most(self, count: int) -> int:
        """What the busiest of ``count`` ranges costs at least."""
        total = int(self.sums[-1])
        low, high = max(self._largest_row, total // count), total
        while low < high:
            middle = (low + high) // 2
            if self._is_enough(count, middle):
                high = middle
            else:
                low = middle + 1
        return low

    def _is_enough(self, count: int, most: int) -> bool:
        """Whether ``count`` ranges that cost ``most`` or less can hold the plan.

        Of all places that a range can end at, the one from which the next gets furthest is as good
        as any other, so nothing has to be tried out.
        """
        begin = 0
        for _ in range(count):
            stop = self._reach(begin, most)
            if stop == len(self._lcp):
                return True
            begin = int(self._furthest[stop])
        return False

    def _reach(self, begin: int, most: int) -> int:
        """The last place up to which a range of that ``begins`` value costs ``most`` or less."""
        return int(np.searchsorted(self.sums, begin + most, side="right")) - 1

    def _first_from_which(self, target: int, most: int) -> int:
        """The first place from which a range can get to ``target``."""
        return int(np.searchsorted(self._furthest, self.sums[target] - most))
