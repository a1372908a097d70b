from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from batchradix.errors import OptionError, OutputHeldError, OutputMismatchError
from batchradix.sink.folder import (
    RunFolder,
    acquire,
    check_fingerprint,
    is_finished,
    mark_finished,
    other_job,
)
from batchradix.sink.shards import read_committed

HOLD = """
import sys, time
from batchradix.sink.folder import acquire, check_fingerprint
folder = acquire(sys.argv[1])
check_fingerprint(folder, {"a": 1})
print("held", flush=True)
time.sleep(60)
"""


def hold(output: Path) -> subprocess.Popen[str]:
    """Another process that holds ``output``."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(output)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_a_second_process_is_refused_within_a_second_and_told_who_holds(tmp_path: Path) -> None:
    output = tmp_path / "o.arrow"
    process = hold(output)
    try:
        start = time.monotonic()
        with pytest.raises(OutputHeldError) as refusal:
            acquire(output)
        assert time.monotonic() - start < 1
        assert f"process {process.pid} on host {socket.gethostname()}" in str(refusal.value)
        assert refusal.value.exit_code == 4
    finally:
        end(process)


def test_the_lock_of_a_killed_holder_blocks_nobody(tmp_path: Path) -> None:
    output = tmp_path / "o.arrow"
    end(hold(output))
    lock = tmp_path / "o.arrow.batchradix" / "lock"
    # its pid may belong to another living program by now
    lock.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
    acquire(output).close()


def test_a_child_that_outlives_a_killed_holder_does_not_keep_the_lock(tmp_path: Path) -> None:
    script = (
        "import os, sys, time\n"
        "from batchradix.sink.folder import acquire\n"
        "folder = acquire(sys.argv[1])\n"
        "folder.run_file.write_text('{}')\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    time.sleep(60)\n"
        "print(pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    output = tmp_path / "o.arrow"
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(output)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        parent.wait()
        acquire(output).close()
    finally:
        os.kill(child, 9)
        parent.stdout.close()


def test_one_process_cannot_take_an_output_twice_under_two_names(tmp_path: Path) -> None:
    (tmp_path / "real.arrow").write_bytes(b"")
    (tmp_path / "link.arrow").symlink_to(tmp_path / "real.arrow")
    with acquire(tmp_path / "real.arrow"), pytest.raises(OutputHeldError, match=r"link\.arrow"):
        acquire(tmp_path / "link.arrow")


def test_two_outputs_in_one_folder_do_not_disturb_each_other(tmp_path: Path) -> None:
    with acquire(tmp_path / "p.arrow") as p, acquire(tmp_path / "p.jsonl") as q:
        assert p.path != q.path


def test_a_folder_in_which_nothing_was_begun_is_removed(tmp_path: Path) -> None:
    acquire(tmp_path / "o.arrow").close()
    assert list(tmp_path.iterdir()) == []
    with acquire(tmp_path / "o.arrow") as folder:
        check_fingerprint(folder, {"a": 1})
    assert folder.run_file.exists()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("missing/o.arrow", "there is no folder .*missing; create it"),
        ("o.xlsx", r"extension \.xlsx; known are \.arrow, \.parquet, \.jsonl, \.csv"),
        ("plain", "no extension"),
        ("folder.arrow", "is a folder"),
        ("o.jsonl.gz", r"extension \.gz"),
    ],
)
def test_an_output_that_cannot_be_is_refused(tmp_path: Path, name: str, sentence: str) -> None:
    (tmp_path / "folder.arrow").mkdir()
    with pytest.raises(OptionError, match=sentence):
        acquire(tmp_path / name)


def test_an_address_is_refused_as_output() -> None:
    with pytest.raises(OptionError, match="not a local file"):
        acquire("s3://bucket/o.arrow")


def test_a_folder_that_is_not_writable_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(OptionError, match="not writable"):
        acquire(tmp_path / "o.arrow")


def test_a_file_in_the_work_folder_s_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "o.arrow.batchradix").write_text("")
    with pytest.raises(OptionError, match=r"o\.arrow\.batchradix, .* is a file; move that file"):
        acquire(tmp_path / "o.arrow")


def test_another_job_is_refused_with_what_changed(tmp_path: Path) -> None:
    long = "Say in one word what the following text is about. " * 5
    with acquire(tmp_path / "o.arrow") as folder:
        check_fingerprint(folder, {"model": "a", "template": long, "seed": 1, "same": [1, 2]})
        (folder.shards / "shard-000000-00000000.arrow").touch()
        with pytest.raises(OutputMismatchError) as refusal:
            check_fingerprint(
                folder, {"model": "b", "template": long + "!", "top_k": 5, "same": (1, 2)}
            )
    sentence = str(refusal.value)
    assert 'model: "a" → "b"' in sentence
    assert "seed: 1 → none" in sentence
    assert "top_k: none → 5" in sentence
    assert "same" not in sentence
    assert '!"' in sentence  # the place of the change is shown, not the long beginning
    assert len(sentence) < 500


def test_digests_that_changed_are_told_by_their_names(tmp_path: Path) -> None:
    """Also where the name is the same, and where run.json is of a version that had no names."""
    with acquire(tmp_path / "o.arrow") as folder:
        folder.names = {"model": "owner/repo at revision 1234"}
        check_fingerprint(folder, {"model": "a1b2c3d4e5", "seed": 1})
        (folder.shards / "shard-000000-00000000.arrow").touch()
        for state, told in (
            ({}, "model: owner/repo at revision 1234 (content a1b2c3d4) → m (content 0f1e2d3c)"),
            ({"names": None}, "model: another one (content a1b2c3d4) → m (content 0f1e2d3c)"),
        ):
            written = json.loads(folder.run_file.read_bytes()) | state
            folder.run_file.write_text(json.dumps(written))
            folder.names = {"model": "m"}
            with pytest.raises(OutputMismatchError) as refusal:
                check_fingerprint(folder, {"model": "0f1e2d3c4b", "seed": 1})
            assert f"({told});" in str(refusal.value)
            assert other_job(folder.output, {"model": "0f1e2d3c4b", "seed": 1}, {"model": "m"}) == (
                {"model"}, told,
            )  # fmt: skip


def test_a_job_stopped_before_its_first_result_makes_way_for_another(tmp_path: Path) -> None:
    with acquire(tmp_path / "o.arrow") as folder:
        check_fingerprint(folder, {"device": "nonsense"})
        check_fingerprint(folder, {"device": "cpu"})
        first = folder.job
        (tmp_path / "o.arrow").write_bytes(b"finished")
        with pytest.raises(OutputMismatchError):
            check_fingerprint(folder, {"device": "nonsense"})
        assert folder.job == first


def test_the_same_job_is_taken_up_whatever_the_order_of_its_entries(tmp_path: Path) -> None:
    with acquire(tmp_path / "o.arrow") as folder:
        check_fingerprint(folder, {"a": 1, "b": [1]})
        digest = folder.job
        check_fingerprint(folder, {"b": [1], "a": 1})
        assert folder.job == digest


def test_restart_empties_the_folder_and_keeps_it_held(
    open_folder: Callable[..., RunFolder], commit: Callable[..., object]
) -> None:
    folder = open_folder()
    commit(folder, range(3))
    check_fingerprint(folder, {"other": True}, restart=True)
    assert len(read_committed(folder)) == 0
    with pytest.raises(OutputHeldError):
        acquire(folder.output)


def test_a_torn_run_file_is_mended_when_the_shards_are_this_job_s(
    open_folder: Callable[..., RunFolder], commit: Callable[..., object]
) -> None:
    folder = open_folder()
    commit(folder, range(3))
    for cut in (1, 7, 40):
        whole = folder.run_file.read_bytes()
        folder.run_file.write_bytes(whole[:-cut])
        folder.close()
        folder = open_folder()
        assert json.loads(folder.run_file.read_bytes())["fingerprint"]["model"] == "m"
        assert len(read_committed(folder)) == 3


@pytest.mark.parametrize(
    "damage", [b"", b"\0" * 64, b"null", b"[]", b'{"fingerprint": 5}', b"\xff\xfe", b"[" * 100_000]
)
def test_a_run_file_of_rubbish_is_mended_when_the_shards_are_this_job_s(
    open_folder: Callable[..., RunFolder], commit: Callable[..., object], damage: bytes
) -> None:
    folder = open_folder()
    commit(folder, range(3))
    folder.run_file.write_bytes(damage)
    folder.close()
    folder = open_folder()
    assert json.loads(folder.run_file.read_bytes())["fingerprint"]["model"] == "m"
    assert len(read_committed(folder)) == 3


def test_a_torn_run_file_beside_shards_of_another_job_is_refused(
    open_folder: Callable[..., RunFolder], commit: Callable[..., object]
) -> None:
    folder = open_folder()
    commit(folder, range(3))
    folder.run_file.unlink()
    with pytest.raises(OutputMismatchError, match="another job"):
        check_fingerprint(folder, {"model": "else"})


def test_a_file_no_job_of_the_folder_wrote_is_not_replaced_unless_told_to(tmp_path: Path) -> None:
    (tmp_path / "o.csv").write_text("precious")
    with acquire(tmp_path / "o.csv") as folder:
        with pytest.raises(OutputMismatchError, match="exists already"):
            check_fingerprint(folder, {"a": 1})
        check_fingerprint(folder, {"a": 1}, restart=True)
    assert (tmp_path / "o.csv").read_text() == "precious"


def test_an_empty_file_may_stand_in_the_output_s_place(tmp_path: Path) -> None:
    (tmp_path / "o.csv").write_text("")
    with acquire(tmp_path / "o.csv") as folder:
        check_fingerprint(folder, {"a": 1})


def test_finished_means_this_job_and_a_file_untouched_since(tmp_path: Path) -> None:
    output = tmp_path / "o.csv"
    with acquire(output) as folder:
        check_fingerprint(folder, {"a": 1})
        assert not is_finished(folder, {"a": 1}, output)
        output.write_text("x")
        mark_finished(folder, {"model": "m"})
        assert is_finished(folder, {"a": 1}, output)
        assert not is_finished(folder, {"a": 2}, output)
        assert is_finished(folder, {"a": 1}, output, {"model": "m"})
        assert not is_finished(folder, {"a": 1}, output, {"model": "m", "keep": "url"})
        stat = output.stat()
        os.utime(output, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
        assert not is_finished(folder, {"a": 1}, output)
        output.unlink()
        assert not is_finished(folder, {"a": 1}, output)
    assert json.loads(folder.run_file.read_bytes())["metadata"] == {"model": "m"}
