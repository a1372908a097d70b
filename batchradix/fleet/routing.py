"""To which of several workers a request goes that no plan foresaw: the longest prefix that one has
already, against what waits there.

A request costs a worker the tokens that it does not find in its cache, behind those that wait: it
goes where it would be computed first, if every token took the same time. Prefixes are known in
blocks, whose hashes say all that stands before them, so that what a worker has is a set of numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from batchradix.types import U32

BLOCK_TOKENS = 16


class Router:
    """Chooses a worker for each request and remembers what each has computed and has to do.

    ``cache_tokens``: prompt tokens that a worker is taken to keep, the least recently used leaving
    first. Beside them it is numbers of a few bytes a block.
    """

    def __init__(
        self, num_workers: int, *, cache_tokens: int, block_tokens: int = BLOCK_TOKENS
    ) -> None:
        self._block_tokens = block_tokens
        self._most_blocks = max(1, cache_tokens // block_tokens)
        self._blocks: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_workers)]
        self._waiting = [0] * num_workers

    def known_tokens(self, worker: int, tokens: U32) -> int:
        """How much of the beginning of ``tokens`` (uint32[n]) a worker has, in whole blocks."""
        return self._known(worker, [*self._hashes(tokens)])

    def route(self, tokens: U32) -> tuple[int, int]:
        """The worker for a request, and the tokens that it has to compute; of equals the first.

        They wait there until `done` takes them off."""
        hashes = [*self._hashes(tokens)]
        new = [len(tokens) - self._known(worker, hashes) for worker in range(len(self._blocks))]
        worker = least(new, self._waiting)
        self._waiting[worker] += new[worker]
        self._remember(worker, hashes)
        return worker, new[worker]

    def done(self, worker: int, num_tokens: int) -> None:
        """A worker has computed so many of the tokens that waited."""
        self._waiting[worker] = max(0, self._waiting[worker] - num_tokens)

    def forget(self, worker: int) -> None:
        """A worker was replaced: it has nothing, and nothing waits."""
        self._blocks[worker].clear()
        self._waiting[worker] = 0

    def _hashes(self, tokens: U32) -> Iterator[int]:
        """One number for each whole block, of it and all before it."""
        before = 0
        size = self._block_tokens
        data = np.ascontiguousarray(tokens, dtype=np.uint32)
        for start in range(0, len(data) - size + 1, size):
            before = hash((before, data[start : start + size].tobytes()))
            yield before

    def _known(self, worker: int, hashes: Sequence[int]) -> int:
        blocks = self._blocks[worker]
        count = 0
        for one in hashes:
            if one not in blocks:
                break
            count += 1
        return count * self._block_tokens

    def _remember(self, worker: int, hashes: Sequence[int]) -> None:
        blocks = self._blocks[worker]
        for one in reversed(hashes):  # a block leaves after those behind it, which need it
            blocks[one] = None
            blocks.move_to_end(one)
        while len(blocks) > self._most_blocks:
            blocks.popitem(last=False)


def least(added_tokens: Sequence[int], waiting_tokens: Sequence[int]) -> int:
    """The place where ``added_tokens`` behind ``waiting_tokens`` are done first; of equals the
    first."""
    return min(range(len(added_tokens)), key=lambda one: added_tokens[one] + waiting_tokens[one])
