"""Which rows choose among few tokens."""

from __future__ import annotations

import numpy as np
import pytest

from batchradix.engine.candidates import MAX_CANDIDATES, find_candidates

VOCAB = 50_003


def masks(*rows: list[int], spare: bool = False) -> np.ndarray:
    bitmask = np.zeros((len(rows), -(-VOCAB // 32)), dtype=np.uint32)
    for r, ids in enumerate(rows):
        for i in ids:
            bitmask[r, i // 32] |= np.uint32(1) << np.uint32(i % 32)
    if spare:
        for i in range(VOCAB, 32 * bitmask.shape[1]):
            bitmask[:, i // 32] |= np.uint32(1) << np.uint32(i % 32)
    return bitmask.view(np.int32)


@pytest.mark.parametrize("spare", [False, True])
def test_rows_with_few_allowed_tokens_are_found_with_all_these_tokens(spare: bool) -> None:
    many = list(range(0, 2 * MAX_CANDIDATES + 2, 2))
    bitmask = masks([5, 70, VOCAB - 1], many, [70, 31, 32], [], many[:MAX_CANDIDATES], spare=spare)
    before = bitmask.copy()
    found = find_candidates(bitmask, np.array([True, True, True, True, False]), VOCAB)
    assert found.is_few.tolist() == [True, False, True, False, False]
    assert found.token_ids.tolist() == [5, 31, 32, 70, VOCAB - 1]
    assert np.array_equal(bitmask, before)


def test_the_bound_counts_a_rows_own_tokens_and_depends_on_the_vocabulary() -> None:
    bitmask = masks(list(range(MAX_CANDIDATES)), list(range(1000, 1000 + MAX_CANDIDATES)))
    found = find_candidates(bitmask, np.ones(2, dtype=bool), VOCAB)
    assert found.is_few.all()
    assert len(found.token_ids) == 2 * MAX_CANDIDATES
    small = find_candidates(masks(list(range(17)), list(range(16))), np.ones(2, dtype=bool), 264)
    assert small.is_few.tolist() == [False, True]


def test_padding_of_the_vocabulary_is_no_candidate() -> None:
    found = find_candidates(masks([3, 4, 40_000]), np.ones(1, dtype=bool), 30_000)
    assert found.token_ids.tolist() == [3, 4]


def test_without_masked_rows_there_are_none() -> None:
    found = find_candidates(masks([1], [2]), np.zeros(2, dtype=bool), VOCAB)
    assert not found.is_few.any()
    assert len(found.token_ids) == 0
