"""Requests go to the longest prefix, unless too much waits there."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix.fleet.routing import Router
from batchradix.types import U32


def prompt(document: int, question: int, length: int = 64) -> U32:
    head = np.full(length, document, dtype=np.uint32)
    return np.concatenate([head, np.arange(8, dtype=np.uint32) + 100 * question])


def test_a_second_question_goes_where_the_document_is() -> None:
    router = Router(3, cache_tokens=10_000)
    assert [router.route(prompt(one, 1)) for one in (1, 2, 3)] == [(0, 72), (1, 72), (2, 72)]
    for worker in range(3):
        router.done(worker, 72)
    assert [router.route(prompt(one, 2)) for one in (3, 1, 2)] == [(2, 8), (0, 8), (1, 8)]


def test_where_too_much_waits_a_prefix_is_computed_again() -> None:
    router = Router(2, cache_tokens=10_000)
    router.done(*router.route(prompt(1, 0)))
    chosen = [router.route(prompt(1, question))[0] for question in range(1, 41)]
    assert chosen[:9] == [0] * 9  # 64 tokens are worth as much as eight questions
    assert chosen[9] == 1
    assert set(chosen) == {0, 1}
    assert abs(chosen.count(0) - chosen.count(1)) <= 10


def test_what_left_the_cache_is_not_known_any_more() -> None:
    router = Router(1, cache_tokens=128)
    router.route(prompt(1, 1))
    assert router.known_tokens(0, prompt(1, 2)) == 64
    for document in range(2, 5):
        router.route(prompt(document, 1))
    assert router.known_tokens(0, prompt(1, 2)) == 0
    assert router.known_tokens(0, prompt(4, 2)) == 64
    router.forget(0)
    assert router.known_tokens(0, prompt(4, 2)) == 0


ROWS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=60)


@given(ROWS, st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_known_prefixes_are_those_of_requests_sent_before_and_load_stays_within_the_longest(
    rows: list[list[int]], num_workers: int, block: int
) -> None:
    router = Router(num_workers, cache_tokens=10**6, block_tokens=block)
    sent: list[list[list[int]]] = [[] for _ in range(num_workers)]
    waiting = [0] * num_workers
    for row in rows:
        tokens = np.array(row, dtype=np.uint32)
        expected = []
        for mine in sent:
            shared = max(
                (next((i for i, (a, b) in enumerate(zip(row, one, strict=False)) if a != b),
                      min(len(row), len(one))) for one in mine),
                default=0,
            )  # fmt: skip
            expected.append(shared // block * block)
        assert [router.known_tokens(one, tokens) for one in range(num_workers)] == expected
        worker, new = router.route(tokens)
        assert new == len(row) - expected[worker]
        waiting[worker] += new
        sent[worker].append(row)
        # no worker is so far behind that any request would have been done there sooner
        assert max(waiting) <= min(waiting) + max(map(len, rows))
