"""Guesses at how an answer goes on: text that it copies from its prompt or from itself.

Where the end of the answer stands earlier in prompt or answer, what followed there is the guess.
Texts are compared, not tokens: the first word of a JSON string has no space before it and is
another token than the same word in a document, and still the rest of the name is found.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from batchradix.engine.grammar.forced import ForcedText
from batchradix.engine.grammar.state import GrammarState
from batchradix.types import U32, RowSettings

MAX_CONTEXT = 4096  # tokens at the end of a prompt that are looked through
MAX_MATCHED = 4  # last tokens of the answer that are looked for
MAX_DRAFT_TOKENS = 32  # of one row in one step, forced ones included
_MAX_PLACES = 8  # earlier places tried at which no token of the context begins
_APART = b"\xff"  # stands for special tokens; no text holds it


@dataclass(slots=True, kw_only=True)
class Draft:
    """Tokens that a row's answer may go on with.

    ``pieces[i]``: a guessed token and what the grammar forces after it. ``states[i]``: the
    grammar's state behind that, None without a grammar. ``num_matched``: how many of the
    answer's last tokens the guess rests on, at most `MAX_MATCHED`.
    """

    num_matched: int
    pieces: list[tuple[int, ...]] = field(default_factory=list)
    states: list[GrammarState | None] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.pieces))

    @property
    def token_ids(self) -> list[int]:
        return [token_id for piece in self.pieces for token_id in piece]

    @property
    def places(self) -> tuple[int, ...]:
        """How many of the draft's tokens stand before each token that is to be sampled: the
        answer's next one, and the one behind each piece."""
        return tuple(accumulate(map(len, self.pieces), initial=0))

    def cut(self, num_pieces: int) -> Draft | None:
        """The first pieces alone; None when these are none."""
        if num_pieces <= 0:
            return None
        return Draft(
            num_matched=self.num_matched,
            pieces=self.pieces[:num_pieces],
            states=self.states[:num_pieces],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedPlace:
    """The place behind some pieces of a draft, where a token is chosen if they all come true."""

    settings: RowSettings
    rng_key: np.uint64
    grammar: GrammarState | None
    num_generated: int
    generated_ids: Sequence[int] = ()  # read for rows with penalties, which have no drafts


class CopySource:
    """A prompt's last tokens and the answer after them, as text that can be searched.

    ``prompt``: uint32[n]; ``token_bytes``: by token id, b"" for special tokens.
    """

    def __init__(self, prompt: U32, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._ids: list[int] = []
        self._text = bytearray()
        self._starts: list[int] = []  # by token: where its bytes begin in the text
        self._num_answered = 0
        self._add(prompt[-MAX_CONTEXT:].tolist())

    def follow(self, answer: Sequence[int]) -> None:
        """Takes over what is new of an answer that only ever grows."""
        self._add(answer[self._num_answered :])
        self._num_answered = len(answer)

    def guess(self, num_tokens: int) -> tuple[int, list[int]]:
        """How many last tokens were found again, and up to ``num_tokens`` that followed there.

        The longest match counts, of equally long ones the last. (0, []) when there is none.
        """
        size = len(self._text)
        for num_matched in range(min(MAX_MATCHED, len(self._ids) - 1), 0, -1):
            wanted = bytes(self._text[self._starts[-num_matched] :])
            if _APART in wanted:
                continue
            end = size - 1
            for _ in range(_MAX_PLACES):
                start = self._text.rfind(wanted, 0, end)
                if start < 0:
                    break
                place = bisect_left(self._starts, start + len(wanted))
                if place < len(self._ids) and self._starts[place] == start + len(wanted):
                    return num_matched, self._ids[place : place + num_tokens]
                end = start + len(wanted) - 1
        return 0, []

    def _add(self, token_ids: Sequence[int]) -> None:
        known = len(self._token_bytes)
        for token_id in token_ids:
            self._starts.append(len(self._text))
            self._text += (self._token_bytes[token_id] if token_id < known else b"") or _APART
        self._ids.extend(token_ids)


def make_draft(
    guess: Sequence[int],
    num_matched: int,
    *,
    state: GrammarState | None,
    forced: ForcedText | None,
    eos_ids: frozenset[int],
    max_tokens: int,
) -> Draft | None:
    """As much of a guess as the grammar allows and leaves the answer unfinished.

    ``state`` is where the answer stands and is left as it is; ``forced`` the rule by which the
    answer appends what follows without a choice. At most ``max_tokens`` tokens, whole pieces.
    What the grammar forces need not be guessed: where the guess says the same it is skipped.
    """
    draft = Draft(num_matched=num_matched)
    state = None if state is None else state.fork()
    room = min(max_tokens, MAX_DRAFT_TOKENS)
    place = 0
    while place < len(guess):
        token_id = guess[place]
        piece: tuple[int, ...] = (token_id,)
        if token_id in eos_ids:
            break
        if state is not None:
            if not state.accept(token_id) or state.is_complete:
                break
            if forced is not None:
                piece += forced.next_ids(state)
        room -= len(piece)
        if room < 0:
            break
        if state is not None:
            for forced_id in piece[1:]:
                state.accept(forced_id)
            if state.is_complete:
                break
        draft.pieces.append(piece)
        draft.states.append(None if state is None else state.fork())
        if tuple(guess[place : place + len(piece)]) != piece:
            break  # the copied text goes on otherwise than the answer must
        place += len(piece)
    return draft if draft.pieces else None
