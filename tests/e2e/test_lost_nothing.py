"""Runs that are killed, starved, raced or torn: nothing that was committed is lost or redone."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[2]
NOTICES = ROOT / "recipes" / "debian_copyrights" / "jobs.parquet"
ENDINGS = ["arrow", "parquet", "jsonl"]
SCHEMA = '{"type":"object","properties":{"n":{"type":"integer","minimum":0,"maximum":9}},"required":["n"]}'  # noqa: E501
NOBODY = 65534


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """How a run ended, what it said, and the rows that its engine answered."""

    code: int
    out: str
    err: str
    computed: list[int]

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return found


class Runs:
    """Runs of ``batchradix`` that share one start of the interpreter."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._started = 0
        self._orders: dict[int, dict[str, Any]] = {}
        paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
        self._server = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(__file__).with_name("forking.py"))],
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, folder: Path, *argv: object, **order: Any) -> int:
        """The process id of a run that goes on by itself; ``order`` as in forking.py."""
        name = self._scratch / str(self._started)
        self._started += 1
        files = {part: f"{name}.{part}" for part in ("out", "err", "log")}
        order = {**files, "cwd": str(folder), "argv": [str(word) for word in argv], **order}
        pid = self._ask(order)
        self._orders[pid] = order
        return pid

    def wait(self, pid: int) -> Ran:
        order = self._orders.pop(pid)
        code = self._ask({"wait": pid})
        said = [Path(order[part]) for part in ("out", "err", "log")]
        out, err, log = [
            path.read_text("utf-8", "replace") if path.exists() else "" for path in said
        ]
        return Ran(code=code, out=out, err=err, computed=[int(row) for row in log.split()])

    def run(self, folder: Path, *argv: object, **order: Any) -> Ran:
        return self.wait(self.start(folder, *argv, **order))

    def close(self) -> None:
        for pid in self._orders:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._server.communicate()

    def _ask(self, order: dict[str, Any]) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    server = Runs(tmp_path_factory.mktemp("runs"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def model(tiny_model_folder: Callable[..., Path]) -> Path:
    return tiny_model_folder("random", context_length=1024)


def write_rows(path: Path, num_rows: int) -> None:
    """So many of the recipe's notices, each with a number: real texts, no two the same."""
    texts = pq.read_table(NOTICES)["text"].to_pylist()
    prompts = [f"{texts[i % len(texts)][:200]}\n({i}) " for i in range(num_rows)]
    pq.write_table(pa.table({"id": [f"r{i}" for i in range(num_rows)], "prompt": prompts}), path)


def command(model: Path, output: str, max_tokens: int = 12) -> list[Any]:
    return ["run", "jobs.parquet", "--model", model, "--dtype", "float32", "--threads", 1,
            "--batch-size", 8, "--max-tokens", max_tokens, "--json", "-o", output]  # fmt: skip


def committed_rows(output: Path) -> list[int]:
    """The numbers of the rows in an output's shards."""
    shards = sorted(output.with_name(output.name + ".batchradix").glob("shards/shard-*.arrow"))
    return [row for path in shards for row in pl.read_ipc(path)["row"].to_list()]


def forget(output: Path) -> None:
    output.unlink(missing_ok=True)
    shutil.rmtree(output.with_name(output.name + ".batchradix"), ignore_errors=True)


def wait_for(condition: Callable[[], bool], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.002)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A folder with jobs.parquet, the finished table of an undisturbed run for each format, and
    how long and how many steps that took."""

    folder: Path
    num_rows: int
    whole: dict[str, bytes]
    run_s: float
    num_steps: int


def make_job(folder: Path, runs: Runs, model: Path, num_rows: int, commit_rows: int) -> Job:
    write_rows(folder / "jobs.parquet", num_rows)
    whole = {}
    for ending in ENDINGS:
        started_s = time.monotonic()
        ran = runs.run(folder, *command(model, f"whole.{ending}"), commit_rows=commit_rows)
        assert ran.code == 0, ran.err
        assert sorted(ran.computed) == list(range(num_rows))
        whole[ending] = (folder / f"whole.{ending}").read_bytes()
    return Job(folder=folder, num_rows=num_rows, whole=whole,
               run_s=time.monotonic() - started_s,
               num_steps=ran.summary["forward_steps"])  # fmt: skip


@pytest.fixture(scope="module")
def small_job(tmp_path_factory: pytest.TempPathFactory, runs: Runs, model: Path) -> Job:
    return make_job(tmp_path_factory.mktemp("small"), runs, model, 40, 8)


def go_on(runs: Runs, job: Job, model: Path, output: str, **order: Any) -> Ran:
    """Another run of the same command: it computes no row that was committed before it."""
    before = committed_rows(job.folder / output)
    assert len(set(before)) == len(before)
    ran = runs.run(job.folder, *command(model, output), **order)
    assert not set(before) & set(ran.computed), "a committed row was computed again"
    assert len(set(ran.computed)) == len(ran.computed)
    if ran.code == 0:
        assert ran.summary["resumed_rows"] == len(before)
        assert len(before) + len(ran.computed) == job.num_rows
    return ran


# -- kills --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_run_that_dies_inside_commits_and_steps_ends_as_if_nothing_had_been(
    runs: Runs, model: Path, small_job: Job, ending: str
) -> None:
    output = f"o.{ending}"
    for death in (["write", 0], ["write", 2], ["step", 11], ["replaced", 0], ["replace", 1]):
        died = go_on(runs, small_job, model, output, commit_rows=8, die_at=death)
        assert died.code == -signal.SIGKILL, died.err
    assert go_on(runs, small_job, model, output).code == 0
    assert (small_job.folder / output).read_bytes() == small_job.whole[ending]
    assert not list(small_job.folder.glob(f"{output}.batchradix/tmp/*"))


@pytest.mark.parametrize("call", range(7))
def test_a_death_before_or_after_any_rename_is_one_run_more(
    runs: Runs, model: Path, small_job: Job, call: int
) -> None:
    """Renames: run.json, the shards of 40 rows, the output, run.json."""
    output = small_job.folder / "renamed.parquet"
    forget(output)
    kind = ("replace", "replaced")[call % 2]
    died = runs.run(small_job.folder, *command(model, output.name), commit_rows=8,
                    die_at=[kind, call])  # fmt: skip
    assert died.code == -signal.SIGKILL
    assert go_on(runs, small_job, model, output.name).code == 0
    assert output.read_bytes() == small_job.whole["parquet"]


def kill_at_random(
    runs: Runs, job: Job, model: Path, output: str, drawn: random.Random
) -> tuple[bool, bool]:
    """Kills a run: some time after its start, or as soon as the next file of a commit is seen.

    Whether it was not done before that, and whether it died inside a commit.
    """
    folder = job.folder / f"{output}.batchradix"
    before = committed_rows(job.folder / output)
    pid = runs.start(job.folder, *command(model, output), commit_rows=16)
    place = drawn.choice(["time", "tmp", "shards"])
    if place == "time":
        time.sleep(drawn.uniform(0, job.run_s))
    else:
        seen = {path.name for path in folder.glob(f"{place}/*")}
        turns = drawn.randrange(1, 6)
        limit_s = time.monotonic() + job.run_s
        while turns and time.monotonic() < limit_s:
            found = {path.name for path in folder.glob(f"{place}/*")}
            turns -= bool(found - seen)
            seen = found
    os.kill(pid, signal.SIGKILL)
    ran = runs.wait(pid)
    assert ran.code in (0, -signal.SIGKILL)
    assert not set(before) & set(ran.computed), "a committed row was computed again"
    return ran.code != 0, any(folder.glob("tmp/shard-*"))


def check_kills(runs: Runs, job: Job, model: Path, ending: str, num_kills: int) -> None:
    drawn = random.Random(f"{ending} {num_kills}")
    output = f"k.{ending}"
    num_killed = num_inside = 0
    while num_killed < num_kills:
        was_killed, was_inside = kill_at_random(runs, job, model, output, drawn)
        num_killed += was_killed
        num_inside += was_inside
        if (job.folder / output).exists() or drawn.random() < 0.4:
            assert go_on(runs, job, model, output).code == 0
            assert (job.folder / output).read_bytes() == job.whole[ending]
            forget(job.folder / output)
    assert go_on(runs, job, model, output).code == 0
    assert (job.folder / output).read_bytes() == job.whole[ending]
    assert num_inside or num_kills < 20, "no kill fell into a commit"


def test_kills_at_random_moments_change_nothing(runs: Runs, model: Path, small_job: Job) -> None:
    check_kills(runs, small_job, model, "arrow", 3)


@pytest.fixture(scope="module")
def large_job(tmp_path_factory: pytest.TempPathFactory, runs: Runs, model: Path) -> Job:
    return make_job(tmp_path_factory.mktemp("large"), runs, model, 500, 16)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("ending", ENDINGS)
def test_twenty_kills_of_a_run_of_500_real_rows_change_nothing(
    runs: Runs, model: Path, large_job: Job, ending: str
) -> None:
    check_kills(runs, large_job, model, ending, 20)


# -- no room ------------------------------------------------------------------------------------


def check_one_sentence(ran: Ran) -> None:
    """The run said one thing that went wrong, and showed nothing of its insides."""
    assert "Traceback" not in ran.err
    assert "Exception ignored" not in ran.err
    errors = [line for line in ran.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, ran.err


def test_a_disk_that_takes_no_large_file_stops_the_run_which_then_goes_on(
    runs: Runs, model: Path, small_job: Job
) -> None:
    """Limits that first the token table exceeds, then a shard, and the output last."""
    output = small_job.folder / "full.jsonl"
    forget(output)
    for limit in (16, 2_000, 6_000):
        ran = go_on(runs, small_job, model, output.name, commit_rows=16, file_size_bytes=limit)
        assert ran.code == 3, ran.err
        check_one_sentence(ran)
        assert not output.exists()
    assert go_on(runs, small_job, model, output.name).code == 0
    assert output.read_bytes() == small_job.whole["jsonl"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A file system in memory; called with a size it has that size from then on."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        options = f"{'remount,' if mounted else ''}size={size}"
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True
        )
        if done.returncode:
            pytest.skip("may not mount")
        mounted.append(place)
        return place

    yield mount
    if mounted:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.skipif(shutil.which("mount") is None or os.geteuid() != 0, reason="may not mount")
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_full_disk_keeps_what_was_committed_and_room_is_all_that_is_needed(
    runs: Runs, model: Path, small_job: Job, small_disk: Any, ending: str
) -> None:
    """Room is made page by page: it runs out in commits first, then in the output."""
    disk = small_disk("4k")
    output = disk / f"o.{ending}"
    held: list[int] = []
    for num_pages in range(3, 40, 4):
        small_disk(f"{4 * num_pages}k")
        ran = runs.run(small_job.folder, *command(model, str(output)), commit_rows=8)
        assert not set(held) & set(ran.computed)
        assert set(held) <= set(committed_rows(output))
        held = committed_rows(output)
        if ran.code == 0:
            break
        assert ran.code in (2, 3), ran.err
        check_one_sentence(ran)
        assert "No space left on device" in ran.err
        assert not output.exists()
    assert num_pages > 3
    assert output.read_bytes() == small_job.whole[ending]


# -- two runs, no rights, damage ----------------------------------------------------------------


def test_of_runs_that_start_together_one_has_the_output_and_the_others_name_it(
    runs: Runs, model: Path, small_job: Job
) -> None:
    output = small_job.folder / "raced.arrow"
    started = [
        runs.start(small_job.folder, *command(model, output.name), pause_s=0.05) for _ in range(4)
    ]
    ended = {pid: runs.wait(pid) for pid in started}
    [winner] = [pid for pid, ran in ended.items() if ran.code == 0]
    for pid, ran in ended.items():
        if pid != winner:
            assert ran.code == 4, ran.err
            assert f"process {winner} on host {socket.gethostname()}" in ran.err
            assert not ran.computed
    assert output.read_bytes() == small_job.whole["arrow"]


def test_a_killed_run_holds_nothing_however_soon_the_next_one_starts(
    runs: Runs, model: Path, small_job: Job
) -> None:
    output = small_job.folder / "stale.jsonl"
    pid = runs.start(small_job.folder, *command(model, output.name), pause_s=0.05, commit_rows=8)
    wait_for(lambda: bool(committed_rows(output)))
    lock = output.with_name(output.name + ".batchradix") / "lock"
    assert json.loads(lock.read_text())["pid"] == pid
    os.kill(pid, signal.SIGKILL)
    assert go_on(runs, small_job, model, output.name).code == 0
    assert runs.wait(pid).code == -signal.SIGKILL
    assert output.read_bytes() == small_job.whole["jsonl"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_folder_that_is_not_ours_is_refused_before_weights_load(
    runs: Runs, model: Path, small_job: Job
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(model, folder / "model")
        shutil.copy(small_job.folder / "jobs.parquet", folder)
        folder.chmod(0o755)
        same = ["run", folder / "jobs.parquet", "--model", folder / "model", "-o"]
        ran = runs.run(Path("/"), *same, folder / "o.arrow", uid=NOBODY)
        assert ran.code == 2
        check_one_sentence(ran)
        assert "not writable" in ran.err
        assert "loading" not in ran.err
        (folder / "o.arrow.batchradix").mkdir()  # somebody else's work
        folder.chmod(0o777)
        ran = runs.run(Path("/"), *same, folder / "o.arrow", uid=NOBODY)
        assert ran.code == 2
        check_one_sentence(ran)
        assert "cannot be written: Permission denied" in ran.err


@pytest.mark.parametrize("where", [0.0, 0.3, 0.6, 0.99])
def test_a_changed_byte_in_a_shard_costs_the_rows_of_that_shard(
    runs: Runs, model: Path, small_job: Job, where: float
) -> None:
    output = small_job.folder / "hurt.arrow"
    forget(output)
    died = runs.run(small_job.folder, *command(model, output.name), commit_rows=8,
                    die_at=["replace", 4])  # fmt: skip
    assert died.code == -signal.SIGKILL
    work = output.with_name(output.name + ".batchradix")
    hurt = sorted(work.glob("shards/shard-*"))[1]
    lost = pl.read_ipc(hurt)["row"].to_list()
    content = bytearray(hurt.read_bytes())
    content[int(where * len(content))] ^= 0x10
    hurt.write_bytes(content)
    stay = set(committed_rows_of(work, without=hurt))
    ran = runs.run(small_job.folder, *command(model, output.name))
    assert ran.code == 0
    assert set(ran.computed) == set(range(small_job.num_rows)) - stay
    assert set(lost) <= set(ran.computed)
    assert f"{hurt.name} is torn or damaged; it was moved to" in ran.err
    assert [path.name for path in work.glob("bad/*")] == [hurt.name]
    assert output.read_bytes() == small_job.whole["arrow"]


def committed_rows_of(work: Path, *, without: Path) -> list[int]:
    shards = [path for path in work.glob("shards/shard-*.arrow") if path != without]
    return [row for path in shards for row in pl.read_ipc(path)["row"].to_list()]


@pytest.mark.parametrize("keep", [0, 7, 0.5, 0.999])
def test_a_weight_file_that_was_cut_is_named_before_anything_runs(
    runs: Runs, model: Path, small_job: Job, tmp_path: Path, keep: float
) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(model, cut)
    weights = cut / "model.safetensors"
    size = weights.stat().st_size
    os.truncate(weights, int(keep * size) if keep < 1 else int(keep))
    ran = runs.run(small_job.folder, *command(cut, "cut.arrow"))
    assert ran.code == 2
    check_one_sentence(ran)
    assert "model.safetensors" in ran.err
    assert "loading" not in ran.err
    assert not (small_job.folder / "cut.arrow").exists()


@pytest.mark.parametrize("keep", [0, 4, 0.3, 0.9, 0.999])
def test_a_gguf_file_that_was_cut_is_named_before_anything_runs(
    runs: Runs, small_job: Job, tmp_path: Path, keep: float
) -> None:
    """In its mark, in its key-value pairs (some 600 bytes), in its only tensor."""
    import gguf
    import numpy as np

    path = tmp_path / "cut.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(30)])
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.truncate(path, int(keep * path.stat().st_size) if keep < 1 else int(keep))
    ran = runs.run(small_job.folder, *command(path, "cut.arrow"))
    assert ran.code == 2
    check_one_sentence(ran)
    assert ("cut.gguf is damaged" if keep else "cut.gguf is not a GGUF file") in ran.err
    assert "loading" not in ran.err
    assert not (small_job.folder / "cut.arrow").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize(
    "part", ["model.safetensors", "config.json", "tokenizer.json", "m.gguf", ".", ".."]
)
def test_a_model_that_may_not_be_read_is_refused_by_the_name_of_its_file(
    runs: Runs, model: Path, small_job: Job, part: str
) -> None:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        shutil.copy(small_job.folder / "jobs.parquet", name)
        folder = Path(name) / "models" / "m"
        shutil.copytree(model, folder)
        (folder / "m.gguf").write_bytes(b"GGUF")
        folder.chmod(0o755)
        for path in folder.iterdir():
            path.chmod(0o644)
        (folder / part).chmod(0)
        given = folder / part if part == "m.gguf" else folder
        ran = runs.run(Path(name), *command(given, "o.arrow"), uid=NOBODY)
        assert ran.code == 2, ran.err
        check_one_sentence(ran)
        assert str(folder) in ran.err
        assert part.strip(".") in ran.err
        assert "Permission denied" in ran.err
        assert not (Path(name) / "o.arrow").exists()


# -- surroundings -------------------------------------------------------------------------------


@pytest.mark.parametrize("closed", [[], [0], [0, 1, 2]])
def test_a_job_file_runs_without_environment_terminal_and_input_from_any_folder(
    runs: Runs, model: Path, tmp_path: Path, closed: list[int]
) -> None:
    work = tmp_path / "job"
    elsewhere = tmp_path / "else" / "where"
    work.mkdir()
    elsewhere.mkdir(parents=True)
    write_rows(work / "jobs.parquet", 3)
    (work / "schema.json").write_text(SCHEMA)
    (work / "job.toml").write_text(
        f'input = "jobs.parquet"\noutput = "{{date}}.arrow"\nschema = "schema.json"\n'
        f'model = "{model}"\nmax_tokens = 16\nthreads = 1\n'
    )
    ran = runs.run(elsewhere, "run", "../../job/job.toml", "--date", "2026-11-30", env={},
                   close=closed)  # fmt: skip
    assert ran.code == 0, ran.err
    assert pl.read_ipc(work / "2026-11-30.arrow")["status"].to_list() == ["ok"] * 3
    assert not list(elsewhere.iterdir())
    assert "Traceback" not in ran.err
    assert "\x1b" not in ran.err + ran.out


# -- what can be read while a run goes on -------------------------------------------------------


def test_committed_shards_are_a_dataset_while_the_run_goes_on(
    runs: Runs, model: Path, small_job: Job
) -> None:
    output = small_job.folder / "answers.arrow"
    forget(output)
    pid = runs.start(small_job.folder, *command(model, output.name), pause_s=0.4, commit_rows=8)
    wait_for(lambda: len(committed_rows(output)) >= 16)
    shards = output.with_name(output.name + ".batchradix") / "shards"
    lazy = pl.scan_ipc(f"{shards}/*.arrow").select("id", "row", "status", "text").collect()
    opened = ds.dataset(shards, format="arrow").to_table(columns=["id", "row", "status", "text"])
    page = (ROOT / "docs" / "partial_results.md").read_text(encoding="utf-8")
    for program in re.findall(r"```python\n(.+?)\n```", page, re.DOTALL):
        shown = subprocess.run(
            [sys.executable, "-c", program], cwd=small_job.folder, capture_output=True, text=True
        )
        assert shown.returncode == 0, shown.stderr
        assert "ok" in shown.stdout
    os.kill(pid, signal.SIGKILL)
    runs.wait(pid)
    assert 16 <= len(lazy) <= opened.num_rows < 40
    whole = pa.ipc.open_file(small_job.whole["arrow"]).read_all().to_pylist()
    for row in opened.to_pylist():
        assert row == {name: whole[row["row"]][name] for name in row}
    assert set(lazy["id"]) <= set(opened["id"].to_pylist())
