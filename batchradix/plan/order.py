"""From a token table to a `Plan`: a lexicographic sort and the prefixes it brings together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from batchradix.types import I32, I64, U32, Plan, TokenTable

if TYPE_CHECKING:
    import polars as pl

# Polars addresses the bytes of a chunk with 32 bits; chunks stay well below that.
_CHUNK_TOKENS = 1 << 28
# Tokens compared at once (twice this many are gathered), and the windows they are cut into.
_BLOCK_TOKENS = 1 << 20
_FIRST_WINDOW = 16
_LAST_WINDOW = 1024


def make_plan(tokens: TokenTable, rows: I64 | None = None) -> Plan:
    """Sorts rows lexicographically by token ids and measures what neighbours share.

    ``rows``: int64[n], distinct row numbers of ``tokens`` in any order; all rows when None.
    Equal rows come in order of row number, empty rows first. Takes about one copy of the
    tokens in memory beside the table itself, plus some tens of bytes a row.
    """
    if rows is None:
        chosen = np.arange(len(tokens), dtype=np.int64)
    else:
        chosen = np.sort(np.asarray(rows, dtype=np.int64))
    if len(chosen) == 0:
        return Plan(order=chosen, lcp=np.zeros(0, dtype=np.int32))
    order = _sorted_rows(tokens, chosen)
    return Plan(order=order, lcp=common_prefixes(tokens, order))


def _sorted_rows(tokens: TokenTable, rows: I64) -> I64:
    """``rows`` (ascending) in lexicographic order; bytes compare as tokens when big-endian."""
    import polars as pl

    keys = _binary_keys(tokens)
    if len(rows) < len(tokens):
        keys = keys.gather(rows)
    frame = pl.DataFrame({"key": keys, "row": rows})
    ordered = frame.sort("key", maintain_order=True)["row"].to_numpy()
    return np.ascontiguousarray(ordered, dtype=np.int64)


def _binary_keys(tokens: TokenTable) -> pl.Series:
    """The whole table as a binary column, each token four big-endian bytes."""
    import polars as pl
    import pyarrow as pa

    offsets = np.asarray(tokens.offsets, dtype=np.int64)
    chunks = []
    first = 0
    while first < len(tokens):
        end_token = int(offsets[first]) + _CHUNK_TOKENS
        last = int(np.searchsorted(offsets, end_token, side="right")) - 1
        last = max(first + 1, last)
        span = tokens.values[offsets[first] : offsets[last]].astype(">u4")
        starts = (offsets[first : last + 1] - offsets[first]) * 4
        buffers = [None, pa.py_buffer(starts), pa.py_buffer(span)]
        chunks.append(pa.LargeBinaryArray.from_buffers(pa.large_binary(), last - first, buffers))
        first = last
    return pl.Series("key", pa.chunked_array(chunks, type=pa.large_binary()))


def common_prefixes(tokens: TokenTable, order: I64) -> I32:
    """int32[n]: tokens that row ``order[k]`` shares with row ``order[k - 1]``; 0 for ``k == 0``.

    Pairs are compared window by window; a pair leaves as soon as its difference is found, and
    windows grow, so long shared prefixes cost a copy of their tokens and little more.
    """
    values = np.asarray(tokens.values)
    starts = np.asarray(tokens.offsets)[order]
    lengths = np.asarray(tokens.offsets)[order + 1] - starts
    lcp = np.zeros(len(order), dtype=np.int32)
    limit = np.minimum(lengths[1:], lengths[:-1])
    active = np.flatnonzero(limit > 0)  # pair p compares positions p and p + 1 of the order
    depth, width = 0, _FIRST_WINDOW
    while len(active):
        kept = []
        block = max(1, _BLOCK_TOKENS // width)
        for begin in range(0, len(active), block):
            pairs = active[begin : begin + block]
            left = _windows(values, starts[pairs] + depth, width)
            right = _windows(values, starts[pairs + 1] + depth, width)
            differs = left != right
            equal = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
            lcp[pairs + 1] = np.minimum(depth + equal, limit[pairs])
            kept.append(pairs[(equal == width) & (limit[pairs] > depth + width)])
        active = np.concatenate(kept)
        depth += width
        width = min(2 * width, _LAST_WINDOW)
    return lcp


def _windows(values: U32, starts: I64, width: int) -> U32:
    """uint32[len(starts), width]: ``values[s : s + width]`` for each start.

    A window may run into the tokens of later rows (the caller cuts at the row's length); one
    that would pass the end of the table repeats the last token.
    """
    num_whole = len(values) - width + 1
    if num_whole <= 0 or starts.max() >= num_whole:
        index = starts[:, None] + np.arange(width)
        gathered: U32 = values[np.minimum(index, len(values) - 1)]
        return gathered
    # A strided view makes each row of the gather one contiguous copy.
    view = np.lib.stride_tricks.as_strided(
        values,
        shape=(num_whole, width),
        strides=(values.itemsize, values.itemsize),
        writeable=False,
    )
    whole: U32 = view[starts]
    return whole
