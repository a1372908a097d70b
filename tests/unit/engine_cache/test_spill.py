"""Room beside the pool: what is written comes back, a full disk is no crash."""

from __future__ import annotations

import os
import resource
import tempfile
from pathlib import Path

import numpy as np
import pytest

from batchradix.engine.cache.spill import SpillSpace
from batchradix.errors import RunError

TOKEN_BYTES = 96


@pytest.fixture
def scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("in_memory", [False, True])
def test_tokens_come_back_from_where_they_were_written(
    scratch_folder: Path, in_memory: bool
) -> None:
    space = SpillSpace(50, TOKEN_BYTES, in_memory=in_memory)
    first, hole, last = (space.allocate(n) for n in (10, 5, 35))
    assert first is not None
    assert hole is not None
    assert last is not None
    assert space.allocate(1) is None
    space.free(hole)
    space.free([(40, 10)])
    scattered = space.allocate(12)
    assert scattered is not None
    assert len(scattered) == 2
    data = np.random.default_rng(1).bytes(22 * TOKEN_BYTES)
    space.write(first, memoryview(data)[: 10 * TOKEN_BYTES])
    space.write(scattered, memoryview(data)[10 * TOKEN_BYTES :])
    assert space.read(first) + space.read(scattered) == data
    assert space.read([(3, 4)]) == data[3 * TOKEN_BYTES : 7 * TOKEN_BYTES]
    assert list(scratch_folder.iterdir()) == []  # a kill leaves nothing behind
    space.close()
    space.close()


def test_a_full_disk_is_found_before_anything_is_promised(scratch_folder: Path) -> None:
    space = SpillSpace(100, TOKEN_BYTES)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 * TOKEN_BYTES, before[1]))
    try:
        assert space.allocate(20) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert space.num_used == 0
    assert not space.pays(1000)
    (notice,) = space.notices
    assert str(scratch_folder) in notice
    assert "set TMPDIR" in notice
    space.close()


def test_a_file_that_breaks_is_a_sentence(scratch_folder: Path) -> None:
    space = SpillSpace(100, TOKEN_BYTES)
    places = space.allocate(20)
    assert places
    os.ftruncate(space._file.fileno(), 0)
    with pytest.raises(RunError, match="leave --kv-disk out"):
        space.read(places)
    space.close()
