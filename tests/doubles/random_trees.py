"""Pieces of a step, as in `Step`: of rows below shared nodes, and of any tree."""

from __future__ import annotations

from itertools import count

from hypothesis import strategies as st

Pieces = list[tuple[int, int, int, int]]


def shared_decode(num_rows: int, *, documents: bool = True) -> tuple[list[int], Pieces]:
    """Slots and context of rows below 10 shared tokens, in pairs below 5 more, with tails of 3."""
    context, at = [(0, 10, 0, num_rows)], 10
    for row in range(0, num_rows if documents else 0, 2):
        context.append((at, 5, row, row + 2))
        at += 5
    context += [(at + 3 * row, 3, row, row + 1) for row in range(num_rows)]
    return [at + 3 * row + 2 for row in range(num_rows)], context


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], Pieces, Pieces]:
    """Slots, context and causal pieces of any tree of old nodes, new ones, spans and rows, its
    slots with gaps and in any order."""
    slots: list[int] = []
    context: Pieces = []
    causal: Pieces = []
    numbers = count()

    def take() -> tuple[int, int]:
        place = next(numbers)
        return 10 * (place if draw(st.booleans()) else 400 - place), draw(st.integers(1, 9))

    def grow(depth: int) -> None:
        (start, length), first = take(), len(slots)
        kinds = ["row", "span", "new"] if depth == 0 else ["old", "new"]
        kind = draw(st.sampled_from(kinds))
        if kind == "row":
            slots.append(start + length - 1)
            context.append((start, length, first, first + 1))
            return
        if kind != "old":
            slots.extend(range(start, start + length))
            causal.append((start, length, first, first + length))
        if kind == "span":  # behind a tail that is there already
            context.append((*take(), first, first + length))
        below = first if kind == "old" else len(slots)
        for _ in range(draw(st.integers(1, 3)) if depth else 0):
            grow(depth - 1)
        if len(slots) > below:
            context.append((start, length, below, len(slots)))

    for _ in range(draw(st.integers(1, 2))):
        grow(draw(st.integers(0, 3)))
    return slots, context, causal
