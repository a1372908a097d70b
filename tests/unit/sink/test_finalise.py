from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix.errors import InputError, SinkError
from batchradix.sink import finalise as finalise_module
from batchradix.sink import ordering
from batchradix.sink.columns import result_schema
from batchradix.sink.finalise import finalise, is_finished
from batchradix.sink.memory import MemorySink
from batchradix.sink.shards import (
    RunFolder,
    ShardWriter,
    acquire,
    check_fingerprint,
    read_committed,
)

OpenFolder = Callable[..., RunFolder]
Commit = Callable[..., ShardWriter]
NUM_ROWS = 30
EXTENSIONS = (".arrow", ".parquet", ".jsonl", ".csv")


def read(path: Path) -> pa.Table:
    if path.suffix == ".parquet":
        return pq.read_table(path)
    return pa.ipc.open_file(path.read_bytes()).read_all()


def schema_of(job: SimpleNamespace, **options: Any) -> pa.Schema:
    return result_schema(
        id_type=job.id_type, value_type=job.value_type, metadata={"model": "m"}, **options
    )


def keep_of(num_rows: int, *sizes: int) -> Iterator[pa.RecordBatch]:
    """Kept columns in batches of the sizes given in turn, each with its own dictionary."""
    row = turn = 0
    while row < num_rows:
        stop = min(num_rows, row + sizes[turn % len(sizes)])
        yield pa.record_batch(
            {
                "url": pa.array([f"http://x/{r}" for r in range(row, stop)]),
                "cat": pa.array([f"c{r % 3}" for r in range(row, stop)])
                .dictionary_encode()
                .cast(pa.dictionary(pa.int8(), pa.string())),
                "nested": pa.array([[{"r": r}] if r % 4 else None for r in range(row, stop)]),
            },
            schema=KEEP,
        )
        row, turn = stop, turn + 1


KEEP = pa.schema(
    [
        ("url", pa.string()),
        ("cat", pa.dictionary(pa.int8(), pa.string())),
        ("nested", pa.list_(pa.struct([("r", pa.int64())]))),
    ]
)


def test_rows_come_in_input_order_with_all_they_held(
    open_folder: OpenFolder, commit: Commit, job: SimpleNamespace
) -> None:
    folder = open_folder()
    commit(folder, range(29, 9, -2), [0, 2, 1], range(10, 30, 2), range(3, 10))
    finalise(folder, folder.output, schema=schema_of(job), num_rows=NUM_ROWS)
    table = read(folder.output)
    assert table.schema.equals(schema_of(job), check_metadata=True)
    assert table["row"].to_pylist() == list(range(NUM_ROWS))
    for row, found in enumerate(table.to_pylist()):
        result = job.result_of(row)
        assert found["id"] == result.id
        assert found["status"] == result.status
        assert found["value"] == result.value
        assert found["text"] == result.text
        assert found["finish_reason"] == result.finish_reason
        assert found["prompt_tokens"] == result.prompt_tokens
        assert (found["error"] is None) == (result.error is None)


partitions = st.permutations(range(NUM_ROWS)).flatmap(
    lambda order: st.lists(st.integers(1, NUM_ROWS - 1), max_size=8, unique=True).map(
        lambda cuts: [
            order[a:b] for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), NUM_ROWS], strict=True)
        ]
    )
)


def finished_bytes(
    job: SimpleNamespace, groups: list[list[int]], extension: str, *, unnest: bool
) -> bytes:
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / f"o{extension}"
        with acquire(output) as folder:
            check_fingerprint(folder, job.fingerprint)
            writer = ShardWriter(folder, job.shard_schema, job.encode_values)
            for group in groups:
                for row in group:
                    writer.append(job.result_of(row))
                writer.commit()
            schema = schema_of(job, keep=KEEP, unnest=unnest)
            for _ in range(2):
                finalise(
                    folder,
                    output,
                    schema=schema,
                    num_rows=NUM_ROWS,
                    keep_batches=keep_of(NUM_ROWS, 7),
                    unnest=unnest,
                )
            return output.read_bytes()


