"""The tree of a plan as a picture can show it: some hundred pieces, and how their text begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from batchradix.plan.outline import TreeOutline, outline_tree
from batchradix.prompts.detokenise import IncrementalDetokenizer
from batchradix.report.trace import TracedPlan
from batchradix.scratch import Scratch
from batchradix.types import Plan, PlanTree, TokenTable

_LABEL_TOKENS = 24
_LABEL_CHARACTERS = 48


def tree_picture(
    tokens: TokenTable,
    plan: Plan,
    tree: PlanTree,
    *,
    token_bytes: Sequence[bytes],
    scratch: Scratch,
    **facts: Any,
) -> TracedPlan:
    """What can be drawn of a plan. ``token_bytes`` are those of the tokenizer; ``facts`` are added
    to what is found here."""
    lengths = scratch.zeros(len(tokens), np.int64)
    for part in scratch.windows(len(lengths)):
        lengths[part] = np.diff(tokens.offsets[part.start : part.stop + 1])
    outline = outline_tree(plan, tree, lengths, scratch=scratch)
    labels = _Labels(tokens, plan, token_bytes)
    picture = TracedPlan(
        facts={
            **facts,
            "rows": len(plan),
            "planned_tokens": int(outline.bin_planned_tokens.sum()),
            "distinct_tokens": int(outline.bin_distinct_tokens.sum()),
            "bin_planned_tokens": outline.bin_planned_tokens.tolist(),
            "bin_distinct_tokens": outline.bin_distinct_tokens.tolist(),
        },
        pieces=_pieces(outline, labels),
    )
    scratch.let_go()
    return picture


class _Labels:
    def __init__(self, tokens: TokenTable, plan: Plan, token_bytes: Sequence[bytes]) -> None:
        self._tokens, self._plan = tokens, plan
        self._detokenizer = IncrementalDetokenizer(token_bytes)

    def of(self, position: int, start: int, end: int) -> str:
        """How the text of a node begins."""
        row = self._tokens[int(self._plan.order[position])]
        state = self._detokenizer.start()
        ids = row[start : min(end, start + _LABEL_TOKENS)].tolist()
        return "".join(map(state.push, ids))[:_LABEL_CHARACTERS]


def _pieces(outline: TreeOutline, labels: _Labels) -> pa.Table:
    is_node = outline.node >= 0
    texts = [
        labels.of(first, start, start + size) if shown else ""
        for first, start, size, shown in zip(
            outline.first.tolist(),
            outline.start.tolist(),
            outline.distinct_tokens.tolist(),
            is_node.tolist(),
            strict=True,
        )
    ]
    return pa.table(
        {
            "first": outline.first,
            "last": outline.last,
            "start": outline.start,
            "is_node": np.asarray(is_node),
            "num_nodes": outline.num_nodes,
            "planned_tokens": outline.planned_tokens,
            "distinct_tokens": outline.distinct_tokens,
            "label": pa.array(texts, pa.string()),
        }
    )
