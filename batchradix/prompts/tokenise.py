"""Spans of many prompts to one ragged token table, in one call of the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from batchradix.checkpoint.tokenizer import Tokenizer
from batchradix.prompts.guard import Span
from batchradix.types import TokenTable


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[Sequence[Span]]) -> TokenTable:
    """Token ids of each prompt, one table row a prompt; no spans, no tokens.

    Equal stretches of text (what all rows of a batch have from the template) are encoded once.
    Texts must hold no lone surrogates.
    """
    keys: dict[tuple[str, bool], int] = {}
    for prompt in prompts:
        for span in prompt:
            if span.token_id is None:
                keys.setdefault((span.text, span.at_start), len(keys))
    texts = [text for text, _ in keys]
    encoded = tokenizer.encode_plain(texts, [start for _, start in keys]) if texts else []
    chunks: list[Sequence[int]] = []
    offsets = np.zeros(len(prompts) + 1, dtype=np.int64)
    for row, prompt in enumerate(prompts):
        num_tokens = 0
        for span in prompt:
            chunk: Sequence[int]
            if span.token_id is not None:
                chunk = (span.token_id,)
            else:
                chunk = encoded[keys[span.text, span.at_start]]
            chunks.append(chunk)
            num_tokens += len(chunk)
        offsets[row + 1] = num_tokens
    np.cumsum(offsets, out=offsets)
    values = np.fromiter(chain.from_iterable(chunks), dtype=np.uint32, count=int(offsets[-1]))
    return TokenTable(values, offsets)
