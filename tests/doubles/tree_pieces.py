"""Pieces of a step as attention kernels take them: of a small tree, by slot or behind pages."""

from __future__ import annotations

import numpy as np

Pieces = list[tuple[int, int, int, int]]  # (slot_start, num_slots, query_start, query_end)


def decoding_tree(num_rows: int) -> tuple[list[int], Pieces]:
    """A shared root, a document for every four rows, a tail of another length for each; where the
    newest token of each row lies, and the pieces."""
    context, slots, at = [(5, 70, 0, num_rows)], [], 78
    for row in range(0, num_rows, 4):
        context.append((at, 33 + row, row, min(row + 4, num_rows)))
        at += 34 + row
    for row in range(num_rows):
        length = 1 + 7 * row % 50
        context.append((at, length, row, row + 1))
        slots.append(at + length - 1)
        at += length + row % 2
    return slots, context


def in_pages(
    num_slots: int, page_size: int, kinds: list[Pieces]
) -> tuple[np.ndarray, list[Pieces], np.ndarray]:
    """Where each of the slots goes in shuffled pages, the pieces by places in a table, and the
    table, whose unused ends name pages that do not exist."""
    rng = np.random.default_rng(3)
    starts = sorted({(a, n) for pieces in kinds for a, n, *_ in pieces})
    counts = [-(-n // page_size) for _, n in starts]
    free = rng.permutation(sum(counts) + 5).tolist()
    place, table, first = np.zeros(num_slots, dtype=np.int64), [], {}
    for (a, n), count in zip(starts, counts, strict=True):
        first[a] = len(table)
        taken = [free.pop() for _ in range(count)]
        at = np.arange(n)
        place[a : a + n] = np.array(taken)[at // page_size] * page_size + at % page_size
        table += [*taken, -7, 1 << 30]
    moved = [[(first[a], n, q, end) for a, n, q, end in pieces] for pieces in kinds]
    return place, moved, np.array(table, dtype=np.int32)
