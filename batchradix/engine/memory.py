"""What torch and numpy say when memory runs out: smaller parts, then the project's own error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from batchradix.errors import OutOfMemoryError

T = TypeVar("T")

_SAID = ("can't allocate memory", "std::bad_alloc")
_SAID_BY_ONEDNN = ("could not create a primitive", "could not execute a primitive")
"""Whole messages: where a primitive is not known for what was asked, they say which."""


@contextmanager
def enough_memory(what: str, remedy: str) -> Iterator[None]:
    """Raises `OutOfMemoryError`: memory ran out in ``what``; ``remedy`` says what to lower."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        raise OutOfMemoryError(f"memory ran out {what}; {remedy}") from error


class Retreat:
    """Work over many things in as large parts as memory has room for.

    Where a part finds too little memory, its half is tried, down to one thing, and from then on
    no part is larger. ``notices`` says so once: ``what`` names the work, ``things`` what it is
    over, ``flags`` what a user can lower.
    """

    def __init__(self, what: str, things: str, flags: str) -> None:
        self._what = what
        self._things = things
        self._flags = flags
        self._most: int | None = None  # as many as there are
        self.notices: list[str] = []

    def in_parts(self, total: int, work: Callable[[int, int], T]) -> list[T]:
        """What ``work(first, last)`` returns over ``[0, total)``, part by part in order.

        A part that ran out of memory is worked over again: ``work`` must bear that. Raises what it
        raises for one thing alone.
        """
        results: list[T] = []
        first = 0
        while first < total:
            last = total if self._most is None else min(total, first + self._most)
            try:
                results.append(work(first, last))
            except (RuntimeError, MemoryError) as error:
                if last - first == 1 or not _is_out_of_memory(error):
                    raise
                self._halve(last - first)
            else:
                first = last
        return results

    def _halve(self, count: int) -> None:
        if self._most is None:
            self.notices.append(
                f"memory ran out {self._what} of {count:,} {self._things}; it goes on in smaller "
                f"parts, which is slower and loses nothing, but lower {self._flags} next time"
            )
        self._most = count // 2


def _is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    text = str(error)
    return (
        isinstance(error, (MemoryError, torch.OutOfMemoryError))
        or any(said in text for said in _SAID)
        or text in _SAID_BY_ONEDNN
    )
