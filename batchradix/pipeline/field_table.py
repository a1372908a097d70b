"""The fields of a job's rows as numbers: which are the same, and how long they are."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from batchradix.jobs.base import JobSource
from batchradix.plan.numbering import numbered
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
    width = len(fields)
    samples: list[dict[str, None]] = [{} for _ in range(width)]
    numbers, hashes, lengths = [], [], []
    num_rows = 0
    for batch in source.batches(columns):
        found = [(row.index, texts) for row in batch if (texts := fields.texts(row)) is not None]
        if most_rows is not None:
            found = found[: most_rows - num_rows]
        for _, texts in found:
            for text, known in zip(texts, samples, strict=True):
                if len(known) < _SAMPLED_TEXTS:
                    known[text] = None
        numbers.append(np.array([index for index, _ in found], np.int64))
        hashes.append(np.array([hash(text) for _, texts in found for text in texts], np.int64))
        lengths.append(np.array([len(text) for _, texts in found for text in texts], np.int32))
        num_rows += len(found)
        if num_rows == most_rows:
            break
    shape = (num_rows, width)
    codes = np.concatenate([np.zeros(0, np.int64), *hashes]).reshape(shape)
    tokens = np.concatenate([np.zeros(0, np.int32), *lengths]).reshape(shape)
    for field, known in enumerate(samples):
        size = max(1, sum(map(len, known)))
        share = sum(fields.num_tokens(list(known))) / size
        tokens[:, field] = np.rint(tokens[:, field] * share)
        # Hashes differ from process to process, and their order with them.
        codes[:, field] = numbered(codes[:, field])
    return FieldTable(
        rows=np.concatenate([np.zeros(0, np.int64), *numbers]),
        codes=codes,
        tokens=tokens,
        samples=[list(known) for known in samples],
    )
