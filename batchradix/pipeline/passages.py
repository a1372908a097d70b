"""The items of a list in an order for each row, so that prompts share more of them."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from batchradix.errors import InputError, OptionError
from batchradix.jobs.base import JobSource
from batchradix.plan.numbering import numbered
from batchradix.plan.passages import computed_tokens, order_passages
from batchradix.prompts.build import PromptBuilder
from batchradix.prompts.passages import PassageOrders
from batchradix.prompts.row_problem import RowProblem
from batchradix.prompts.values import render_value
from batchradix.types import I32, I64, Row

_SAMPLED_TEXTS = 256  # encoded to learn how many tokens characters make


class _Lists:
    """The lists of the rows read so far. Of an item its hash and its length are kept."""

    def __init__(self, column: str) -> None:
        self._column = column
        self._sizes: list[I64] = []
        self._hashes: list[I64] = []
        self._lengths: list[I32] = []
        self.samples: dict[str, None] = {}

    def add(self, rows: list[Row]) -> None:
        """A batch. Raises `InputError` for a value that is no list, with its place."""
        texts = [self._texts(row) for row in rows]
        self._sizes.append(np.array([len(items) for items in texts], np.int64))
        flat = [text for items in texts for text in items]
        self._lengths.append(np.array([len(text) for text in flat], np.int32))
        self._hashes.append(np.array([_digest(text) for text in flat], np.int64))
        if len(self.samples) < _SAMPLED_TEXTS:
            self.samples |= dict.fromkeys(flat[:_SAMPLED_TEXTS])

    def _texts(self, row: Row) -> list[str]:
        items = None if row.error is not None else row.values.get(self._column)
        if items is None:
            return []
        if not isinstance(items, (list, tuple)):
            raise InputError(
                f"{row.place}, column {self._column}: `sort_passages` orders the items of lists, "
                f"and this is {type(items).__name__}; name a column of lists, or leave it out"
            )
        try:
            return [item if isinstance(item, str) else text_of(item) for item in items]
        except RowProblem:
            return []  # an error row, when its prompt is made

    def offsets(self) -> I64:
        """int64[n + 1], over all rows."""
        sizes = np.concatenate([np.zeros(1, np.int64), *self._sizes])
        return np.cumsum(sizes, dtype=np.int64)

    def codes(self) -> I64:
        """int64[m]: equal for equal items, numbered from 0 on by first appearance."""
        return numbered(np.concatenate([np.zeros(0, np.int64), *self._hashes]))

    def tokens(self, share: float) -> I32:
        """int32[m]: about how many each item has, where a character makes so many."""
        lengths = np.concatenate([np.zeros(0, np.int32), *self._lengths])
        tokens: I32 = np.rint(lengths * share).astype(np.int32)
        return tokens


def text_of(item: object) -> str:
    """An item as text, by which it is told from others. Raises `RowProblem`."""
    return "null" if item is None else render_value(item, "item")


def _digest(text: str) -> int:
    data = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little", signed=True)


def sort_passages(source: JobSource, prompts: PromptBuilder, column: str) -> str:
    """Has ``prompts`` take the list in ``column`` of each row in the order found for it, and says
    what that is expected to save. Nothing changes where no order saves anything.

    Raises `OptionError` where prompts show no such column, `InputError` where it holds no lists.
    """
    if column not in prompts.required_columns:
        raise OptionError(
            f"`sort_passages` names the column {column!r}, which the prompts do not show; they "
            f"show {', '.join(sorted(prompts.required_columns)) or 'none'}"
        )
    lists = _Lists(column)
    for batch in source.batches([column]):
        lists.add(batch)
    samples = list(lists.samples)
    share = sum(prompts.num_tokens(samples)) / max(1, sum(map(len, samples)))
    codes, offsets, tokens = lists.codes(), lists.offsets(), lists.tokens(share)
    found = order_passages(codes, offsets, tokens)
    as_given = (np.arange(len(codes)) - np.repeat(offsets[:-1], np.diff(offsets))).astype(np.int32)
    before, after = (
        computed_tokens(codes, offsets, tokens, orders) for orders in (as_given, found)
    )
    listed = int(tokens.sum(dtype=np.int64))
    if after >= before:
        return f"no order of the items in {column} shares more than the rows' own"
    prompts.arrange(PassageOrders(column, offsets, found))
    return (
        f"items of {column} in other orders: of about {listed:,} tokens in them {after:,} are to "
        f"be computed instead of {before:,}"
    )
