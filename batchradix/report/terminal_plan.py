"""A plan's tree and what its rows reuse, small enough for a terminal."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from batchradix.report.charts import printable
from batchradix.report.trace import TracedPlan

_MOST_CHILDREN = 3
_MOST_DEPTH = 3
_LABEL_CHARACTERS = 32
_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_BARS = "_.-:=+*#"
_NUM_BARS = 60


@dataclass(slots=True)
class _Node:
    piece: Mapping[str, Any]
    children: list[_Node] = field(default_factory=list)

    @property
    def weight(self) -> int:
        """Tokens at and below it, once for every row."""
        return int(self.piece["planned_tokens"]) + sum(each.weight for each in self.children)

    @property
    def num_nodes(self) -> int:
        return int(self.piece["num_nodes"]) + sum(each.num_nodes for each in self.children)


def draw_plan(picture: TracedPlan, console: Console) -> None:
    """Prints the heaviest branches of the tree, and the share of tokens reused over the plan."""
    pieces = picture.pieces.to_pylist()
    if not pieces:
        return
    root = Tree(Text(f"{picture.facts['rows']:,} rows"), guide_style="dim")
    _add(root, _nested(pieces), _MOST_DEPTH)
    console.print(root)
    planned = picture.facts["bin_planned_tokens"]
    distinct = picture.facts["bin_distinct_tokens"]
    bars = _PLAIN_BARS if console.options.ascii_only else _BARS
    console.print(Text(f"{_strip(planned, distinct, bars)} reused, over the planned order of rows"))


def _nested(pieces: Sequence[Mapping[str, Any]]) -> list[_Node]:
    """The pieces, which come in preorder, below each other: a piece lies in the rows of the one
    above it, behind its tokens."""
    top: list[_Node] = []
    path: list[tuple[_Node, int]] = []
    for piece in pieces:
        node = _Node(piece)
        while path and (
            piece["first"] >= path[-1][0].piece["last"] or piece["start"] < path[-1][1]
        ):
            path.pop()
        (path[-1][0].children if path else top).append(node)
        if piece["is_node"]:
            path.append((node, piece["start"] + piece["distinct_tokens"]))
    return top


def _add(tree: Tree, nodes: Sequence[_Node], depth: int) -> None:
    ordered = sorted(nodes, key=lambda node: -node.weight)
    shown = [node for node in ordered if node.piece["is_node"]][: _MOST_CHILDREN if depth else 0]
    for node in shown:
        _add(tree.add(Text(_describe(node.piece))), node.children, depth - 1)
    rest = [node for node in ordered if not any(node is one for one in shown)]
    if rest:
        rows = sum(node.piece["last"] - node.piece["first"] for node in rest)
        count = sum(node.num_nodes for node in rest)
        what = "1 more node" if count == 1 else f"{count:,} more nodes"
        tree.add(Text(f"{what}: {rows:,} {'row' if rows == 1 else 'rows'}", style="dim"))


def _describe(piece: Mapping[str, Any]) -> str:
    rows, tokens = piece["last"] - piece["first"], piece["distinct_tokens"]
    label = printable(piece["label"])[:_LABEL_CHARACTERS]
    return f"{label}… {tokens:,} tokens of {rows:,} {'row' if rows == 1 else 'rows'}"


def _strip(planned: Sequence[int], distinct: Sequence[int], bars: str) -> str:
    """One character for some rows each, the higher the more of their tokens are reused."""
    count = min(_NUM_BARS, len(planned))
    edges = [len(planned) * place // count for place in range(count + 1)]
    text = ""
    for begin, end in itertools.pairwise(edges):
        share = 1 - sum(distinct[begin:end]) / max(1, sum(planned[begin:end]))
        text += bars[min(len(bars) - 1, int(share * len(bars)))]
    return text
