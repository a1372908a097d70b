"""What the grammar leaves no choice about, as tokens: one rule, the same wherever it is asked.

The grammar says which *text* must come next; the model wants tokens. Forced text is cut as the
tokenizer cuts it when it stands alone, and the last of these tokens is held back when a longer
token that the grammar allows begins with it: the model would perhaps have taken that one, so it
is left the choice. Only the last token is looked at; longer tokens that would swallow the one
before it as well are given up. Tokens that were sampled are never cut anew, so what a row's
tokens are depends on its own answer alone. Where the whole answer is one of a few texts, each is
cut as a whole, and nothing has to be held back (`choices`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Protocol

import numpy as np

from batchradix.engine.grammar.choices import ChoiceState
from batchradix.engine.grammar.state import AnyState, GrammarState
from batchradix.types import I64

_KEPT_TEXTS = 4096  # forced texts whose tokens are remembered
_ANCHOR = "\n"  # stands before a text where the tokenizer puts a space at every beginning


class GrammarTokenizer(Protocol):
    """The part of a checkpoint's tokenizer that grammars need.

    ``token_bytes[i]`` are the raw bytes of token ``i``, ``b""`` for special tokens: these are
    never written under a grammar, so text that looks like one is spelt with ordinary tokens.
    """

    @property
    def token_bytes(self) -> tuple[bytes, ...]: ...

    def encode_plain(self, texts: Sequence[str], at_start: Sequence[bool]) -> list[list[int]]:
        """Token ids of each text as ordinary text; ``at_start`` False: it follows another."""
        ...


class ForcedText:
    """Turns what grammars force into token ids; safe to share between threads.

    ``vocab_size`` is the width of the model's logits. ``token_bytes``: of every token of it.
    """

    def __init__(self, tokenizer: GrammarTokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.token_bytes = tokenizer.token_bytes[:vocab_size]
        self.spell = lru_cache(_KEPT_TEXTS)(self._spell)
        self._longer = lru_cache(_KEPT_TEXTS)(self._find_longer)

    def next_ids(self, state: AnyState) -> tuple[int, ...]:
        """The ids that must come next, () where there is a choice or the answer is complete.

        These are the tokens of the forced text, without the last where it is held back, and
        the only token that is allowed where there is one. ``state`` ends where it was. Under a
        grammar with texts that never end nothing is forced: it might have no end. Among choices
        they are the tokens that are not branched at.
        """
        if isinstance(state, ChoiceState):
            return state.forced_ids()
        if not state.compiled.always_ends:
            return ()
        ids: list[int] = []
        try:
            while not state.is_terminated:
                piece, is_held_back = self._piece(state)
                for token_id in piece:
                    if not state.accept(token_id):  # pragma: no cover - the grammar forced it
                        return tuple(ids)
                    ids.append(token_id)
                if not piece or is_held_back:
                    break
        finally:
            if ids:
                state.rollback(len(ids))
        return tuple(ids)

    def _piece(self, state: GrammarState) -> tuple[tuple[int, ...], bool]:
        """The next forced tokens, and whether one was held back after them."""
        ids = self.spell(state.forced_text())
        if not ids:
            return _only_token(state), False
        longer = self._longer(ids[-1])
        if len(longer):
            accepted = 0
            for token_id in ids[:-1]:
                accepted += state.accept(token_id)
            words = state.allowed()
            if accepted:
                state.rollback(accepted)
            if ((words[longer >> 5] >> (longer & 31)) & 1).any():
                return ids[:-1], True
        return ids, False

    def _spell(self, text: str) -> tuple[int, ...]:
        """The tokenizer's ids of a text that follows another; () when they would not spell it."""
        if not text:
            return ()
        wanted = text.encode()
        ids = self._tokenizer.encode_plain([text], [False])[0]
        if self._bytes_of(ids) == wanted:
            return tuple(ids)
        ids = self._tokenizer.encode_plain([_ANCHOR + text], [False])[0]
        for first in range(1, len(ids)):
            if self._bytes_of(ids[:first]).endswith(_ANCHOR.encode()):
                return tuple(ids[first:]) if self._bytes_of(ids[first:]) == wanted else ()
        return ()

    def _bytes_of(self, ids: Sequence[int]) -> bytes:
        if any(i >= len(self.token_bytes) for i in ids):
            return b""
        return b"".join([self.token_bytes[i] for i in ids])

    def _find_longer(self, token_id: int) -> I64:
        """int64[n]: the tokens whose bytes begin with those of this one and go on."""
        words, ids = self._sorted
        start = self.token_bytes[token_id]
        first = bisect_right(words, start)
        last = bisect_left(words, True, lo=first, key=lambda word: not word.startswith(start))
        return ids[first:last]

    @cached_property
    def _sorted(self) -> tuple[list[bytes], I64]:
        """Every token's bytes in order, and their ids."""
        order = sorted(range(len(self.token_bytes)), key=self.token_bytes.__getitem__)
        return [self.token_bytes[i] for i in order], np.array(order, dtype=np.int64)


def _only_token(state: GrammarState) -> tuple[int, ...]:
    """The one token that the mask allows, unless it is the end; () when there are more."""
    words = state.allowed()
    places = np.flatnonzero(words)
    if len(places) != 1 or (words & state.compiled.stop_words).any():
        return ()
    word = int(words[places[0]]) & 0xFFFFFFFF
    if word & (word - 1):
        return ()
    return (32 * int(places[0]) + word.bit_length() - 1,)
