"""Keys and values that come from elsewhere instead of being computed, and which go there.

Two tiers lie below the pool: the store, which outlives the run, and a `SpillSpace` for what is
evicted although a planned row will want it. This is the scheduler's side of them: no tensor is
touched here. What is decided goes into the next `Step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from batchradix.engine.cache.pool import Extent, slots_of, split_extents
from batchradix.engine.cache.radix import RadixNode
from batchradix.engine.cache.spill import SpillSpace
from batchradix.engine.cache.store import KVStore
from batchradix.engine.step import KVBlock, KVLoad, KVSave, KVTransfer, i64_table
from batchradix.types import U32

LEAST_SHARE = 1 / 16
"""Of a job's rows that begin with a prefix, for it to be kept: an instruction or examples, which
the next job is likely to have too, and not the documents of this one."""

Needs = Callable[[tuple[int, int]], bool]
"""Whether rows below a plan node, named as `RadixNode.origin` does, have yet to run."""


@dataclass(frozen=True, slots=True)
class Transfers:
    """See `Step`."""

    loads: tuple[KVLoad, ...]
    saves: tuple[KVSave, ...]
    spills: tuple[KVTransfer, ...]
    reloads: tuple[KVTransfer, ...]


@dataclass(frozen=True, slots=True)
class _Fill:
    """Blocks for the path of ``leaf``, of which positions from ``start`` on are loaded."""

    leaf: RadixNode
    start: int
    blocks: list[KVBlock]


@dataclass(frozen=True, slots=True)
class _Spilled:
    """Positions ``[start, end)`` and the places that hold them."""

    start: int
    end: int
    places: list[Extent]


class Tiers:
    """Without a ``store`` and a ``space`` it does nothing.

    ``can_spill`` is False while the pool's extents are ahead of what it holds, because moves of
    the next step have been decided.
    """

    def __init__(self, store: KVStore | None, space: SpillSpace | None = None) -> None:
        self.can_spill = True
        self._store = store
        self._space = space
        self._fills: list[_Fill] = []
        self._saves: list[KVSave] = []
        self._spills: list[KVTransfer] = []
        # What the next step brings back: to positions on the path of a leaf, or to a tail.
        self._reloads: list[tuple[RadixNode | list[Extent], _Spilled]] = []
        self._nodes: dict[tuple[int, int], list[_Spilled]] = {}  # by origin
        self._tails: dict[int, _Spilled] = {}  # by the row's seq

    def fill(self, prompt: U32, found: RadixNode, leaf: RadixNode) -> list[tuple[RadixNode, int]]:
        """Has the next step bring what is known elsewhere of a prompt beyond what was ``found``.

        ``leaf``: the last of the nodes made for it below ``found``, none of them computed yet.
        Side effect: what is brought counts as computed from now on. Returns the nodes it is of,
        each with how many of its tokens. From the store the prompt's last token is never among
        them: its final hidden state is wanted.
        """
        if not found.is_complete:
            return []
        new = [node for node in leaf.path() if node.start >= found.end]
        if self._store is not None and new:
            blocks = self._store.find(prompt[:-1], found.end)
            if blocks:
                self._fills.append(_Fill(leaf, found.end, blocks))
                end = blocks[-1].start + self._store.block_tokens
                for node in new:
                    node.num_computed = max(0, min(end, node.end) - node.start)
        if self._nodes:
            for node in new:
                self._refill(node, leaf)
                if not node.is_complete:
                    break
        return [(node, node.num_computed) for node in new if node.num_computed]

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
                slots = slots_of(_extents(path, start, start + size))
                self._saves.append(KVSave(key=key, start=start, slots=slots))

    def spill(self, node: RadixNode, needs: Needs) -> None:
        """Has the next step write down a node that is evicted, if that is sooner done than
        computing it again; ``needs`` tells what else may make room for it."""
        if self._space is None:
            return
        start, end = node.start, node.start + node.num_computed
        entries = self._nodes.setdefault(node.origin, [])
        for entry in entries:  # it came back and goes again
            if entry.start <= start < entry.end:
                start = min(end, entry.end)
        spilled = self._spill(node.extents, start - node.start, start, end, needs)
        if spilled is not None:
            entries.append(spilled)
        elif not entries:
            self._nodes.pop(node.origin, None)

    def spill_tail(self, seq: int, tail: list[Extent], num_written: int, needs: Needs) -> None:
        """The same for the answer of a row (by its ``seq``) that is preempted."""
        entry = self._spill(tail, 0, 0, num_written, needs)
        if entry is not None:
            self._tails[seq] = entry

    def refill_tail(self, seq: int, tail: list[Extent]) -> int:
        """Has the next step bring the answer of a row that comes back to its new ``tail``, the
        list that the row keeps; how many tokens, which count as written from now on."""
        entry = self._tails.pop(seq, None)
        if entry is None:
            return 0
        self._reloads.append((tail, entry))
        return entry.end

    def take(self) -> Transfers:
        """What goes to and fro in the step that is being built; forgotten here."""
        loads = [load for fill in self._fills for load in self._loads(fill)]
        reloads = []
        for target, entry in self._reloads:
            if isinstance(target, list):
                extents = split_extents(target, entry.end)[0]
            else:
                extents = _extents(target.path(), entry.start, entry.end)
            reloads.append(
                KVTransfer(extents=i64_table(extents, 2), places=i64_table(entry.places, 2))
            )
        found = Transfers(tuple(loads), tuple(self._saves), tuple(self._spills), tuple(reloads))
        for target, entry in self._reloads:
            if isinstance(target, list):  # read before anything is written there
                assert self._space is not None
                self._space.free(entry.places)
        self._fills, self._saves, self._spills, self._reloads = [], [], [], []
        self.can_spill = True
        return found

    def _loads(self, fill: _Fill) -> Iterable[KVLoad]:
        assert self._store is not None
        path = fill.leaf.path()
        for block in fill.blocks:
            start = max(block.start, fill.start)
            extents = _extents(path, start, block.start + self._store.block_tokens)
            yield KVLoad(extents=i64_table(extents, 2), first=start - block.start, block=block)

    def _refill(self, node: RadixNode, leaf: RadixNode) -> None:
        """Has the next step bring what was written down of a node, from where it is computed to
        on; it stays there, should the node go once more."""
        for entry in sorted(self._nodes.get(node.origin, ()), key=lambda entry: entry.start):
            start, end = node.start + node.num_computed, min(entry.end, node.end)
            if entry.start <= start < end:
                rest = split_extents(entry.places, start - entry.start)[1]
                places = split_extents(rest, end - start)[0]
                self._reloads.append((leaf, _Spilled(start, end, places)))
                node.num_computed = end - node.start

    def _spill(
        self, extents: list[Extent], first: int, start: int, end: int, needs: Needs
    ) -> _Spilled | None:
        """Writes positions ``[start, end)`` down, which stand in ``extents`` from the ``first``
        slot on."""
        if self._space is None or not self.can_spill or not self._space.pays(end - start):
            return None
        places = self._space.allocate(end - start)
        if places is None:
            self._make_room(needs)
            places = self._space.allocate(end - start)
        if places is None:
            return None
        slots = split_extents(split_extents(extents, first)[1], end - start)[0]
        self._spills.append(KVTransfer(extents=i64_table(slots, 2), places=i64_table(places, 2)))
        return _Spilled(start, end, places)

    def _make_room(self, needs: Needs) -> None:
        """Forgets nodes that nobody will want, unless what they hold is on its way back."""
        assert self._space is not None
        if self._reloads:
            return
        for origin in [origin for origin in self._nodes if not needs(origin)]:
            for entry in self._nodes.pop(origin):
                self._space.free(entry.places)


def _extents(path: Sequence[RadixNode], start: int, end: int) -> list[Extent]:
    """The slots of positions ``[start, end)`` on a path, in order."""
    found: list[Extent] = []
    for node in path:
        first, last = max(start, node.start), min(end, node.end)
        if first < last:
            rest = split_extents(node.extents, first - node.start)[1]
            found += split_extents(rest, last - first)[0]
    return found
