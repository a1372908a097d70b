from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from batchradix.errors import SinkError
from batchradix.scratch import Scratch
from batchradix.sink import shards
from batchradix.sink.columns import shard_schema
from batchradix.sink.shards import (
    Committed,
    RunFolder,
    ShardWriter,
    check_fingerprint,
    forget_rows,
    load_shard,
    match_rows,
    read_committed,
)
from batchradix.types import Status

OpenFolder = Callable[..., RunFolder]
Commit = Callable[..., ShardWriter]


def shard_files(folder: RunFolder) -> list[Path]:
    return sorted(folder.shards.iterdir())


def test_rows_are_committed_at_256(open_folder: OpenFolder, job: SimpleNamespace) -> None:
    folder = open_folder()
    writer = ShardWriter(folder, job.shard_schema, job.encode_values, clock=lambda: 0.0)
    for row in range(255):
        writer.append(job.result_of(row))
    assert shard_files(folder) == []
    writer.append(job.result_of(255))
    assert len(shard_files(folder)) == 1
    assert (writer.num_committed, writer.num_waiting) == (256, 0)


def test_rows_are_committed_at_8_mib(open_folder: OpenFolder, job: SimpleNamespace) -> None:
    folder = open_folder()
    writer = ShardWriter(folder, job.shard_schema, job.encode_values, clock=lambda: 0.0)
    writer.append(job.result_of(0, text="x" * (2 << 20)))
    assert writer.num_waiting == 1
    writer.append(job.result_of(1, text="x" * (2 << 20)))
    assert (writer.num_committed, writer.num_waiting) == (2, 0)


def test_a_row_waits_5_seconds_at_most(open_folder: OpenFolder, job: SimpleNamespace) -> None:
    now = [100.0]
    writer = ShardWriter(open_folder(), job.shard_schema, job.encode_values, clock=lambda: now[0])
    writer.append(job.result_of(0))
    now[0] += 4.9
    writer.append(job.result_of(1))
    assert writer.num_committed == 0
    now[0] += 0.1
    writer.commit_if_due()
    assert writer.num_committed == 2
    now[0] += 60
    writer.append(job.result_of(2))
    assert writer.num_waiting == 1


def test_committing_nothing_writes_nothing(open_folder: OpenFolder, commit: Commit) -> None:
    folder = open_folder()
    commit(folder).commit()
    assert shard_files(folder) == []


def test_committed_rows_are_found_with_key_and_status(
    open_folder: OpenFolder, commit: Commit, job: SimpleNamespace
) -> None:
    folder = open_folder()
    commit(folder, [10, 3, 6], [0])
    committed = read_committed(folder, job.shard_schema)
    assert committed.rows.tolist() == [10, 3, 6, 0]
    assert committed.content_keys.tolist() == [job.key_of(r) for r in (10, 3, 6, 0)]
    assert committed.shard_of.tolist() == [0, 0, 0, 1]
    assert committed.positions.tolist() == [0, 1, 2, 0]
    assert committed.has_status(Status.ERROR).tolist() == [True, False, False, False]
    assert committed.has_status(Status.TRUNCATED).tolist() == [False, False, True, False]
    assert committed.has_status(Status.OK).tolist() == [False, True, False, True]
    assert committed.warnings == ()


def test_an_empty_folder_has_nothing_committed(open_folder: OpenFolder) -> None:
    committed = read_committed(open_folder())
    assert len(committed) == 0
    assert match_rows(committed, 3).tolist() == [-1, -1, -1]


def test_a_later_run_goes_on_with_new_shards(open_folder: OpenFolder, commit: Commit) -> None:
    folder = open_folder()
    commit(folder, [1], [2])
    folder.close()
    folder = open_folder()
    commit(folder, [0])
    assert read_committed(folder).rows.tolist() == [1, 2, 0]
    assert [p.name[:12] for p in shard_files(folder)] == [f"shard-00000{i}" for i in range(3)]


