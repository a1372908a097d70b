"""From a token table to a `Plan`: a lexicographic sort and the prefixes it brings together.

A table that is too large to be sorted in memory is sorted in ranges: rows chosen at random mark
where the ranges part, each row is put into its range, and one range after the other is sorted.
Nothing has to be merged, and the order is the same. What neighbours share is measured while a
range's tokens are in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from batchradix.scratch import Scratch
from batchradix.types import I32, I64, U32, Plan, TokenTable

if TYPE_CHECKING:
    import polars as pl

DEFAULT_PLAN_MEMORY_BYTES = 256 << 20
# What sorting in memory takes: bytes in both orders, views, numbers; of a token and of a row.
_SORT_TOKEN_BYTES = 8
_SORT_ROW_BYTES = 128
_FEWEST_ROWS = 64  # below that a range is sorted whatever it takes
FEW_ROWS = 1 << 12
"""Up to as many are sorted by Python itself: at once, and in a process too that was forked from one
that had used Polars, whose threads then wait for ever."""
# Ranges are made smaller than they may be, because chosen rows only guess at their sizes.
_RANGE_SLACK = 2
_CHOSEN_PER_RANGE = 16
_MOST_RANGES = 256
# Polars addresses the bytes of a chunk with 32 bits; chunks stay well below that.
_CHUNK_TOKENS = 1 << 28
# Tokens compared at once (twice this many are gathered), and the windows they are cut into.
_BLOCK_TOKENS = 1 << 20
_FIRST_WINDOW = 16
# Rows from all over the table that are looked at between letting go of its pages; the kernel maps
# 16 pages around each, so that these may be 64 MiB.
_SCATTERED_ROWS = 1 << 10
_LAST_WINDOW = 1024


def make_plan(
    tokens: TokenTable,
    rows: I64 | None = None,
    *,
    memory_bytes: int = DEFAULT_PLAN_MEMORY_BYTES,
    scratch: Scratch | None = None,
) -> Plan:
    """Sorts rows lexicographically by token ids and measures what neighbours share.

    ``rows``: int64[n], distinct row numbers of ``tokens`` in any order; all rows when None.
    Equal rows come in order of row number, empty rows first. Sorting takes about
    ``memory_bytes``, or one copy of the tokens and some tens of bytes a row where that is less.
    The plan's arrays are made in ``scratch`` (None: in memory).
    """
    scratch = scratch or Scratch(least_bytes=None)
    chosen = None if rows is None else _ascending(rows)
    num_rows = len(tokens) if chosen is None else len(chosen)
    order = scratch.zeros(num_rows, np.int64)
    lcp = scratch.zeros(num_rows, np.int32)
    sorter = _Sorter(tokens, memory_bytes, scratch)
    sorter.sort(chosen, order, lcp)
    firsts = np.array(sorter.firsts, dtype=np.int64)
    lcp[firsts] = _pairs(tokens, order[firsts - 1], order[firsts])
    return Plan(order=order, lcp=lcp)


def _ascending(rows: I64) -> I64:
    rows = np.asarray(rows, dtype=np.int64)
    return rows if len(rows) < 2 or (rows[1:] > rows[:-1]).all() else np.sort(rows)


class _Sorter:
    """Sorts rows of a table, at most as many at a time as fit into ``memory_bytes``."""

    def __init__(self, tokens: TokenTable, memory_bytes: int, scratch: Scratch) -> None:
        self._tokens = tokens
        self._memory_bytes = memory_bytes
        self._scratch = scratch
        self._random = np.random.default_rng(0)  # the order does not depend on it
        self.firsts: list[int] = []
        """Positions whose rows are the first of a range, but for position 0."""

    def sort(self, rows: I64 | None, order: I64, lcp: I32, at: int = 0) -> None:
        """Writes ``rows`` (ascending; all of them when None) to ``order``, in their order, and what
        each shares with the one before to ``lcp``, 0 for the first. Both begin at position ``at``
        of the plan."""
        num_rows = len(order)
        need_bytes = self._need_bytes(rows, num_rows)
        if need_bytes <= self._memory_bytes or num_rows <= _FEWEST_ROWS:
            chosen = np.arange(num_rows, dtype=np.int64) if rows is None else rows
            order[:], lcp[:] = _sorted_rows(self._tokens, chosen, self._scratch)
            self._scratch.let_go()
            return
        ranges = min(_MOST_RANGES, 1 + _RANGE_SLACK * need_bytes // self._memory_bytes)
        markers = self._markers(rows, num_rows, int(ranges))
        range_of = self._ranges(rows, num_rows, markers)
        counts = np.bincount(range_of, minlength=2 * len(markers) + 1)
        begin = 0
        for number in np.flatnonzero(counts).tolist():
            stop = begin + int(counts[number])
            part = _selected(range_of == number, rows)
            if number % 2:  # rows that are equal to a marker, and so to each other
                order[begin:stop] = part
                row = markers[number // 2]
                lcp[begin + 1 : stop] = self._tokens.offsets[row + 1] - self._tokens.offsets[row]
            else:
                self.sort(part, order[begin:stop], lcp[begin:stop], at + begin)
            if begin > 0:
                self.firsts.append(at + begin)
            begin = stop

    def _need_bytes(self, rows: I64 | None, num_rows: int) -> int:
        offsets = self._tokens.offsets
        if rows is None:
            num_tokens = int(offsets[-1])
        else:
            num_tokens = 0
            for part in self._scratch.windows(num_rows):
                here = rows[part]
                num_tokens += int((offsets[here + 1] - offsets[here]).sum())
        return _SORT_TOKEN_BYTES * num_tokens + _SORT_ROW_BYTES * num_rows

    def _markers(self, rows: I64 | None, num_rows: int, num_ranges: int) -> I64:
        """int64: rows with different tokens, sorted, that part the others into ranges."""
        count = min(num_rows, num_ranges * _CHOSEN_PER_RANGE)
        places = np.unique(self._random.integers(num_rows, size=count))
        some = places if rows is None else rows[places]
        chosen, _ = _sorted_rows(self._tokens, some, self._scratch)
        step = max(1, len(chosen) // num_ranges)
        markers: list[int] = []
        for row in chosen[step // 2 :: step].tolist():
            if not markers or not np.array_equal(self._tokens[row], self._tokens[markers[-1]]):
                markers.append(row)
        return np.array(markers, dtype=np.int64)

    def _ranges(self, rows: I64 | None, num_rows: int, markers: I64) -> NDArray[np.uint16]:
        """uint16[num_rows]: ``2 * m + 1`` for a row equal to marker ``m``, ``2 * m`` for one
        between it and the marker before."""
        import polars as pl

        found = self._scratch.zeros(num_rows, np.uint16)
        marks = _keys(*_gathered(self._tokens, markers, self._scratch))
        begin = 0
        while begin < num_rows:
            stop = self._window(rows, begin, num_rows)
            here = np.arange(begin, stop) if rows is None else rows[begin:stop]
            keys = _keys(*_gathered(self._tokens, here, self._scratch))
            frame = pl.DataFrame(
                {
                    "key": pl.concat([marks, keys]),
                    "place": np.arange(-len(marks), len(keys), dtype=np.int64),
                }
            )
            # Sorted together with the markers, and equal rows behind their marker.
            ordered = frame.sort("key", maintain_order=True)
            places = ordered["place"].to_numpy()
            passed = np.cumsum(places < 0)
            last = np.append(np.flatnonzero(places < 0), 0)[np.maximum(passed, 1) - 1]
            sorted_keys = ordered["key"]
            equal = (passed > 0) & (sorted_keys == sorted_keys.gather(last)).to_numpy()
            kind = 2 * passed - equal
            found[begin + places[places >= 0]] = kind[places >= 0]
            begin = stop
            self._scratch.let_go()
        return found

    def _window(self, rows: I64 | None, begin: int, num_rows: int) -> int:
        """Where the rows from ``begin`` on that fit half of the memory end."""
        most = max(1, self._memory_bytes // 2 // _SORT_ROW_BYTES)
        stop = min(num_rows, begin + most)
        here = np.arange(begin, stop) if rows is None else rows[begin:stop]
        offsets = self._tokens.offsets
        needs = (offsets[here + 1] - offsets[here]) * _SORT_TOKEN_BYTES + _SORT_ROW_BYTES
        fit = int(np.searchsorted(np.cumsum(needs), self._memory_bytes // 2, side="right"))
        return begin + max(1, fit)


def _selected(mask: NDArray[np.bool_], rows: I64 | None) -> I64:
    places = np.flatnonzero(mask)
    return places if rows is None else rows[places]


def _sorted_rows(tokens: TokenTable, rows: I64, scratch: Scratch) -> tuple[I64, I32]:
    """``rows`` (ascending) in lexicographic order, and what each shares with the one before.

    Bytes compare as tokens when big-endian.
    """
    if len(rows) <= FEW_ROWS:
        offsets, values = np.asarray(tokens.offsets), tokens.values
        keys = [values[offsets[row] : offsets[row + 1]].astype(">u4").tobytes() for row in rows]
        few = rows[sorted(range(len(rows)), key=keys.__getitem__)]
        return few, common_prefixes(tokens, few, scratch)
    import polars as pl

    span, starts = _gathered(tokens, rows, scratch)
    frame = pl.DataFrame({"key": _keys(span, starts), "place": np.arange(len(rows))})
    ordered = frame.select(pl.col("place").sort_by("key", maintain_order=True))["place"].to_numpy()
    del frame
    return rows[ordered], _shared(span, starts[ordered], np.diff(starts)[ordered])


def _keys(span: U32, starts: I64) -> pl.Series:
    """The rows ``span[starts[r] : starts[r + 1]]`` as a binary column."""
    import polars as pl
    import pyarrow as pa

    chunks = []
    first, num_rows = 0, len(starts) - 1
    while first < num_rows:
        last = int(np.searchsorted(starts, starts[first] + _CHUNK_TOKENS, side="right")) - 1
        last = max(first + 1, last)
        buffers = [
            None,
            pa.py_buffer((starts[first : last + 1] - starts[first]) * 4),
            pa.py_buffer(span[starts[first] : starts[last]]),
        ]
        chunks.append(pa.LargeBinaryArray.from_buffers(pa.large_binary(), last - first, buffers))
        first = last
    return pl.Series("key", pa.chunked_array(chunks, type=pa.large_binary()))


def _gathered(tokens: TokenTable, rows: I64, scratch: Scratch) -> tuple[U32, I64]:
    """The tokens of ``rows`` one after the other, big-endian, and where each begins."""
    offsets, values = np.asarray(tokens.offsets), np.asarray(tokens.values)
    lengths = offsets[rows + 1] - offsets[rows]
    starts = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    span = np.empty(int(starts[-1]), dtype=np.uint32)
    size = max(1, min(_SCATTERED_ROWS, _BLOCK_TOKENS // (1 + len(span) // max(1, len(rows)))))
    for part in scratch.windows(len(rows), size):
        here = rows[part]
        into = span[starts[part.start] : starts[min(part.stop, len(rows))]]
        into[:] = _taken(values, offsets, here)
        into.byteswap(inplace=True)
    return span, starts


def _taken(values: U32, offsets: I64, rows: I64) -> U32:
    """The tokens of a few rows."""
    begin, stop = int(rows[0]), int(rows[-1]) + 1
    if stop - begin == len(rows) and (np.diff(rows) == 1).all():
        return values[offsets[begin] : offsets[stop]]
    import pyarrow as pa
    import pyarrow.compute as pc

    some, which = np.unique(rows, return_inverse=True)
    # Every other element is a row; those in between are what lies between two rows.
    bounds = np.stack([offsets[some], offsets[some + 1]], axis=1).reshape(-1) * 4
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(values)]
    array = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(bounds) - 1, buffers)
    taken = pc.take(array, pa.array(2 * which), boundscheck=False)
    return np.frombuffer(taken.buffers()[2], dtype=np.uint32)


def common_prefixes(tokens: TokenTable, order: I64, scratch: Scratch | None = None) -> I32:
    """int32[n]: tokens that row ``order[k]`` shares with row ``order[k - 1]``; 0 for ``k == 0``.

    The array is made in ``scratch`` (None: in memory).
    """
    scratch = scratch or Scratch(least_bytes=None)
    lcp = scratch.zeros(len(order), np.int32)
    for part in scratch.windows(len(order), _SCATTERED_ROWS):
        before = max(0, part.start - 1)
        some = np.asarray(order[before : part.stop])
        starts = np.asarray(tokens.offsets)[some]
        lengths = np.asarray(tokens.offsets)[some + 1] - starts
        lcp[part] = _shared(np.asarray(tokens.values), starts, lengths)[part.start - before :]
    return lcp


def _pairs(tokens: TokenTable, left: I64, right: I64) -> I32:
    """What each row of ``left`` shares with the one of ``right`` beside it."""
    both = np.stack([left, right], axis=1).reshape(-1)
    return common_prefixes(tokens, both)[1::2]


def _shared(values: U32, starts: I64, lengths: I64) -> I32:
    """int32[n]: what each row ``values[starts[r] : starts[r] + lengths[r]]`` shares with the one
    before it, 0 for the first.

    Pairs are compared window by window; a pair leaves as soon as its difference is found, and
    windows grow, so long shared prefixes cost a copy of their tokens and little more.
    """
    lcp = np.zeros(len(starts), dtype=np.int32)
    limit = np.minimum(lengths[1:], lengths[:-1])
    active = np.flatnonzero(limit > 0)  # pair p compares rows p and p + 1
    depth, width = 0, _FIRST_WINDOW
    while len(active):
        kept = []
        block = max(1, _BLOCK_TOKENS // width)
        for begin in range(0, len(active), block):
            pairs = active[begin : begin + block]
            equal = np.minimum(_equal(values, starts, pairs, depth, width), limit[pairs] - depth)
            lcp[pairs + 1] = depth + equal
            kept.append(pairs[(equal == width) & (limit[pairs] > depth + width)])
        active = np.concatenate(kept)
        depth += width
        width = min(2 * width, _LAST_WINDOW)
    return lcp


def _equal(values: U32, starts: I64, pairs: I64, depth: int, width: int) -> I64:
    """In how many tokens from ``depth`` on the rows of each pair are equal, at most ``width``."""
    first = int(pairs[0])
    wanted = np.zeros(int(pairs[-1]) - first + 2, dtype=np.bool_)
    wanted[pairs - first] = wanted[pairs - first + 1] = True
    rows = np.flatnonzero(wanted)  # each once, though most are in two pairs
    tokens = _windows(values, starts[rows + first] + depth, width)
    differs = (tokens[1:] != tokens[:-1])[np.searchsorted(rows, pairs - first)]
    equal: I64 = differs.argmax(axis=1)
    equal[~differs[np.arange(len(pairs)), equal]] = width
    return equal


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
