"""What a plan says about a job before it runs: shared prefixes, totals, memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from batchradix.plan.shards import ShardSummary
from batchradix.scratch import Scratch, windows
from batchradix.types import I32, I64, Plan, PlanTree, TokenTable


def shared_prefix(plan: Plan, num_rows: int, scratch: Scratch | None = None) -> I32:
    """int32[num_rows]: by table row, the prompt tokens an earlier row of the plan brings along.
    Made in ``scratch`` (None: in memory).

    Give the plan of the whole job, duplicates included: the answer then depends neither on
    what a resumed run still has to do nor on timing. A row equal to an earlier one shares its
    whole prompt; rows outside the plan share nothing.
    """
    scratch = scratch or Scratch(least_bytes=None)
    shared = scratch.zeros(num_rows, np.int32)
    for part in scratch.windows(len(plan)):
        shared[plan.order[part]] = plan.lcp[part]
    return shared


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySummary:
    """The memory that sharing takes: ``needed_tokens`` beside the rows that run, to compute none
    twice; ``demand_tokens`` for ``batch_size`` rows that run together, with their answers, at most.
    ``curve``: tokens kept, and the share of prompt tokens (0 to 1) that need no computing then.
    ``token_bytes``: keys and values of one token."""

    needed_tokens: int
    demand_tokens: int
    batch_size: int
    token_bytes: int
    curve: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LintSummary:
    """Places of a template that break what stands behind them: their lines, names, what kind of
    text is in them and how many different ones ``rows`` rows have; ``lost_tokens``: about what is
    computed for no other reason."""

    lines: tuple[int, ...]
    places: tuple[str, ...]
    kinds: tuple[str, ...]
    values: tuple[int, ...]
    rows: int
    lost_tokens: int

    def in_words(self) -> str:
        """For a person."""
        places = " and ".join(
            f"line {line}, {{{{ {place} }}}} ({kind}, {values:,} values in {self.rows:,} rows)"
            for line, place, kind, values in zip(
                self.lines, self.places, self.kinds, self.values, strict=True
            )
        )
        verb = "stand" if len(self.lines) > 1 else "stands"
        return (
            f"{places} {verb} before what rows share: about {self.lost_tokens:,} tokens are "
            f"computed again; put it further back"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """A job's totals. Lengths are prompt tokens of the rows that have a prompt, without the
    openings of answers; ``opening_tokens`` are these.

    ``rows`` counts every row of the input, ``planned_rows`` those that run,
    ``duplicates`` those that take another row's answer, ``over_long`` those that do not fit
    the context; ``shards`` are the job split for several workers,
    ``memory`` is what sharing takes, ``lint`` what breaks it. ``prompt_tokens`` with
    ``opening_tokens`` is what computing each row alone would cost, ``distinct_tokens`` what the
    tree costs, ``shared_share`` the part saved (0 to 1).
    """

    rows: int
    planned_rows: int
    duplicates: int
    over_long: int
    prompt_tokens: int
    opening_tokens: int
    distinct_tokens: int
    shared_share: float
    num_nodes: int
    length_min: int
    length_p50: int
    length_p90: int
    length_p99: int
    length_max: int
    shards: tuple[ShardSummary, ...] = ()
    memory: MemorySummary | None = None
    lint: tuple[LintSummary, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain numbers, for ``--json``; keys are the fields' names."""
        return asdict(self)


def plan_summary(
    tokens: TokenTable,
    plan: Plan,
    tree: PlanTree,
    *,
    num_forced: I32 | None = None,
    num_rows: int | None = None,
    num_duplicates: int = 0,
    num_over_long: int = 0,
    chosen: I64 | None = None,
) -> PlanSummary:
    """Totals of a plan and its tree.

    ``plan`` and ``tree`` are what runs (followers of a leader already dropped);
    ``num_forced``: int32[len(tokens)], the trailing tokens of each row that open its answer;
    ``num_rows`` the rows of the input when the table has not all of them; ``chosen``: int64[m], the
    table rows that count, all when None.
    """
    counts, opening_tokens = _length_counts(tokens, num_forced, chosen)
    prompt_tokens = int((np.arange(len(counts)) * counts).sum())
    all_tokens = prompt_tokens + opening_tokens
    distinct = tree.distinct_tokens
    low, p50, p90, p99, high = (_quantile(counts, share) for share in (0, 0.5, 0.9, 0.99, 1))
    return PlanSummary(
        rows=len(tokens) if num_rows is None else num_rows,
        planned_rows=len(plan),
        duplicates=num_duplicates,
        over_long=num_over_long,
        prompt_tokens=prompt_tokens,
        opening_tokens=opening_tokens,
        distinct_tokens=distinct,
        shared_share=1 - distinct / all_tokens if all_tokens else 0.0,
        num_nodes=len(tree),
        length_min=low,
        length_p50=p50,
        length_p90=p90,
        length_p99=p99,
        length_max=high,
    )