@given(groups=partitions, extension=st.sampled_from(EXTENSIONS), unnest=st.booleans())
@settings(deadline=None, max_examples=25)
def test_any_partition_of_the_rows_into_shards_finalises_to_the_same_bytes(
    job: SimpleNamespace, groups: list[list[int]], extension: str, unnest: bool
) -> None:
    plain = finished_bytes(job, [list(range(NUM_ROWS))], extension, unnest=unnest)
    assert finished_bytes(job, groups, extension, unnest=unnest) == plain


def test_a_job_larger_than_memory_allows_gives_the_same_bytes(
    open_folder: OpenFolder,
    commit: Commit,
    job: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = list(range(300))
    np.random.default_rng(0).shuffle(rows)
    folder = open_folder()
    commit(folder, *[rows[i : i + 20] for i in range(0, 300, 20)])
    monkeypatch.setattr(ordering, "WINDOW_ROWS", 64)
    finalise(folder, folder.output, schema=schema_of(job), num_rows=300)
    whole = folder.output.read_bytes()
    monkeypatch.setattr(ordering, "GROUP_BYTES", 20_000)
    monkeypatch.setattr(ordering, "_SPOOL_ROWS", 7)
    spools = []
    unlink = Path.unlink

    def noted(path: Path, missing_ok: bool = False) -> None:
        if path.name == "spool.arrow" and path.exists():
            spools.append(path.stat().st_size)
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", noted)
    finalise(folder, folder.output, schema=schema_of(job), num_rows=300)
    assert spools
    assert folder.output.read_bytes() == whole
    assert list(folder.tmp.iterdir()) == []
    assert read(folder.output)["row"].to_pylist() == list(range(300))


def test_output_batches_are_cut_where_texts_are_long(
    open_folder: OpenFolder,
    commit: Commit,
    job: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ordering, "WINDOW_BYTES", 10_000)
    folder = open_folder()
    commit(folder, [job.result_of(r, text="x" * (20_000 if r == 3 else 10)) for r in range(6)])
    finalise(folder, folder.output, schema=schema_of(job), num_rows=6)
    reader = pa.ipc.open_file(folder.output.read_bytes())
    sizes = [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]
    assert sizes == [3, 1, 2]


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_no_rows_make_an_output_of_the_same_schema(
    open_folder: OpenFolder, job: SimpleNamespace, extension: str
) -> None:
    folder = open_folder(f"o{extension}")
    finalise(
        folder,
        folder.output,
        schema=schema_of(job, keep=KEEP),
        num_rows=0,
        keep_batches=keep_of(0, 1),
    )
    assert folder.output.exists()
    if extension in (".arrow", ".parquet"):
        table = read(folder.output)
        assert table.num_rows == 0
        assert table.schema.names == schema_of(job, keep=KEEP).names


@pytest.mark.parametrize("sizes", [(1,), (7, 3), (1000,)])
def test_kept_columns_stand_beside_their_rows_whatever_their_batches(
    open_folder: OpenFolder,
    commit: Commit,
    job: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, ...],
) -> None:
    monkeypatch.setattr(ordering, "WINDOW_ROWS", 8)
    monkeypatch.setattr(finalise_module, "KEPT_BYTES", 100)
    folder = open_folder()
    commit(folder, reversed(range(NUM_ROWS)))
    finalise(
        folder,
        folder.output,
        schema=schema_of(job, keep=KEEP),
        num_rows=NUM_ROWS,
        keep_batches=keep_of(NUM_ROWS, *sizes),
    )
    table = read(folder.output)
    assert table["cat"].type == pa.dictionary(pa.int32(), pa.string())
    for row, found in enumerate(table.to_pylist()):
        assert found["id"] == f"id-{row}"
        assert found["url"] == f"http://x/{row}"
        assert found["cat"] == f"c{row % 3}"
        assert found["nested"] == ([{"r": row}] if row % 4 else None)


