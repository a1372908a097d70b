"""The C library: what it runs on, and that it can be held back for comparisons."""

from __future__ import annotations

import pytest

from batchradix_kernels.native import Level, level, library, limit_level

pytestmark = pytest.mark.skipif(library() is None, reason="the C kernels were not built")


def test_the_instruction_set_can_be_limited_and_given_back() -> None:
    best = level()
    try:
        assert limit_level(Level.PLAIN) == level() == Level.PLAIN
        assert limit_level(Level.AVX2) <= Level.AVX2
    finally:
        assert limit_level(Level.AMX) == best
