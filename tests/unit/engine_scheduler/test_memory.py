"""Work that memory runs out for goes on in smaller parts."""

from __future__ import annotations

import pytest
import torch

from batchradix.engine.memory import Retreat, enough_memory
from batchradix.errors import OutOfMemoryError


class Work:
    """Counts from first to last, where there is memory for it."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.tried: list[tuple[int, int]] = []

    def __call__(self, first: int, last: int) -> list[int]:
        self.tried.append((first, last))
        if last - first > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return list(range(first, last))


@pytest.fixture
def retreat() -> Retreat:
    return Retreat("in a pass", "tokens", "--batch-size")


def test_parts_are_halved_until_they_fit_and_are_no_larger_afterwards(retreat: Retreat) -> None:
    work = Work(room=3)
    assert retreat.in_parts(10, work) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert work.tried[:3] == [(0, 10), (0, 5), (0, 2)]
    work.tried.clear()
    assert retreat.in_parts(3, work) == [[0, 1], [2]]
    assert work.tried == [(0, 2), (2, 3)]


def test_it_is_said_once_and_names_what_to_lower(retreat: Retreat) -> None:
    retreat.in_parts(10, Work(room=10))
    assert retreat.notices == []
    retreat.in_parts(10, Work(room=3))
    retreat.in_parts(10, Work(room=1))
    [notice] = retreat.notices
    assert "memory ran out in a pass of 10 tokens" in notice
    assert "lower --batch-size" in notice


def test_what_is_too_large_alone_and_other_errors_come_through(retreat: Retreat) -> None:
    work = Work(room=0)
    with (
        pytest.raises(OutOfMemoryError, match="ran out in a step; lower something"),
        enough_memory("in a step", "lower something"),
    ):
        retreat.in_parts(4, work)
    assert work.tried == [(0, 4), (0, 2), (0, 1)]

    def broken(first: int, last: int) -> None:
        raise RuntimeError("a kernel is broken")

    with pytest.raises(RuntimeError, match="a kernel is broken"):
        retreat.in_parts(4, broken)