@pytest.mark.parametrize("found", [NUM_ROWS - 1, NUM_ROWS + 5])
def test_an_input_that_has_other_rows_now_is_an_error_and_no_output(
    open_folder: OpenFolder, commit: Commit, job: SimpleNamespace, found: int
) -> None:
    folder = open_folder()
    commit(folder, range(NUM_ROWS))
    with pytest.raises(InputError, match=f"{found} rows now and had {NUM_ROWS}"):
        finalise(
            folder,
            folder.output,
            schema=schema_of(job, keep=KEEP),
            num_rows=NUM_ROWS,
            keep_batches=keep_of(found, 4),
        )
    assert not folder.output.exists()
    assert list(folder.tmp.iterdir()) == []


def test_missing_rows_are_counted_and_the_old_output_stays(
    open_folder: OpenFolder, commit: Commit, job: SimpleNamespace
) -> None:
    folder = open_folder()
    commit(folder, [0, 1, 4])
    folder.output.write_bytes(b"old")
    with pytest.raises(SinkError, match="5 rows: 2 missing, 0 answered twice"):
        finalise(folder, folder.output, schema=schema_of(job), num_rows=5)
    assert folder.output.read_bytes() == b"old"


def test_rows_answered_twice_for_different_prompts_or_beyond_the_input_are_counted(
    open_folder: OpenFolder, commit: Commit, job: SimpleNamespace
) -> None:
    folder = open_folder()
    commit(folder, [0, 1, 2], [job.result_of(1, content_key=bytes(16))])
    with pytest.raises(SinkError, match=r"0 missing, 1 answered twice .* 1 beyond"):
        finalise(folder, folder.output, schema=schema_of(job), num_rows=2)


def test_a_row_committed_twice_appears_once_and_the_first_counts(
    open_folder: OpenFolder, commit: Commit, job: SimpleNamespace
) -> None:
    folder = open_folder()
    commit(folder, [0, job.result_of(1, text="first")], [job.result_of(1, text="second")])
    finalise(folder, folder.output, schema=schema_of(job), num_rows=2)
    assert read(folder.output)["text"].to_pylist()[1] == "first"


def test_after_an_edit_rows_are_found_by_content_and_numbered_anew(
    open_folder: OpenFolder, commit: Commit, job: SimpleNamespace
) -> None:
    folder = open_folder()
    commit(folder, [2, 0, 1])
    # a new row 0 was put above, the old row 1 deleted
    commit(folder, [job.result_of(0, content_key=b"n" * 16, text="new", id="new")])
    keys = np.frombuffer(b"n" * 16 + job.key_of(0) + job.key_of(2), dtype="V16")
    ids = pa.chunked_array([["new", "a"], ["c"]])
    finalise(folder, folder.output, schema=schema_of(job), num_rows=3, key_of_row=keys, ids=ids)
    table = read(folder.output)
    assert table["row"].to_pylist() == [0, 1, 2]
    assert table["id"].to_pylist() == ["new", "a", "c"]
    assert table["text"].to_pylist() == ["new", job.result_of(0).text, job.result_of(2).text]


def test_a_finished_output_is_known_as_such_and_its_metadata_kept(
    open_folder: OpenFolder, commit: Commit, job: SimpleNamespace
) -> None:
    folder = open_folder("o.jsonl")
    commit(folder, range(3))
    assert not is_finished(folder, job.fingerprint, folder.output)
    finalise(folder, folder.output, schema=schema_of(job), num_rows=3)
    assert is_finished(folder, job.fingerprint, folder.output)
    assert json.loads(folder.run_file.read_bytes())["metadata"] == {"model": "m"}
    assert len(read_committed(folder)) == 3
    folder.close()
    folder = open_folder("o.jsonl")
    assert is_finished(folder, job.fingerprint, folder.output)


