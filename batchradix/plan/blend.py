"""Orders sibling subtrees so that steps with much prefill and steps with much decode mix.

Sorted prompts may put all rows with long prompts and short answers in one stretch and all with
short prompts and long answers in another. Then some steps carry prefill alone and others decode
alone, and each pays the fixed cost of a step. Subtrees are taken from both ends instead, such
that what has run so far keeps the proportion of the whole (the idea of BlendServe, Zhao et al.
2024). A subtree stays in one piece, so no prefix is computed twice and none is held longer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from batchradix.types import I32, I64, Plan

# Decode that is out of place, as a share of all; below it the order gains less than it costs.
MIN_SPREAD = 0.1
MAX_ROWS = 1 << 20  # some 50 bytes each while it is worked out
MAX_SUBTREES = 1 << 16  # the two ends are taken from in a loop
DOMINANT_SHARE = 0.5  # of the work: a subtree that holds more is looked into instead

F64 = NDArray[np.float64]


def blend(plan: Plan, lengths: I64, answer_tokens: I32) -> Plan:
    """The plan with sibling subtrees of one node in another order, or ``plan`` itself
    where that would gain little.

    ``lengths``: int64[num_rows], prompt tokens by table row; ``answer_tokens``: int32[num_rows],
    what each answer may have. The node is the deepest that holds more than half of the work of
    the node above it, so that what all prompts begin with does not matter.
    """
    n = len(plan)
    if not 3 <= n <= MAX_ROWS:
        return plan
    prefill = np.zeros(n + 1)
    np.cumsum(lengths[plan.order] - plan.lcp, out=prefill[1:])
    decode = np.zeros(n + 1)
    np.cumsum(answer_tokens[plan.order], out=decode[1:])
    if decode[-1] == 0:
        return plan
    edges = _subtrees(plan, lengths, prefill + decode)
    if not 4 <= len(edges) <= MAX_SUBTREES:
        return plan
    # The node's own tokens belong to all of its subtrees, so to none of them.
    own = np.diff(prefill[edges])
    own[0] -= int(plan.lcp[edges[1]]) - int(plan.lcp[edges[0]])
    answers = np.diff(decode[edges])
    misplaced = np.abs(answers - own * (answers.sum() / max(1.0, own.sum()))).sum() / 2
    if misplaced < MIN_SPREAD * decode[-1]:
        return plan
    return _permuted(plan, edges, _interleaved(own, answers))


def _subtrees(plan: Plan, lengths: I64, work: F64) -> I64:
    """int64[k + 1]: where the k subtrees of the node begin and end, in plan positions.

    Rows that end at the node itself are none of them: they stay before all of these.
    """
    first, end = 0, len(plan)
    while True:
        depth = plan.lcp[first + 1 : end].min() if end - first > 1 else 0
        starts = first + 1 + np.flatnonzero(plan.lcp[first + 1 : end] == depth)
        edges = np.concatenate(([first], starts, [end])).astype(np.int64)
        sizes = np.diff(work[edges])
        largest = int(sizes.argmax())
        inside = edges[largest + 1] - edges[largest]
        if sizes[largest] <= DOMINANT_SHARE * sizes.sum() or inside < 3:
            return edges[(lengths[plan.order[edges[:-1]]] == depth).sum() :]
        first, end = int(edges[largest]), int(edges[largest + 1])


def _interleaved(prefill: F64, decode: F64) -> I64:
    """int64[k]: subtrees from both ends of their order by decode a prefill token."""
    by_ratio = np.argsort(-decode / np.maximum(prefill, 1.0), kind="stable")
    ratio = decode.sum() / max(1.0, prefill.sum())
    low, high = 0, len(by_ratio) - 1
    order = np.empty(len(by_ratio), dtype=np.int64)
    ahead = 0.0  # decode so far, beyond the proportion
    for place in range(len(by_ratio)):
        if ahead <= 0:
            chosen, low = by_ratio[low], low + 1
        else:
            chosen, high = by_ratio[high], high - 1
        order[place] = chosen
        ahead += decode[chosen] - ratio * prefill[chosen]
    return order


def _permuted(plan: Plan, edges: I64, subtrees: I64) -> Plan:
    """The plan with the rows between ``edges`` in the order of ``subtrees``."""
    first, end = int(edges[0]), int(edges[-1])
    sizes = np.diff(edges)[subtrees]
    starts = edges[subtrees]
    begins = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    source = np.repeat(starts - begins, sizes) + np.arange(end - first)
    order, lcp = plan.order.copy(), plan.lcp.copy()
    order[first:end] = plan.order[source]
    lcp[first:end] = plan.lcp[source]
    # All subtrees part at one depth; only the first shares what the one before the node does.
    lcp[first + begins] = plan.lcp[edges[1]]
    lcp[first] = plan.lcp[first]
    return Plan(order, lcp)
