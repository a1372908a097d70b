"""Parts of many prompts to one ragged token table, in one call of the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from batchradix.checkpoint.tokenizer import Tokenizer
from batchradix.prompts.form import Part
from batchradix.types import TokenTable


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[Sequence[Part]]) -> TokenTable:
    """Token ids of each prompt, one table row a prompt; no parts, no tokens.

    Equal stretches of text (what rows of a batch have from the template) are encoded once.
    Texts must hold no lone surrogates.
    """
    numbers: dict[tuple[str, bool], int] = {}
    parts: list[int | tuple[int, ...]] = []  # ids, or the number of a text
    for part in chain.from_iterable(prompts):
        if isinstance(part, tuple):
            parts.append(part)
        elif part.token_id is not None:
            parts.append((part.token_id,))
        else:
            parts.append(numbers.setdefault((part.text, part.at_start), len(numbers)))
    texts = [text for text, _ in numbers]
    encoded = tokenizer.encode_plain(texts, [start for _, start in numbers]) if texts else []
    chunks = [encoded[part] if isinstance(part, int) else part for part in parts]
    ends = np.zeros(len(chunks) + 1, dtype=np.int64)  # in tokens, of each chunk
    np.cumsum(np.fromiter(map(len, chunks), np.int64, len(chunks)), out=ends[1:])
    rows = np.zeros(len(prompts) + 1, dtype=np.int64)  # in chunks, of each prompt
    np.cumsum(np.fromiter(map(len, prompts), np.int64, len(prompts)), out=rows[1:])
    offsets = ends[rows]
    values = np.fromiter(chain.from_iterable(chunks), dtype=np.uint32, count=int(offsets[-1]))
    return TokenTable(values, offsets)
