"""A launched step between the forward pass and the moment its tokens are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from batchradix.engine.row import RunningRow
from batchradix.engine.selection import Chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """``rows[i]`` gets the ``i``-th of the tokens ``chosen``; a row with a draft is there once for
    its next token and once more, right after, for the token behind each piece of its draft.

    ``first_tokens``: the seqs of rows that get the first token of their answer; ``num_tokens``
    went through the model with the step.
    """

    rows: Sequence[RunningRow]
    chosen: Chosen
    first_tokens: frozenset[int]
    num_tokens: int

    def alone(self) -> Iterator[tuple[int, RunningRow]]:
        """The rows that get one token, each with its place."""
        for place, row in enumerate(self.rows):
            if row.draft is None:
                yield place, row