@pytest.mark.parametrize("cut", [1, 7, 40, "add", "flip", "empty"])
def test_a_damaged_shard_is_set_aside_and_its_rows_alone_run_again(
    open_folder: OpenFolder, commit: Commit, cut: int | str
) -> None:
    folder = open_folder()
    commit(folder, [0, 1], [2, 3])
    newest = shard_files(folder)[-1]
    data = bytearray(newest.read_bytes())
    if cut == "add":
        data += b'{"id":"j39'
    elif cut == "flip":
        data[len(data) // 2] ^= 1
    elif cut == "empty":
        data.clear()
    else:
        del data[-int(cut) :]
    newest.write_bytes(data)
    committed = read_committed(folder)
    assert committed.rows.tolist() == [0, 1]
    (warning,) = committed.warnings
    assert newest.name in warning
    assert [p.name for p in folder.bad.iterdir()] == [newest.name]
    commit(folder, [2, 3])
    committed = read_committed(folder)
    assert committed.rows.tolist() == [0, 1, 2, 3]
    assert committed.warnings == ()


def test_half_written_files_are_ignored_and_removed(
    open_folder: OpenFolder, commit: Commit
) -> None:
    folder = open_folder()
    commit(folder, [0])
    (folder.tmp / "shard-000001.partial").write_bytes(b"ARROW1\0\0half")
    (folder.tmp / "output.arrow").write_bytes(b"")
    assert read_committed(folder).rows.tolist() == [0]
    assert list(folder.tmp.iterdir()) == []


def test_shards_of_another_job_or_schema_are_set_aside(
    open_folder: OpenFolder, commit: Commit, job: SimpleNamespace
) -> None:
    other = open_folder("other.arrow")
    check_fingerprint(other, {"model": "other"}, restart=True)
    commit(other, [0])
    folder = open_folder()
    commit(folder, [1])
    (foreign,) = shard_files(other)
    foreign.rename(folder.shards / foreign.name.replace("000000", "000007"))
    (folder.shards / "notes.txt").write_text("hello")
    committed = read_committed(folder, job.shard_schema)
    assert committed.rows.tolist() == [1]
    assert len(committed.warnings) == 2
    assert any("another job" in w for w in committed.warnings)
    wanted = shard_schema(id_type=pa.int64(), value_type=None)
    committed = read_committed(folder, wanted)
    assert len(committed) == 0
    assert "other columns" in committed.warnings[0]


def test_a_shard_that_spoils_after_it_was_read_is_reported_when_loaded(
    open_folder: OpenFolder, commit: Commit
) -> None:
    folder = open_folder()
    commit(folder, [0])
    (path,) = read_committed(folder).shards
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(SinkError, match="run again"):
        load_shard(folder, path)
    assert len(read_committed(folder)) == 0


def test_a_full_disk_is_one_sentence_and_loses_nothing_committed(
    open_folder: OpenFolder,
    commit: Commit,
    job: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = open_folder()
    writer = commit(folder, range(5))
    real_write, num_writes = os.write, 0

    def full(fd: int, data: memoryview) -> int:
        nonlocal num_writes
        num_writes += 1
        if num_writes > 1:
            raise OSError(28, "No space left on device")
        return real_write(fd, data[:100])

    writer.append(job.result_of(5))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(SinkError, match=r"No space left on device; 5 rows .* committed and"):
            writer.commit()
    assert list(folder.tmp.iterdir()) == []
    assert read_committed(folder).rows.tolist() == [0, 1, 2, 3, 4]
    writer.commit()
    assert read_committed(folder).rows.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_file_size_limit_of_the_kernel_is_a_sink_error_too(
    tmp_path: Path, job: SimpleNamespace
) -> None:
    script = """
import resource, sys
import pyarrow as pa
from batchradix.errors import SinkError
from batchradix.scratch import Scratch
from batchradix.sink import shards
from batchradix.sink.columns import shard_schema
from batchradix.sink.shards import ShardWriter, acquire, check_fingerprint
from batchradix.types import FinishReason, Result, Status
with acquire(sys.argv[1]) as folder:
    check_fingerprint(folder, {"model": "m"})
    writer = ShardWriter(folder, shard_schema(id_type=pa.int64(), value_type=None), None)
    def append(row, text):
        writer.append(Result(row=row, id=row, status=Status.OK, value=None, text=text, error=None,
            finish_reason=FinishReason.STOP, prompt_tokens=1, cached_tokens=0,
            completion_tokens=1, content_key=bytes(16)))
    append(0, "a")
    writer.commit()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    append(1, "b" * 100)
    try:
        writer.commit()
    except SinkError as e:
        print(e)
"""
    output = tmp_path / "o.arrow"
    run = subprocess.run(
        [sys.executable, "-c", script, str(output)], capture_output=True, text=True, check=False
    )
    assert "File too large; 1 rows of this run are committed" in run.stdout, run.stderr
    assert len(list((tmp_path / "o.arrow.batchradix" / "shards").iterdir())) == 1


def test_a_folder_that_is_gone_is_a_sink_error(
    open_folder: OpenFolder, commit: Commit, job: SimpleNamespace
) -> None:
    folder = open_folder()
    writer = commit(folder, [0])
    for path in (*folder.shards.iterdir(), *folder.tmp.iterdir()):
        path.unlink()
    folder.shards.rmdir()
    folder.tmp.rmdir()
    writer.append(job.result_of(1))
    with pytest.raises(SinkError, match="cannot be written"):
        writer.commit()
    with pytest.raises(SinkError, match="cannot be read"):
        read_committed(folder)


def test_forgotten_rows_are_no_longer_committed_and_the_others_are(
    open_folder: OpenFolder, commit: Commit
) -> None:
    folder = open_folder()
    commit(folder, [10, 0, 21], [32], [1, 2])
    committed = read_committed(folder)
    after = forget_rows(folder, committed, committed.has_status(Status.ERROR))
    assert sorted(after.rows.tolist()) == [0, 1, 2]
    assert after.warnings == ()


def committed_of(rows: list[int], keys: list[int]) -> Committed:
    """Records without shards, keys given as numbers."""
    n = len(rows)
    return Committed(
        shards=(),
        shard_of=np.zeros(n, np.int32),
        positions=np.arange(n, dtype=np.int32),
        rows=np.array(rows, np.int64),
        content_keys=keys_of(keys),
        statuses=np.zeros(n, np.uint8),
        warnings=(),
    )


def keys_of(keys: list[int]) -> np.ndarray:
    # leading and trailing zero bytes, which numpy's bytes type likes to drop
    return np.frombuffer(b"".join(b"\0" + bytes([k]) + bytes(14) for k in keys), dtype="V16")


def test_the_first_of_several_records_of_a_row_counts() -> None:
    assert match_rows(committed_of([1, 0, 1], [5, 6, 5]), 2).tolist() == [1, 0]


def test_a_record_of_another_prompt_does_not_count_for_its_row() -> None:
    committed = committed_of([0, 1, 2], [10, 11, 12])
    assert match_rows(committed, 3, keys_of([10, 99, 12])).tolist() == [0, -1, 2]


def test_rows_inserted_above_leave_the_others_answered() -> None:
    committed = committed_of([0, 1, 2], [10, 11, 12])
    assert match_rows(committed, 4, keys_of([99, 10, 11, 12])).tolist() == [-1, 0, 1, 2]


def test_a_record_answers_one_of_several_equal_rows() -> None:
    committed = committed_of([5, 0], [10, 10])
    assert match_rows(committed, 4, keys_of([10, 10, 10, 11])).tolist() == [1, 0, -1, -1]


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 3)), max_size=14),
    st.lists(st.integers(0, 3), max_size=9),
)
@hypothesis_settings(deadline=None)
def test_matching_gives_every_row_a_record_of_its_key_while_there_are_any(
    records: list[tuple[int, int]], wanted: list[int]
) -> None:
    keys = [k for _, k in records]
    source = match_rows(
        committed_of([r for r, _ in records], keys), len(wanted), keys_of(wanted)
    ).tolist()
    used = [s for s in source if s >= 0]
    assert len(set(used)) == len(used)
    assert all(keys[s] == wanted[row] for row, s in enumerate(source) if s >= 0)
    for key in range(4):
        found = sum(1 for s in used if keys[s] == key)
        assert found == min(keys.count(key), wanted.count(key))


