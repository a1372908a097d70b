"""Every instruction set that a C kernel can run on here, one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from batchradix_kernels.native import Level, level, limit_level


@pytest.fixture(params=list(Level), ids=[one.name.lower() for one in Level])
def every_level(request: pytest.FixtureRequest) -> Iterator[Level]:
    """Holds the C kernels back to one instruction set; skips those that are not here."""
    best = level()
    if best is None or request.param > best:
        pytest.skip("not built, or not on this CPU")
    limit_level(request.param)
    yield request.param
    limit_level(Level.AMX)