def demand_tokens(plan: Plan, tree: PlanTree, max_tokens: I32, batch_size: int) -> int:
    """The most KV tokens the job can need at once, whatever rows run side by side.

    ``max_tokens``: int32[num_rows] by table row. At any time at most ``batch_size`` rows run,
    and beside their paths only that of the next row in the plan is kept. The largest union of
    k paths of a tree is the sum of the k longest chains of its long-path decomposition (each
    node continues into its deepest child, the others begin chains of their own), so the bound
    on prompts is exact; answers add the ``batch_size`` largest ``max_tokens``.
    """
    count = batch_size + 1
    chains = np.zeros(0, dtype=np.int64)
    for some in _chains(tree):
        chains = _largest(np.concatenate([chains, some]), count)
    tails = np.zeros(0, dtype=np.int64)
    for part in windows(len(plan)):
        some = np.asarray(max_tokens)[plan.order[part]].astype(np.int64)
        tails = _largest(np.concatenate([tails, some]), batch_size)
    return int(chains.sum()) + int(tails.sum())


def _length_counts(
    tokens: TokenTable, num_forced: I32 | None, chosen: I64 | None
) -> tuple[I64, int]:
    """int64[m]: rows by the length of their prompt, those without a prompt not counted; and the
    tokens behind the prompts."""
    counts = np.zeros(1, dtype=np.int64)
    opening_tokens = 0
    for part in windows(len(tokens) if chosen is None else len(chosen)):
        rows: slice | I64 = part
        if chosen is None:
            lengths = np.diff(tokens.offsets[part.start : part.stop + 1])
        else:
            rows = chosen[part]
            lengths = tokens.offsets[rows + 1] - tokens.offsets[rows]
        if num_forced is not None:
            opening_tokens += int(num_forced[rows].sum(dtype=np.int64))
            lengths = lengths - num_forced[rows]
        some = np.bincount(lengths, minlength=len(counts))
        some[: len(counts)] += counts
        counts = some
    counts[0] = 0
    return counts, opening_tokens


def _quantile(counts: I64, share: float) -> int:
    """The least length that this share of the rows do not exceed; 0 where there are no rows."""
    reached = np.cumsum(counts)
    if reached[-1] == 0:
        return 0
    return int(np.searchsorted(reached, max(1, math.ceil(share * reached[-1]))))


def _largest(values: I64, count: int) -> I64:
    if len(values) > count:
        values = np.partition(values, len(values) - count)[len(values) - count :]
    return values


def _chains(tree: PlanTree) -> Iterator[I64]:
    """The lengths in tokens of the chains of the tree's long-path decomposition, in pieces.

    Leaves come in preorder. Each begins a chain where its path parts from those before it; where
    two chains meet, the one that does not go as deep ends there.
    """
    open_at: list[int] = []  # depths at which chains that are still open meet the one before
    depths: list[int] = []  # how deep they go
    begun: int | None = None  # where the first node behind the last leaf begins, if a block before
    for part in windows(len(tree)):
        starts = tree.start[part]
        behind = tree.parent[part.start + 1 : part.stop + 1]
        is_leaf = np.ones(len(starts), dtype=np.bool_)
        is_leaf[: len(behind)] = behind != np.arange(part.start, part.start + len(behind))
        leaves = np.flatnonzero(is_leaf)
        # The first node behind a leaf is the highest one that the next leaf does not share.
        parted = starts[np.append(0, leaves[:-1] + 1)].tolist()
        parted[0] = parted[0] if begun is None else begun
        chains: list[int] = []
        for at, depth in zip(parted, tree.end[part][leaves].tolist(), strict=False):
            while depths and open_at[-1] > at:
                chains.append(_end_chain(open_at, depths))
            if depths and at == 0:
                chains.append(depths.pop() - open_at.pop())
            open_at.append(at)
            depths.append(depth)
        yield np.array(chains, dtype=np.int64)
        if not len(leaves):
            begun = parted[0]
        else:
            begun = None if is_leaf[-1] else int(starts[leaves[-1] + 1])
    chains = []
    while len(depths) > 1:
        chains.append(_end_chain(open_at, depths))
    yield np.array(chains + depths, dtype=np.int64)


def _end_chain(open_at: list[int], depths: list[int]) -> int:
    """Ends the last chain or the one before, whichever is less deep; how long it is."""
    begin, depth = open_at.pop(), depths.pop()
    length = min(depth, depths[-1]) - begin
    depths[-1] = max(depth, depths[-1])
    return length
