"""Which nodes of the cache are loaded from the store instead of computed, and which it keeps.

The scheduler's side of it: no tensor is touched here. What is decided goes into the next `Step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from batchradix.engine.cache.pool import Extent, split_extents
from batchradix.engine.cache.radix import RadixNode
from batchradix.engine.cache.store import KVStore
from batchradix.engine.step import KVBlock, KVLoad, KVSave
from batchradix.types import U32

LEAST_SHARE = 1 / 16
"""Of a job's rows that begin with a prefix, for it to be kept: an instruction or examples, which
the next job is likely to have too, and not the documents of this one."""


@dataclass(frozen=True, slots=True)
class _Fill:
    """Blocks for the path of ``leaf``, of which positions from ``start`` on are loaded."""

    leaf: RadixNode
    start: int
    blocks: list[KVBlock]


class Tiers:
    """Without a ``store`` it does nothing."""

    def __init__(self, store: KVStore | None) -> None:
        self._store = store
        self._fills: list[_Fill] = []
        self._saves: list[KVSave] = []

    def fill(self, prompt: U32, found: RadixNode, leaf: RadixNode) -> list[tuple[RadixNode, int]]:
        """Has the next step load what the store holds of a prompt beyond what was ``found``.

        ``leaf``: the last of the nodes made for it below ``found``, none of them computed yet.
        Side effect: what is loaded counts as computed from now on. Returns the nodes it is of,
        each with how many of its tokens. The prompt's last token is never among them: its final
        hidden state is wanted.
        """
        if self._store is None or not found.is_complete:
            return []
        blocks = self._store.find(prompt[:-1], found.end)
        if not blocks:
            return []
        end = blocks[-1].start + self._store.block_tokens
        filled = []
        for node in leaf.path():
            if found.end <= node.start < end:
                node.num_computed = min(end, node.end) - node.start
                filled.append((node, node.num_computed))
        self._fills.append(_Fill(leaf, found.end, blocks))
        return filled

    def keep(self, node: RadixNode, first: int, count: int, share: float) -> None:
        """Has this step save the blocks that end among the tokens ``[first, first + count)`` of a
        node, which go through the model in it, if the prefix is worth it.

        ``share``: of the job's rows, those below the node; 0 for a single one.
        """
        if self._store is None or share < LEAST_SHARE:
            return
        size = self._store.block_tokens
        begin = node.start + first
        first_end = (begin // size + 1) * size
        if first_end > begin + count:
            return
        path = node.path()
        tokens = np.concatenate([above.tokens for above in path])[: begin + count]
        for number, key in enumerate(self._store.keys(tokens)):
            start = number * size
            if start + size >= first_end and self._store.lacks(key):
                extents = _extents(path, start, start + size)
                slots = np.concatenate([np.arange(s, s + n) for s, n in extents])
                self._saves.append(KVSave(key=key, start=start, slots=slots))

    def take(self) -> tuple[tuple[KVLoad, ...], tuple[KVSave, ...]]:
        """What the step that is being built loads and saves; forgotten here."""
        loads = []
        for fill in self._fills:
            assert self._store is not None
            path = fill.leaf.path()
            for block in fill.blocks:
                start = max(block.start, fill.start)
                extents = _extents(path, start, block.start + self._store.block_tokens)
                loads.append(
                    KVLoad(
                        extents=np.array(extents, dtype=np.int64),
                        first=start - block.start,
                        block=block,
                    )
                )
        saves = tuple(self._saves)
        self._fills, self._saves = [], []
        return tuple(loads), saves


def _extents(path: Sequence[RadixNode], start: int, end: int) -> list[Extent]:
    """The slots of positions ``[start, end)`` on a path, in order."""
    found: list[Extent] = []
    for node in path:
        first, last = max(start, node.start), min(end, node.end)
        if first < last:
            rest = split_extents(node.extents, first - node.start)[1]
            found += split_extents(rest, last - first)[0]
    return found
