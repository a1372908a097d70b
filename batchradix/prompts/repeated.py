"""Texts of prompts to token ids, those that repeat only once.

A long text is cut at borders of the tokenizer about every 256 characters, counted from its
beginning, so that texts that begin alike have their first pieces in common. Pieces are kept with
their ids, up to a limit of memory. In each place of the prompts this goes on only while it pays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, pairwise

import numpy as np

from batchradix.checkpoint.borders import Borders
from batchradix.checkpoint.tokenizer import Tokenizer
from batchradix.prompts.guard import Span
from batchradix.prompts.spot import Spot
from batchradix.prompts.tokenise import Part, joined
from batchradix.types import U32, TokenTable

KEPT_BYTES = 64 << 20
_PIECE_CHARS = 256
_SEARCHED_CHARS = 64  # in which a border has to be found
_ENTRY_BYTES = 300  # what a piece takes beside its text and ids
_SEEN_SLOTS = 1 << 22
_Key = tuple[str, bool, bool]  # a text, whether it is at the start, whether it goes on


class TextEncoder:
    """Encodes the prompts of one job, batch after batch."""

    def __init__(self, tokenizer: Tokenizer, kept_bytes: int = KEPT_BYTES) -> None:
        self._tokenizer = tokenizer
        self._kept = _Kept(kept_bytes)
        self._seen = _Seen()
        self._spots: list[Spot] = []

    def encode(self, prompts: Sequence[Sequence[Part]]) -> TokenTable:
        """As `encode_prompts`, with the same ids."""
        chunks: list[U32 | int] = []
        new: dict[_Key, int] = {}  # what is to be encoded, and its number
        to_keep: list[_Key] = []
        ends = [0]
        for parts in prompts:
            texts = 0
            for part in parts:
                if not isinstance(part, Span):
                    chunks.append(part)
                elif part.token_id is not None:
                    chunks.append(np.array([part.token_id], dtype=np.uint32))
                else:
                    spots = part.spots or ((part.text, self._spot(texts)),)
                    texts += 1
                    if len(spots) == 1 and spots[0][1].looks_up:
                        self._look_up(part, spots[0][1], chunks, new, to_keep)
                    else:
                        key = part.text, part.at_start, part.is_inner
                        chunks.append(new.setdefault(key, len(new)))
                        self._pass(spots)
            ends.append(len(chunks))
        encoded = self._encode(list(new))
        for key in to_keep:
            self._kept.put(key, encoded[new[key]].copy())
        return joined([encoded[c] if isinstance(c, int) else c for c in chunks], ends)

    def _spot(self, number: int) -> Spot:
        """The place of the text of this number in prompts that say nothing of places."""
        if number == len(self._spots):
            self._spots.append(Spot())
        return self._spots[number]

    def _look_up(
        self,
        span: Span,
        spot: Spot,
        chunks: list[U32 | int],
        new: dict[_Key, int],
        to_keep: list[_Key],
    ) -> None:
        found_chars = repeated_chars = num_new = 0
        at_start, is_inner = span.at_start, span.is_inner
        for piece in _pieces(span.text, self._tokenizer.borders):
            key = piece, at_start, is_inner
            ids = self._kept.get(key)
            if ids is not None:
                chunks.append(ids)
                found_chars += len(piece)
            elif key in new:
                chunks.append(new[key])
                found_chars += len(piece)
            else:
                chunks.append(new.setdefault(key, len(new)))
                to_keep.append(key)
                num_new += 1
                if self._seen.add(piece):
                    repeated_chars += len(piece)
            at_start, is_inner = False, True
        # Where all that was seen is still kept, what is new now will be found the next time.
        if not self._kept.has_dropped:
            found_chars += repeated_chars
        spot.note(found_chars, num_new)

    def _pass(self, spots: Iterable[tuple[str, Spot]]) -> None:
        """Sees without keeping anything whether it would pay to look texts up."""
        for text, spot in spots:
            start = text[:_PIECE_CHARS]
            repeats = self._seen.add(start) and not self._kept.has_dropped
            pieces = 1 + len(text) // _PIECE_CHARS
            spot.note(len(start) if repeats else 0, 0 if repeats else pieces)

    def _encode(self, keys: Sequence[_Key]) -> list[U32]:
        """The ids of texts, in one array for all."""
        inner = [key for key in keys if key[2]]
        outer = [key for key in keys if not key[2]]
        texts = [text for text, _, _ in outer]
        found = iter(self._tokenizer.encode_plain(texts, [start for _, start, _ in outer]))
        found_inner = iter(self._tokenizer.encode_inner([text for text, _, _ in inner]))
        encoded = [next(found_inner if key[2] else found) for key in keys]
        ends = [0, *accumulate(map(len, encoded))]
        values = np.fromiter(chain.from_iterable(encoded), np.uint32, ends[-1])
        return [values[begin:end] for begin, end in pairwise(ends)]


def _pieces(text: str, borders: Borders) -> Iterator[str]:
    """``text`` in pieces; where one ends depends on what stands before it and two characters."""
    begin = 0
    while len(text) - begin > _PIECE_CHARS:
        least = begin + _PIECE_CHARS
        border = borders.next(text, least, least + _SEARCHED_CHARS)
        if border is None:
            break
        yield text[begin:border]
        begin = border
    yield text[begin:]


class _Kept:
    """Ids by text, the latest of them. In two halves: when the younger is full, the older goes."""

    def __init__(self, limit_bytes: int) -> None:
        self._half_bytes = limit_bytes // 2
        self._young: dict[_Key, U32] = {}
        self._old: dict[_Key, U32] = {}
        self._young_bytes = 0
        self.has_dropped = False

    def get(self, key: _Key) -> U32 | None:
        ids = self._young.get(key)
        if ids is None:
            ids = self._old.pop(key, None)
            if ids is not None:
                self.put(key, ids)
        return ids

    def put(self, key: _Key, ids: U32) -> None:
        self._young[key] = ids
        self._young_bytes += key[0].__sizeof__() + ids.nbytes + _ENTRY_BYTES
        if self._young_bytes > self._half_bytes:
            self.has_dropped |= bool(self._old)
            self._old, self._young, self._young_bytes = self._young, {}, 0


class _Seen:
    """Which texts there were: a byte for each, where another one's may be."""

    def __init__(self) -> None:
        self._slots = bytearray(_SEEN_SLOTS)
        self._count = 0

    def add(self, text: str) -> bool:
        """Whether ``text`` was there before, or one that shares its byte."""
        slot = hash(text) % _SEEN_SLOTS
        if self._slots[slot]:
            return True
        self._slots[slot] = 1
        self._count += 1
        if self._count > _SEEN_SLOTS // 4:
            self._slots, self._count = bytearray(_SEEN_SLOTS), 0
        return False
