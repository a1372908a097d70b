"""What a plan says about a job before it runs: shared prefixes, totals, memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from batchradix.types import I32, I64, Plan, PlanTree, TokenTable


def shared_prefix(plan: Plan, num_rows: int) -> I32:
    """int32[num_rows]: by table row, the prompt tokens an earlier row of the plan brings along.

    Give the plan of the whole job, duplicates included: the answer then depends neither on
    what a resumed run still has to do nor on timing. A row equal to an earlier one shares its
    whole prompt; rows outside the plan share nothing.
    """
    shared = np.zeros(num_rows, dtype=np.int32)
    shared[plan.order] = plan.lcp
    return shared


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """A job's totals. Lengths are prompt tokens of the rows that have a prompt, without the
    openings of answers; ``opening_tokens`` are these.

    ``rows`` counts every row of the input, ``planned_rows`` those that run,
    ``duplicates`` those that take another row's answer, ``over_long`` those that do not fit
    the context. ``prompt_tokens`` with ``opening_tokens`` is what computing each row alone
    would cost, ``distinct_tokens`` what the tree costs, ``shared_share`` the part saved (0 to 1).
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

    def to_json(self) -> dict[str, Any]:
        """A flat dictionary of plain numbers, for ``--json``; keys are the fields' names."""
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
) -> PlanSummary:
    """Totals of a plan and its tree.

    ``plan`` and ``tree`` are what runs (followers of a leader already dropped);
    ``num_forced``: int32[len(tokens)], the trailing tokens of each row that open its answer;
    ``num_rows`` the rows of the input when the table has not all of them.
    """
    lengths = tokens.lengths - (0 if num_forced is None else num_forced)
    lengths = lengths[lengths > 0]
    prompt_tokens = int(lengths.sum())
    opening_tokens = tokens.num_tokens - prompt_tokens
    distinct = tree.distinct_tokens
    low = p50 = p90 = p99 = high = 0
    if len(lengths):
        cuts = np.quantile(lengths, [0, 0.5, 0.9, 0.99, 1], method="inverted_cdf")
        low, p50, p90, p99, high = (int(cut) for cut in cuts)
    return PlanSummary(
        rows=len(tokens) if num_rows is None else num_rows,
        planned_rows=len(plan),
        duplicates=num_duplicates,
        over_long=num_over_long,
        prompt_tokens=prompt_tokens,
        opening_tokens=opening_tokens,
        distinct_tokens=distinct,
        shared_share=1 - distinct / tokens.num_tokens if tokens.num_tokens else 0.0,
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
    tails = np.asarray(max_tokens)[plan.order].astype(np.int64)
    return _largest_sum(_chains(tree), batch_size + 1) + _largest_sum(tails, batch_size)


def _largest_sum(values: I64, count: int) -> int:
    if len(values) > count:
        values = np.partition(values, len(values) - count)[len(values) - count :]
    return int(values.sum())


def _chains(tree: PlanTree) -> I64:
    """int64[k]: lengths in tokens of the chains of the tree's long-path decomposition."""
    num_nodes = len(tree)
    if num_nodes == 0:
        return np.zeros(0, dtype=np.int64)
    # In preorder a node's level is the number of subtrees begun and not yet ended.
    subtree_end = np.searchsorted(tree.first, tree.last)
    ended = np.cumsum(np.bincount(subtree_end, minlength=num_nodes + 1))[:num_nodes]
    level = np.arange(num_nodes) - ended
    by_level = np.argsort(level, kind="stable")
    bounds = np.searchsorted(level[by_level], np.arange(int(level.max()) + 2))
    deepest = tree.end.astype(np.int64)  # of any node below, in tokens
    begins_chain = np.ones(num_nodes, dtype=np.bool_)
    for depth in range(len(bounds) - 2, 0, -1):
        nodes = by_level[bounds[depth] : bounds[depth + 1]]
        parents = tree.parent[nodes]
        np.maximum.at(deepest, parents, deepest[nodes])
        heavy = nodes[deepest[nodes] == deepest[parents]]
        _, one_each = np.unique(tree.parent[heavy], return_index=True)
        begins_chain[heavy[one_each]] = False
    chains: I64 = (deepest - tree.start)[begins_chain]
    return chains
