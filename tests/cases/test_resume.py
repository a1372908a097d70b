"""Runs that are killed, stopped, torn, doubled or changed: the finished table is the same."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

ENDINGS = ["jsonl", "arrow", "parquet"]
DIE_AT_STEP = """
import os, signal
from batchradix.engine.core import RadixEngine
step, left = RadixEngine.step, [int(os.environ["DIE_AT_STEP"])]
def last_step(engine):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(engine)
RadixEngine.step = last_step
import batchradix.sink.shards as shards
shards.COMMIT_ROWS = 8
"""
SLOWLY = """
import time
from batchradix.engine.core import RadixEngine
step = RadixEngine.step
RadixEngine.step = lambda engine: (time.sleep(0.02), step(engine))[1]
import batchradix.sink.shards as shards
shards.COMMIT_ROWS = 8
"""


def _jobs(
    files: ModuleType, num_rows: int, max_tokens: int = 30, path: Path = Path("jobs.jsonl")
) -> None:
    files.write_jsonl(
        path,
        [
            {"id": f"j{i:03}", "prompt": f"({i % 7}) item {i} c", "max_tokens": max_tokens}
            for i in range(num_rows)
        ],
    )


def _options(model: Path, output: str) -> list[Any]:
    return ["run", "jobs.jsonl", "--model", model, "--dtype", "float32", "--batch-size", 8,
            "--temperature", 0, "--threads", 1, "-o", output]  # fmt: skip


def _in_work_folder(output: str, name: str) -> Path:
    return next(iter(sorted(Path(f"{output}.batchradix").rglob(name))))


def _wait_for(condition: Any, limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


def _digest(path: str) -> tuple[bytes, int]:
    return Path(path).read_bytes(), os.stat(path).st_mtime_ns


@pytest.fixture(scope="module")
def killed_run(
    tmp_path_factory: pytest.TempPathFactory, markov: Path, files: ModuleType
) -> Iterator[Path]:
    """A folder with jobs.jsonl, full.jsonl of an undisturbed run, and what is left of t.jsonl,
    the same run but for its death in the middle."""
    folder = tmp_path_factory.mktemp("killed")
    _jobs(files, 60, path=folder / "jobs.jsonl")
    processes = files.Processes()
    for output, step in (("full.jsonl", 10_000), ("t.jsonl", 125)):
        ran = processes.run(*_options(markov, output), code=DIE_AT_STEP, cwd=folder,
                            env={**processes.environ, "DIE_AT_STEP": str(step)})  # fmt: skip
        assert ran.code == (0 if step > 125 else -signal.SIGKILL), ran.err
    assert list(folder.glob("t.jsonl.batchradix/shards/*"))
    assert not (folder / "t.jsonl").exists()
    yield folder
    processes.close()


@pytest.fixture
def killed(folder: Path, killed_run: Path) -> Path:
    """A copy of `killed_run` as the working folder."""
    shutil.copytree(killed_run, folder, dirs_exist_ok=True)
    return folder


def test_a_killed_run_goes_on_where_it_was_and_ends_the_same(
    killed: Path, cli: Any, markov: Path
) -> None:
    """Case re-01."""
    ran = cli("run", "jobs.jsonl", "--model", markov, "--dtype", "float32", "--resume", "--json",
              "-o", "t.jsonl")  # fmt: skip
    assert ran.code == 0
    assert 8 <= ran.summary["resumed_rows"] < 60
    # Of the 30 tokens of a row the first comes from its prompt.
    assert ran.summary["decode_steps"] == 29 * (60 - ran.summary["resumed_rows"])
    assert Path("t.jsonl").read_bytes() == Path("full.jsonl").read_bytes()


def test_a_finished_run_does_nothing_and_leaves_its_file_alone(
    killed: Path, cli: Any, markov: Path
) -> None:
    """Case re-01."""
    before = _digest("full.jsonl")
    for options in ([], ["--resume"], ["--batch-size", 3], ["--no-prefix-cache"]):
        ran = cli("run", "jobs.jsonl", "--model", markov, "--dtype", "float32", "--json",
                  "-o", "full.jsonl", *options)  # fmt: skip
        assert ran.code == 0
        assert ran.summary["resumed_rows"] == 60
        assert ran.summary["forward_steps"] == 0
        assert "loading" not in ran.err
        assert _digest("full.jsonl") == before


@pytest.mark.parametrize("what", ["shard-*", "run.json", "lock"])
@pytest.mark.parametrize("how", ["1", "7", "40", "all", "more", "gone"])
def test_torn_files_cost_their_own_rows_at_most(
    killed: Path, cli: Any, markov: Path, what: str, how: str
) -> None:
    """Case re-01."""
    torn = _in_work_folder("t.jsonl", what)
    if how == "more":
        with torn.open("ab") as file:
            file.write(b'{"id":"j39')
    elif how == "gone":
        torn.unlink()
    else:
        size = torn.stat().st_size
        os.truncate(torn, 0 if how == "all" else max(0, size - int(how)))
    ran = cli("run", "jobs.jsonl", "--model", markov, "--dtype", "float32", "--json",
              "-o", "t.jsonl")  # fmt: skip
    assert ran.code == 0, ran.err
    assert Path("t.jsonl").read_bytes() == Path("full.jsonl").read_bytes()
    if what == "shard-*" and how != "gone":
        assert "torn or damaged" in ran.err
    if what != "shard-*":
        assert ran.summary["resumed_rows"] >= 8


@pytest.mark.parametrize("how", ["cut", "more", "gone"])
def test_a_torn_output_is_made_again_without_the_model(
    killed: Path, cli: Any, markov: Path, how: str
) -> None:
    before = Path("full.jsonl").read_bytes()
    if how == "cut":
        os.truncate("full.jsonl", len(before) - 7)
    elif how == "more":
        Path("full.jsonl").write_bytes(before + b'{"id":"j39')
    else:
        Path("full.jsonl").unlink()
    ran = cli("run", "jobs.jsonl", "--model", markov, "--dtype", "float32", "--json",
              "-o", "full.jsonl")  # fmt: skip
    assert (ran.code, ran.summary["forward_steps"]) == (0, 0)
    assert Path("full.jsonl").read_bytes() == before


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("ending", ENDINGS)
def test_twenty_kills_at_random_moments_change_nothing(
    folder: Path, processes: Any, markov: Path, files: ModuleType, ending: str
) -> None:
    """Case re-01."""
    _jobs(files, 400)
    started_s = time.monotonic()
    assert processes.run(*_options(markov, f"full.{ending}")).code == 0
    whole_s = time.monotonic() - started_s
    drawn = random.Random(ending)
    for _ in range(20):
        for left in Path().glob(f"t.{ending}*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        for _ in range(drawn.choice([1, 1, 2])):
            process = processes.start(*_options(markov, f"t.{ending}"))
            time.sleep(drawn.uniform(0.3, 1) * whole_s)
            process.kill()
            process.communicate()
        assert processes.run(*_options(markov, f"t.{ending}"), "--resume").code == 0
        assert Path(f"t.{ending}").read_bytes() == Path(f"full.{ending}").read_bytes()


@pytest.fixture
def at_work(folder: Path, processes: Any, markov: Path, files: ModuleType) -> Any:
    """A run that takes some seconds to write 60 rows to o.arrow, and has begun to."""
    _jobs(files, 60)
    process = processes.start(*_options(markov, "o.arrow"), "--json", code=SLOWLY)
    shards = Path("o.arrow.batchradix/shards")
    _wait_for(lambda: process.poll() is not None or any(shards.glob("*")))
    assert process.poll() is None, process.stderr.read()
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_commits_what_is_done_and_the_same_command_goes_on(
    at_work: Any, cli: Any, markov: Path, files: ModuleType, number: int
) -> None:
    at_work.send_signal(number)
    out, _ = at_work.communicate(timeout=30)
    assert at_work.returncode == 128 + number
    summary = json.loads(out.splitlines()[-1])
    done = summary["rows"]
    assert 8 <= done < 60
    assert summary["rows_left"] == 60 - done
    assert not Path("o.arrow").exists()
    ran = cli(*_options(markov, "o.arrow")[:-4], "--json", "-o", "o.arrow")
    assert ran.code == 0
    assert ran.summary["resumed_rows"] == done
    assert files.column("o.arrow", "id") == [f"j{i:03}" for i in range(60)]
    assert set(files.column("o.arrow", "completion_tokens")) == {30}


def test_a_second_run_on_the_same_output_is_told_who_holds_it(
    at_work: Any, cli: Any, markov: Path, files: ModuleType
) -> None:
    """Case re-03."""
    started_s = time.monotonic()
    for options in ([], ["--restart"]):
        second = cli(*_options(markov, "o.arrow")[:-4], "-o", "o.arrow", *options)
        assert second.code == 4
        assert str(at_work.pid) in second.err
        assert socket.gethostname() in second.err
    assert time.monotonic() - started_s < 10
    other = cli(*_options(markov, "p.arrow")[:-4], "-o", "p.arrow")  # beside it, undisturbed
    assert other.code == 0
    at_work.communicate(timeout=60)
    assert at_work.returncode == 0
    assert files.read_rows("o.arrow") == files.read_rows("p.arrow")


def test_the_output_of_a_killed_holder_is_taken_over_whoever_has_its_pid_now(
    at_work: Any, cli: Any, markov: Path, files: ModuleType
) -> None:
    """Case re-03."""
    at_work.kill()
    at_work.communicate()
    lock = Path("o.arrow.batchradix/lock")
    lock.write_text(json.dumps({"pid": os.getppid(), "host": socket.gethostname()}))
    assert cli(*_options(markov, "o.arrow")[:-4], "-o", "o.arrow", "--resume").code == 0
    assert len(files.read_rows("o.arrow")) == 60


def test_rows_are_known_by_their_content_when_the_input_was_edited(
    folder: Path, cli: Any, markov: Path, files: ModuleType
) -> None:
    def run() -> Any:
        return cli("run", "jobs.jsonl", "--model", markov, "--max-tokens", 3, "--json",
                   "-o", "o.jsonl")  # fmt: skip

    def told() -> list[Any]:
        return [(row["id"], row["row"], row["text"]) for row in files.read_rows("o.jsonl")]

    files.write_jsonl("jobs.jsonl", [{"id": 1, "prompt": "a"}, {"id": 2, "prompt": "c"}])
    run()
    files.write_jsonl(
        "jobs.jsonl",
        [{"id": 9, "prompt": "x"}, {"id": 2, "prompt": "c"}, {"id": 1, "prompt": "A"}],
    )
    assert run().summary["resumed_rows"] == 1
    assert told() == [("9", 0, "yza"), ("2", 1, "def"), ("1", 2, "BCD")]
    files.write_jsonl("jobs.jsonl", [{"id": "new", "prompt": "c"}, {"id": 9, "prompt": "x"}])
    assert run().summary["forward_steps"] == 0
    assert told() == [("new", 0, "def"), ("9", 1, "yza")]


@pytest.mark.parametrize(
    "name", [".DS_Store", ".nfs000000001", "shard-000000-0badc0de.sync-conflict-1.arrow", "sub/x"]
)
def test_what_others_put_among_the_shards_changes_nothing(
    killed: Path, cli: Any, markov: Path, name: str
) -> None:
    foreign = Path("t.jsonl.batchradix/shards") / name
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_bytes(_in_work_folder("t.jsonl", "shard-*").read_bytes())
    ran = cli("run", "jobs.jsonl", "--model", markov, "--dtype", "float32", "--json",
              "-o", "t.jsonl")  # fmt: skip
    assert ran.code == 0, ran.err
    assert ran.summary["resumed_rows"] >= 8
    assert Path("t.jsonl").read_bytes() == Path("full.jsonl").read_bytes()


def test_a_finished_output_that_was_copied_or_touched_costs_no_answer(
    killed: Path, cli: Any, markov: Path
) -> None:
    before = Path("full.jsonl").read_bytes()
    for stamp_s in (0, 4e9):  # of a clock that stood at its beginning, or far ahead
        os.utime("full.jsonl", (stamp_s, stamp_s))
        ran = cli("run", "jobs.jsonl", "--model", markov, "--dtype", "float32", "--json",
                  "-o", "full.jsonl")  # fmt: skip
        assert (ran.code, ran.summary["forward_steps"]) == (0, 0)
        assert Path("full.jsonl").read_bytes() == before


def test_rows_are_known_whatever_kind_of_file_they_come_in(
    folder: Path, cli: Any, markov: Path, files: ModuleType
) -> None:
    rows = [{"id": f"r{i}", "prompt": f"{i} c"} for i in range(5)]
    files.write_jsonl("jobs.jsonl", rows)
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, "jobs.parquet")
    pq.write_table(table.cast(pa.schema([(n, pa.large_string()) for n in table.column_names])),
                   "large.parquet")  # fmt: skip
    pyarrow.csv.write_csv(table, "jobs.csv")
    steps = [
        cli("run", name, "--model", markov, "--max-tokens", 3, "--json", "-o", "o.arrow").summary[
            "forward_steps"
        ]
        for name in ("jobs.jsonl", "jobs.parquet", "large.parquet", "jobs.csv")
    ]
    assert steps[0] > 0
    assert steps[1:] == [0, 0, 0]
    assert files.column("o.arrow", "id") == [row["id"] for row in rows]


def test_a_row_that_failed_by_its_own_fault_runs_once_that_is_mended(
    folder: Path, cli: Any, markov: Path, files: ModuleType
) -> None:
    options = ["--model", markov, "--max-tokens", 3, "-o", "o.jsonl"]
    files.write_jsonl("jobs.jsonl", [{"prompt": "a", "max_tokens": "two"}, "{", {"prompt": "c"}])
    assert cli("run", "jobs.jsonl", *options).code == 1
    files.write_jsonl(
        "jobs.jsonl", [{"prompt": "a", "max_tokens": 2}, {"prompt": "b"}, {"prompt": "c"}]
    )
    assert cli("run", "jobs.jsonl", *options).code == 0
    assert files.column("o.jsonl", "text") == ["bc", "cde", "def"]


@pytest.mark.parametrize(
    "options",
    [
        ["--seed", 1], ["--temperature", 0.5], ["--max-tokens", 4], ["--stop", "c"],
        ["--template", "{{prompt}}!"], ["--schema", "tag.json"], ["--dtype", "bfloat16"],
    ],
    ids=str,
)  # fmt: skip
def test_another_job_never_mixes_with_what_is_there(
    folder: Path, cli: Any, markov: Path, files: ModuleType, options: list[Any]
) -> None:
    files.write_jsonl("jobs.jsonl", [{"id": 1, "prompt": "a"}])
    same = ["run", "jobs.jsonl", "--model", markov, "--max-tokens", 12, "--dtype", "float32",
            "-o", "o.parquet"]  # fmt: skip
    assert cli(*same).code == 0
    before = _digest("o.parquet")
    refused = cli(*same, *options)
    assert refused.code == 2
    assert str(options[0]).removeprefix("--").replace("-", "_") in refused.err
    assert "--restart" in refused.err
    assert _digest("o.parquet") == before
    assert cli(*same, *options, "--restart").code in (0, 3)
    assert _digest("o.parquet") != before


def test_an_automatic_dtype_is_the_one_that_the_run_before_had(
    folder: Path, cli: Any, markov: Path, files: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_a_machine(*, with_bf16: bool) -> None:
        for place in ("pipeline.parts", "report.machine"):
            monkeypatch.setattr(f"batchradix.{place}.has_bf16", lambda: with_bf16)

    files.write_jsonl("jobs.jsonl", [{"id": 1, "prompt": "a"}])
    words = ["run", "jobs.jsonl", "--model", markov, "--max-tokens", 3, "-o", "o.arrow", "--json"]
    on_a_machine(with_bf16=True)
    assert cli(*words).code == 0
    files.write_jsonl("jobs.jsonl", [{"id": 1, "prompt": "a"}, {"id": 2, "prompt": "b"}])
    on_a_machine(with_bf16=False)
    refused = cli(*words)
    assert refused.code == 2
    assert 'dtype: "bfloat16" → "float32"' in refused.err
    assert "give --dtype as it was" in refused.err
    went_on = cli(*words, "--dtype", "bfloat16")
    assert (went_on.code, went_on.summary["resumed_rows"]) == (0, 1)
    on_a_machine(with_bf16=True)
    assert cli(*words).summary["resumed_rows"] == 2


def test_seeded_rows_draw_the_same_after_a_kill(
    folder: Path, processes: Any, cli: Any, oracle_model: Path, files: ModuleType
) -> None:
    rows = [
        {"id": str(i), "prompt": "draw", "temperature": 1.0, "max_tokens": 12}
        | ({"seed": i} if i % 2 else {})
        for i in range(40)
    ]
    files.write_jsonl("jobs.jsonl", rows)
    options = [*_options(oracle_model, "t.jsonl")[:-4], "--seed", 5]
    assert cli(*options, "-o", "full.jsonl").code == 0
    ran = processes.run(*options, "--threads", 1, "-o", "t.jsonl", code=DIE_AT_STEP,
                        env={**processes.environ, "DIE_AT_STEP": "40"})  # fmt: skip
    assert ran.code == -signal.SIGKILL
    resumed = cli(*options, "-o", "t.jsonl", "--json")
    assert 0 < resumed.summary["resumed_rows"] < 40
    assert Path("t.jsonl").read_bytes() == Path("full.jsonl").read_bytes()
    assert len({row["text"] for row in files.read_rows("t.jsonl")}) == 40


def test_an_option_that_was_refused_leaves_nothing_that_blocks_the_next_try(
    folder: Path, cli: Any, markov: Path, files: ModuleType
) -> None:
    files.write_jsonl("jobs.jsonl", [{"id": 1, "prompt": "a"}])
    same = ["run", "jobs.jsonl", "--model", markov, "--max-tokens", 3, "-o", "o.jsonl"]
    assert cli(*same, "--dtype", "float16", "--device", "tpu").code == 2
    assert cli(*same, "--dtype", "float32").code == 0


def test_a_file_of_somebody_else_is_not_replaced(
    folder: Path, cli: Any, markov: Path, files: ModuleType
) -> None:
    files.write_jsonl("jobs.jsonl", [{"id": 1, "prompt": "a"}])
    Path("o.jsonl").write_text("mine\n")
    same = ["run", "jobs.jsonl", "--model", markov, "--max-tokens", 3, "-o", "o.jsonl"]
    assert cli(*same).code == 2
    assert Path("o.jsonl").read_text() == "mine\n"
    assert cli(*same, "--restart").code == 0
    assert files.column("o.jsonl", "text") == ["bcd"]


@pytest.mark.skipif(sys.platform != "linux", reason="fills a small memory file system")
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="cannot mount")
def test_a_full_disk_stops_the_run_and_loses_nothing(
    folder: Path, cli: Any, markov: Path, files: ModuleType
) -> None:
    small = folder / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12k", "tmpfs", str(small)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("cannot mount")
    try:
        _jobs(files, 64)
        same = ["run", "jobs.jsonl", "--model", markov, "-o", "small/o.jsonl"]
        ran = cli(*same)
        assert ran.code == 3
        assert "No space left" in ran.err or "disk" in ran.err
        subprocess.run(["mount", "-o", "remount,size=8m", str(small)], check=True)
        assert cli(*same).code == 0
        assert len(files.read_rows("small/o.jsonl")) == 64
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_an_output_is_known_however_its_path_is_spelt(
    folder: Path, cli: Any, const: Any, files: ModuleType
) -> None:
    _jobs(files, 6)
    Path("real").mkdir()
    Path("link").symlink_to("real")
    Path("file.arrow").symlink_to("real/o.arrow")
    kept = []
    for output in ("link/o.arrow", "real/o.arrow", "./real/../real/o.arrow", "file.arrow"):
        ran = cli("run", "jobs.jsonl", "--model", const("a"), "--max-tokens", 2, "--json",
                  "-o", output)  # fmt: skip
        assert ran.code == 0, ran.err
        kept.append(ran.summary["resumed_rows"])
    assert kept == [0, 6, 6, 6]
    assert Path("file.arrow").is_symlink()
    shutil.move("real", "elsewhere")  # results go where their folder goes
    ran = cli("run", "jobs.jsonl", "--model", const("a"), "--max-tokens", 2, "--json",
              "-o", "elsewhere/o.arrow")  # fmt: skip
    assert ran.summary["resumed_rows"] == 6


def test_a_limit_that_grows_computes_the_new_rows_only(
    folder: Path, cli: Any, const: Any, files: ModuleType
) -> None:
    _jobs(files, 6)
    for limit, kept in ((2, 0), (5, 2), (3, 3), (6, 5)):
        ran = cli("run", "jobs.jsonl", "--model", const("a"), "--max-tokens", 2, "--json",
                  "--limit", limit, "-o", "o.arrow")  # fmt: skip
        assert (ran.code, ran.summary["resumed_rows"]) == (0, kept)
        assert len(files.read_rows("o.arrow")) == limit