def random_keys(draw: np.random.Generator, num_keys: int) -> np.ndarray:
    return draw.integers(256, size=(num_keys, 16), dtype=np.uint8)


def test_rows_that_moved_are_matched_in_lots_as_all_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = np.random.default_rng(0)
    kinds = random_keys(draw, 300)
    have, wanted = kinds[draw.integers(300, size=700)], kinds[draw.integers(300, size=900)]
    committed = replace(
        committed_of(list(range(700)), [0] * 700), content_keys=have.reshape(-1).view("V16")
    )
    at_once = match_rows(committed, 900, wanted)
    monkeypatch.setattr(shards, "_LOT_ROWS", 16)
    assert match_rows(committed, 900, wanted).tolist() == at_once.tolist()
    answered = np.flatnonzero(at_once >= 0)
    assert len(answered) > 500
    np.testing.assert_array_equal(have[at_once[answered]], wanted[answered])


def test_matching_many_rows_with_no_record_takes_next_to_no_memory(tmp_path: Path) -> None:
    num_rows = 400_000
    keys = random_keys(np.random.default_rng(0), num_rows)
    scratch = Scratch(tmp_path, least_bytes=1)
    tracemalloc.start()
    try:
        match_rows(committed_of([], []), num_rows, keys, scratch=scratch)
        assert tracemalloc.get_traced_memory()[1] < 8 * num_rows
    finally:
        tracemalloc.stop()
