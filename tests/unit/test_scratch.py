from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from batchradix import scratch as scratch_module
from batchradix.errors import RunError
from batchradix.scratch import Scratch, windows


def is_mapped(array: Any) -> bool:
    """Whether an array lies in a file, and so costs no memory of its own."""
    base = array
    while base is not None and type(base).__name__ != "mmap":
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    return base is not None


def test_windows_cover_all_rows_once() -> None:
    assert [*windows(7, 3)] == [slice(0, 3), slice(3, 6), slice(6, 7)]
    assert [*windows(0, 3)] == []


@pytest.mark.parametrize("least_bytes", [None, 0, 1 << 20])
def test_arrays_hold_what_was_put_in_wherever_they_lie(
    tmp_path: Path, least_bytes: int | None
) -> None:
    scratch = Scratch(tmp_path, least_bytes=least_bytes)
    array = scratch.zeros((5, 2), np.int32)
    assert is_mapped(array) == (least_bytes == 0)
    array[3] = 7
    scratch.let_go()
    assert array.tolist() == [[0, 0]] * 3 + [[7, 7], [0, 0]]
    assert scratch.full(3, -1, np.int64).tolist() == [-1, -1, -1]
    assert scratch.kept(np.arange(4)).tolist() == [0, 1, 2, 3]
    assert scratch.where(np.array([True, False, True])).tolist() == [0, 2]
    assert len(scratch.zeros(0, np.int64)) == 0
    assert [*tmp_path.iterdir()] == []  # files have no name, so a kill leaves none


@pytest.mark.parametrize("least_bytes", [None, 0, 40, 1 << 20])
def test_columns_grow_at_their_end(tmp_path: Path, least_bytes: int | None) -> None:
    scratch = Scratch(tmp_path, least_bytes=least_bytes)
    column, keys = scratch.column(np.int64), scratch.column(np.uint8, 2)
    for begin in range(0, 12, 3):
        column.append(np.arange(begin, begin + 3))
        keys.append(np.arange(begin, begin + 2, dtype=np.uint8))
    column.append(np.zeros(0, dtype=np.int64))
    assert column.finish().tolist() == list(range(12))
    assert keys.finish().tolist() == [[0, 1], [3, 4], [6, 7], [9, 10]]
    assert len(scratch.column(np.int64).finish()) == 0


@pytest.mark.parametrize("least_bytes", [None, 0])
def test_arrow_columns_keep_nulls_and_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least_bytes: int | None
) -> None:
    monkeypatch.setattr(scratch_module, "_ARROW_ROWS", 3)
    column = Scratch(tmp_path, least_bytes=least_bytes).arrow_column(pa.string())
    for text in ("a", None, "ü", "d"):
        column.append(pa.array([text, text], pa.string()))
    found = column.finish()
    assert found.to_pylist() == ["a", "a", None, None, "ü", "ü", "d", "d"]
    assert found.type == pa.string()


def test_a_full_disk_is_said_when_the_array_is_made_and_never_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(scratch_module, "_reserve", full)
    with pytest.raises(RunError, match=r"No space left.*TMPDIR"):
        Scratch(tmp_path, least_bytes=0).zeros(10, np.int64)