def test_a_disk_that_fills_while_finishing_is_one_sentence(
    open_folder: OpenFolder,
    commit: Commit,
    job: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = open_folder()
    commit(folder, range(3))

    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(finalise_module, "publish", full)
        with pytest.raises(SinkError, match=r"No space left on device; all 3 rows .* run again"):
            finalise(folder, folder.output, schema=schema_of(job), num_rows=3)
    assert not folder.output.exists()
    assert list(folder.tmp.iterdir()) == []
    finalise(folder, folder.output, schema=schema_of(job), num_rows=3)


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_a_file_size_limit_while_finishing_is_a_sink_error(tmp_path: Path, extension: str) -> None:
    output = tmp_path / f"o{extension}"
    run = run_script(FINISH, str(output), "2000", "0")
    assert "SinkError" in run, run
    assert "File too large" in run
    assert not output.exists()
    assert list((tmp_path / f"o{extension}.batchradix" / "tmp").iterdir()) == []


FINISH = """
import os, resource, sys
import numpy as np
import pyarrow as pa
from batchradix.sink.columns import result_schema, shard_schema
from batchradix.sink.finalise import finalise
from batchradix.sink.shards import ShardWriter, acquire, check_fingerprint
from batchradix.types import FinishReason, Result, Status
num_rows, limited = int(sys.argv[2]), sys.argv[3] == "0"
def rss(word):
    with open("/proc/self/status") as f:
        return next(int(x.split()[1]) for x in f if x.startswith(word)) // 1024
rng = np.random.default_rng(0)
filler = ["".join(map(chr, rng.integers(97, 123, 900))) for _ in range(50)]
value_type = pa.struct([("a", pa.string()), ("n", pa.int64())])
with acquire(sys.argv[1]) as folder:
    check_fingerprint(folder, {"model": "m"})
    schema = shard_schema(id_type=pa.int64(), value_type=value_type)
    writer = ShardWriter(folder, schema, lambda values: pa.array(values, value_type))
    for row in rng.permutation(num_rows).tolist():
        text = f"{row}{filler[row % 50]}"
        writer.append(Result(row=row, id=row, status=Status.OK, value={"a": text, "n": row},
            text=text, error=None, finish_reason=FinishReason.STOP, prompt_tokens=1,
            cached_tokens=0, completion_tokens=1, content_key=row.to_bytes(16, "little")))
    writer.commit()
    if limited:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    schema = result_schema(id_type=pa.int64(), value_type=value_type, metadata={})
    open("/proc/self/clear_refs", "w").write("5")
    before = rss("VmRSS")
    try:
        finalise(folder, sys.argv[1], schema=schema, num_rows=num_rows)
    except Exception as e:
        print(type(e).__name__, e)
    else:
        print(rss("VmHWM") - before)
"""


def run_script(script: str, *arguments: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.slow
def test_200_000_rows_are_finished_in_a_fraction_of_their_size(tmp_path: Path) -> None:
    output = tmp_path / "o.arrow"
    grown_mib = int(run_script(FINISH, str(output), "200000", "1"))
    size_mib = output.stat().st_size >> 20
    assert size_mib > 350
    assert grown_mib < 220, grown_mib
    with pa.memory_map(str(output)) as source:
        rows = pa.ipc.open_file(source).read_all()["value"].combine_chunks().field("n")
        assert np.array_equal(rows.to_numpy(), np.arange(200_000))


def test_the_table_in_memory_equals_the_file(
    open_folder: OpenFolder, commit: Commit, job: SimpleNamespace
) -> None:
    rows = [*range(15, NUM_ROWS), *range(15)]
    folder = open_folder("o.parquet")
    commit(folder, rows)
    schema = schema_of(job, keep=KEEP, unnest=True)
    finalise(
        folder,
        folder.output,
        schema=schema,
        num_rows=NUM_ROWS,
        keep_batches=keep_of(NUM_ROWS, 4),
        unnest=True,
    )
    sink = MemorySink(job.shard_schema, job.encode_values)
    for row in rows:
        sink.append(job.result_of(row))
        sink.commit_if_due()
    table = sink.finish(
        schema=schema, num_rows=NUM_ROWS, keep_batches=keep_of(NUM_ROWS, 9), unnest=True
    )
    assert table.schema.equals(schema, check_metadata=True)
    assert table.to_pylist() == read(folder.output).to_pylist()


def test_a_table_in_memory_wants_every_row_once(job: SimpleNamespace) -> None:
    sink = MemorySink(job.shard_schema, job.encode_values)
    for row in (0, 2, 2):
        sink.append(job.result_of(row))
    with pytest.raises(SinkError, match="3 rows: 1 missing, 1 doubled"):
        sink.finish(schema=schema_of(job), num_rows=3)
    empty = MemorySink(job.shard_schema, job.encode_values)
    assert empty.finish(schema=schema_of(job), num_rows=0).num_rows == 0


RUN = """
import sys, time
import pyarrow as pa
from batchradix.sink.columns import result_schema, shard_schema
from batchradix.sink.finalise import finalise, is_finished
from batchradix.sink.shards import ShardWriter, acquire, check_fingerprint
from batchradix.sink.shards import match_rows, read_committed
from batchradix.types import FinishReason, Result, Status
num_rows = 120
value_type = pa.struct([("n", pa.int64())])
print("up", flush=True)
with acquire(sys.argv[1]) as folder:
    check_fingerprint(folder, {"model": "m"})
    if is_finished(folder, {"model": "m"}, sys.argv[1]):
        print("nothing to do")
        sys.exit()
    done = match_rows(read_committed(folder), num_rows) >= 0
    schema = shard_schema(id_type=pa.int64(), value_type=value_type)
    writer = ShardWriter(folder, schema, lambda values: pa.array(values, value_type))
    for i in range(num_rows):
        row = i * 77 % num_rows
        if done[row]:
            continue
        writer.append(Result(row=row, id=row, status=Status.OK, value={"n": row},
            text=f"answer {row}", error=None, finish_reason=FinishReason.STOP, prompt_tokens=1,
            cached_tokens=0, completion_tokens=1, content_key=row.to_bytes(16, "little")))
        if i % 3 == 0:
            writer.commit()
    writer.commit()
    schema = result_schema(id_type=pa.int64(), value_type=value_type, metadata={"model": "m"})
    finalise(folder, sys.argv[1], schema=schema, num_rows=num_rows)
    print("wrote", int((~done).sum()))
"""


def kill_after(output: Path, delay_s: float) -> None:
    """A run that is killed so long after its imports."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(output)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=delay_s)
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize("extension", [".arrow", ".jsonl"])
def test_runs_killed_at_any_moment_end_in_the_file_of_an_undisturbed_run(
    tmp_path: Path, extension: str
) -> None:
    whole = tmp_path / f"whole{extension}"
    assert "wrote 120" in run_script(RUN, str(whole))
    output = tmp_path / f"o{extension}"
    for delay_s in (0.0, 0.02, 0.05, 0.01, 0.08):
        kill_after(output, delay_s)
    run_script(RUN, str(output))
    assert output.read_bytes() == whole.read_bytes()
    before = output.stat()
    assert "nothing to do" in run_script(RUN, str(output))
    assert os.stat(output).st_mtime_ns == before.st_mtime_ns


@pytest.mark.slow
def test_twenty_killed_runs_end_in_the_file_of_an_undisturbed_run(tmp_path: Path) -> None:
    whole = tmp_path / "whole.parquet"
    run_script(RUN, str(whole))
    rng = np.random.default_rng(1)
    for trial in range(20):
        output = tmp_path / f"o{trial}.parquet"
        for delay_s in rng.uniform(0, 0.3, size=2):
            kill_after(output, float(delay_s))
        run_script(RUN, str(output))
        assert output.read_bytes() == whole.read_bytes()
