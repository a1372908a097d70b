"""Parts of many prompts to one ragged token table, in one call of the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np

from batchradix.checkpoint.tokenizer import Tokenizer
from batchradix.prompts.guard import Span
from batchradix.prompts.surrogates import clean_text
from batchradix.types import U32, TokenTable

Part = Span | U32
"""What is encoded as one, or token ids that are known."""


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[Sequence[Part]]) -> TokenTable:
    """Token ids of each prompt, one table row a prompt; no parts, no tokens.

    Texts must hold no lone surrogates.
    """
    spans = [part for part in chain.from_iterable(prompts) if isinstance(part, Span)]
    texts: dict[Span, list[int]] = {span: [] for span in spans if span.token_id is None}
    outer = [span for span in texts if not span.is_inner]
    inner = [span for span in texts if span.is_inner]
    found = tokenizer.encode_plain([s.text for s in outer], [s.at_start for s in outer])
    texts.update(zip(outer, found, strict=True))
    texts.update(zip(inner, tokenizer.encode_inner([s.text for s in inner]), strict=True))
    chunks = [
        part
        if not isinstance(part, Span)
        else np.array(texts[part] if part.token_id is None else [part.token_id], dtype=np.uint32)
        for part in chain.from_iterable(prompts)
    ]
    return joined(chunks, [0, *accumulate(map(len, prompts))])


def count_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> list[int]:
    """How many tokens each text has by itself."""
    plain = [clean_text(text) for text in texts]
    return [len(ids) for ids in tokenizer.encode_plain(plain, [False] * len(plain))]


def joined(chunks: Sequence[U32], ends: Sequence[int]) -> TokenTable:
    """A table of which row ``r`` is the chunks ``[ends[r], ends[r + 1])``, uint32 each."""
    sizes = np.zeros(len(chunks) + 1, dtype=np.int64)  # in tokens
    np.cumsum(np.fromiter(map(len, chunks), np.int64, len(chunks)), out=sizes[1:])
    values = np.concatenate([np.zeros(0, dtype=np.uint32), *chunks])
    return TokenTable(values, sizes[np.array(ends, dtype=np.int64)])
