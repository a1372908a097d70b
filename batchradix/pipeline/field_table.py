"""The fields of a job's rows as numbers: which are the same, and how long they are."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from batchradix.jobs.base import JobSource
from batchradix.prompts.fields import Fields
from batchradix.types import I32, I64

_SAMPLED_TEXTS = 256  # of a field, encoded to learn how many tokens its characters make


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldTable:
    """``rows``: int64[n], the input's rows that have fields. ``codes``: int64[n, k], equal in a
    column for rows of the same text, numbered from 0 by first appearance. ``tokens``: int32[n, k],
    about how many each has, by its length. ``samples``: some texts of each field."""

    rows: I64
    codes: I64
    tokens: I32
    samples: Sequence[Sequence[str]]


def read_fields(
    source: JobSource, columns: Collection[str], fields: Fields, most_rows: int | None = None
) -> FieldTable:
    """Reads the fields of the first ``most_rows`` rows that have any (of all when None)."""
    numbers: list[int] = []
    hashes: list[list[int]] = []
    lengths: list[list[int]] = []
    samples: list[dict[str, None]] = [{} for _ in range(len(fields))]
    for rows in source.batches(columns):
        for row in rows:
            texts = fields.texts(row)
            if texts is None or len(numbers) == most_rows:
                continue
            numbers.append(row.index)
            hashes.append(list(map(hash, texts)))
            lengths.append(list(map(len, texts)))
            for text, known in zip(texts, samples, strict=True):
                if len(known) < _SAMPLED_TEXTS:
                    known[text] = None
        if len(numbers) == most_rows:
            break
    shape = (len(numbers), len(fields))
    found = np.array(hashes, dtype=np.int64).reshape(shape)
    tokens = np.array(lengths, dtype=np.float64).reshape(shape)
    codes = np.zeros(shape, dtype=np.int64)
    for field, known in enumerate(samples):
        size = max(1, sum(map(len, known)))
        tokens[:, field] *= sum(fields.num_tokens(list(known))) / size
        codes[:, field] = _numbered(found[:, field])
    return FieldTable(
        rows=np.array(numbers, dtype=np.int64),
        codes=codes,
        tokens=np.rint(tokens).astype(np.int32),
        samples=[list(known) for known in samples],
    )


def _numbered(values: I64) -> I64:
    """By first appearance: hashes differ from process to process, and their order with them."""
    _, firsts, inverse = np.unique(values, return_index=True, return_inverse=True)
    rank = np.empty(len(firsts), dtype=np.int64)
    rank[np.argsort(firsts)] = np.arange(len(firsts))
    numbered: I64 = rank[inverse]
    return numbered
