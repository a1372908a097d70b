"""What torch and numpy say when memory runs out, as the project's own error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from batchradix.errors import OutOfMemoryError


@contextmanager
def enough_memory(what: str, remedy: str) -> Iterator[None]:
    """Raises `OutOfMemoryError`: memory ran out in ``what``; ``remedy`` says what to lower."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        raise OutOfMemoryError(f"memory ran out {what}; {remedy}") from error


def _is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)
