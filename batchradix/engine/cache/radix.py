"""A radix tree over token ids whose edges own KV slots: what is cached, who needs it, what goes.

Nodes are shared by rows of any job. A *locked* node has a running row below it and stays; an
*idle* one may be evicted. Nothing here knows of jobs or plans: the scheduler says when a node
is next used through the function it hands to `RadixCache.evict`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from batchradix.engine.cache.pool import Extent, ExtentPool, split_extents
from batchradix.types import U32


@dataclass(slots=True, eq=False)
class RadixNode:
    """The edge with the tokens ``[start, end)`` of every row below it.

    ``tokens``: uint32[end - start]. ``extents`` hold its slots in order of position. The first
    ``num_computed`` of its tokens have been through the model; a node below an incomplete one
    has none. ``locks`` counts running rows below. ``retained`` keeps it when nothing planned
    needs it. ``hold`` names the kept final hidden state of its last token.

    ``origin`` (job id, plan node) and ``planned`` (job id to the plan positions ``[first,
    last)`` below the node) are the scheduler's notes.
    """

    tokens: U32
    start: int
    parent: RadixNode | None
    extents: list[Extent]
    origin: tuple[int, int]
    num_computed: int = 0
    locks: int = 0
    retained: bool = False
    hold: int | None = None
    children: dict[int, RadixNode] = field(default_factory=dict)
    planned: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def is_complete(self) -> bool:
        return self.num_computed == len(self.tokens)

    def path(self) -> list[RadixNode]:
        """The nodes from the top down to this one, the root left out."""
        nodes = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


class RadixCache:
    """The tree, its locks and its eviction. All slots come from and go back to ``pool``."""

    def __init__(self, pool: ExtentPool) -> None:
        self.pool = pool
        self.root = RadixNode(np.zeros(0, np.uint32), 0, None, [], (-1, -1))
        self.num_idle_slots = 0
        self.freed_holds: list[int] = []  # of nodes that went; the scheduler takes them
        # Idle nodes, least recently used first, and a child always before its parent.
        self._idle: dict[RadixNode, None] = {}
        self._nodes: dict[RadixNode, None] = {}

    def nodes(self) -> Iterator[RadixNode]:
        """Every node but the root, in order of creation."""
        return iter(self._nodes)

    def match(self, tokens: U32) -> tuple[RadixNode, int]:
        """The longest cached prefix of ``tokens``: the node it ends in and its length.

        The prefix may end inside the node (length below ``node.end``). No side effect.
        """
        node = self.root
        depth = 0
        while depth < len(tokens):
            child = node.children.get(int(tokens[depth]))
            if child is None:
                break
            node = child
            rest = tokens[depth : depth + len(node)]
            differing = np.flatnonzero(rest != node.tokens[: len(rest)])
            if len(differing):
                depth += int(differing[0])
                break
            depth += len(rest)
        return node, depth

    def split(self, node: RadixNode, depth: int) -> RadixNode:
        """Cuts ``node`` at token depth ``depth``, ``node.start < depth < node.end``.

        Returns the new upper node. ``node`` itself stays the lower one, so whoever keeps it as
        a leaf keeps the same place; it keeps the hold. Extents are split, nothing is copied;
        locks, retention and idleness hold for both parts. The upper part's ``planned`` is
        empty: more rows may pass it.
        """
        assert node.start < depth < node.end
        assert node.parent is not None
        cut = depth - node.start
        above, below = split_extents(node.extents, cut)
        upper = RadixNode(
            node.tokens[:cut],
            node.start,
            node.parent,
            above,
            node.origin,
            num_computed=min(node.num_computed, cut),
            locks=node.locks,
            retained=node.retained,
        )
        first = int(node.tokens[0])
        if node.parent.children.get(first) is node:
            node.parent.children[first] = upper
        upper.children[int(node.tokens[cut])] = node
        node.tokens = node.tokens[cut:]
        node.start = depth
        node.parent = upper
        node.extents[:] = below
        node.num_computed = max(0, node.num_computed - cut)
        self._nodes[upper] = None
        if node in self._idle:  # and so is the upper part, before what is above it
            self._idle[upper] = None
            ancestor = upper.parent
            while ancestor in self._idle:
                self._idle[ancestor] = self._idle.pop(ancestor)
                ancestor = ancestor.parent
        return upper

    def insert(
        self,
        parent: RadixNode,
        tokens: U32,
        extents: list[Extent],
        origin: tuple[int, int],
        *,
        shared: bool = True,
    ) -> RadixNode:
        """Adds a node below ``parent`` that owns ``extents`` (as many slots as tokens).

        It starts uncomputed and idle. Unless ``shared``, no later `match` finds it.
        """
        assert len(tokens) == sum(length for _, length in extents) > 0
        node = RadixNode(tokens, parent.end, parent, extents, origin)
        if shared:
            first = int(tokens[0])
            assert first not in parent.children, "two children begin with one token"
            parent.children[first] = node
        self._nodes[node] = None
        self._idle[node] = None
        self.num_idle_slots += len(tokens)
        return node

    def lock(self, leaf: RadixNode) -> None:
        """One more running row below ``leaf`` and all above it; none of them is evicted."""
        node = leaf
        while node.parent is not None:
            if node.locks == 0:
                del self._idle[node]
                self.num_idle_slots -= len(node)
            node.locks += 1
            node = node.parent

    def unlock(self, leaf: RadixNode) -> None:
        """Undoes one `lock`; nodes without a lock become idle, the most recently used."""
        node = leaf
        while node.parent is not None:
            assert node.locks > 0, "a node was unlocked more often than locked"
            node.locks -= 1
            if node.locks == 0:
                self._idle[node] = None
                self.num_idle_slots += len(node)
            node = node.parent

    def remove(self, node: RadixNode) -> None:
        """Drops an idle node without children; its slots and its hold are given back."""
        assert not node.children
        assert node.parent is not None
        del self._idle[node]  # a KeyError here is a locked node
        del self._nodes[node]
        self.num_idle_slots -= len(node)
        first = int(node.tokens[0])
        if node.parent.children.get(first) is node:
            del node.parent.children[first]
        self.pool.free(node.extents)
        if node.hold is not None:
            self.freed_holds.append(node.hold)

    def evict(
        self,
        num_slots: int,
        next_use: Callable[[RadixNode], int | None],
        spill: Callable[[RadixNode], None] = lambda node: None,
    ) -> int:
        """Removes idle nodes, leaves first, until ``num_slots`` slots came free; how many did.

        ``next_use`` says when a node is next used (None: no plan needs it); it must not be
        later for a node than for one below it. Nodes that no plan needs go first, least
        recently used first; then those whose next planned use is furthest (Belady), each of them
        shown to ``spill`` before.
        """
        freed = 0
        planned: list[tuple[int, int, RadixNode]] = []
        for node in list(self._idle):
            if freed >= num_slots:
                return freed
            use = next_use(node)
            if use is not None:
                planned.append((use, node.end, node))
            elif not node.children:
                freed += len(node)
                self.remove(node)
        planned.sort(key=lambda item: item[:2], reverse=True)
        for _, _, node in planned:
            if freed >= num_slots:
                break
            if not node.children:
                freed += len(node)
                spill(node)
                self.remove(node)
        return freed

    def check(self) -> None:
        """AssertionError unless locks, depths, idleness and computed tokens are consistent."""
        idle_slots = 0
        for node in self._nodes:
            parent = node.parent
            assert parent is not None
            assert node.start == parent.end
            assert len(node) == sum(length for _, length in node.extents)
            assert parent is self.root or parent in self._nodes, "a parent went before its child"
            assert (node.locks == 0) == (node in self._idle)
            idle_slots += len(node) if node.locks == 0 else 0
            assert 0 <= node.num_computed <= len(node)
            assert node.num_computed == 0 or parent is self.root or parent.is_complete
            below = sum(child.locks for child in node.children.values())
            assert node.locks >= below, "a child is locked without its parent"
        assert idle_slots == self.num_idle_slots
        place = {node: i for i, node in enumerate(self._idle)}
        for node, i in place.items():
            assert node.parent is not None
            assert place.get(node.parent, i) >= i, "an idle parent would go before its child"
