"""Runs started by cron, Airflow, a pipe or a script: exit codes, logs, streams, surroundings."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def jobs(folder: Path, files: ModuleType) -> Path:
    """Files of jobs whose rows are fine, fine in part, or all too long for the context of 128."""
    fine = [{"id": f"k{i}", "prompt": f"p{i}"} for i in range(200)]
    bad = [{"id": f"x{i}", "prompt": "w" * 400} for i in range(3)]
    files.write_jsonl("all.jsonl", fine)
    files.write_jsonl("some.jsonl", fine[:5] + bad)
    files.write_jsonl("none.jsonl", bad)
    files.write_jsonl("empty.jsonl", [])
    return folder


@pytest.fixture
def short(const: Any) -> Path:
    """A model with a context of 128 tokens."""
    model: Path = const("a", context_length=128)
    return model


def _options(model: Path, output: object) -> list[Any]:
    return ["--schema", "tag.json", "--model", model, "--max-tokens", 16, "-o", output]


@pytest.mark.parametrize(
    ("name", "options", "code"),
    [
        ("all", [], 0), ("empty", [], 0), ("some", [], 1), ("none", [], 3),
        ("some", ["--allow-failures", "37.5%"], 0), ("some", ["--allow-failures", "37%"], 1),
        ("some", ["--allow-failures", "0.375"], 0), ("none", ["--allow-failures", "100%"], 3),
        ("all", ["--schema", '{"type": "string"}'], 3),  # none is finished within 16 tokens
        ("some", ["--quiet"], 1), ("some", ["--json"], 1),
    ],
)  # fmt: skip
def test_the_exit_code_tells_a_scheduler_what_became_of_the_rows(
    jobs: Path, cli: Any, short: Path, files: ModuleType, name: str, options: Any, code: int
) -> None:
    """Case sj-01."""
    ran = cli("run", f"{name}.jsonl", *_options(short, "o.arrow"), *options)
    assert ran.code == code
    num_rows = {"all": 200, "some": 8, "none": 3, "empty": 0}[name]
    assert len(files.read_rows("o.arrow")) == num_rows
    if name == "none":
        assert "loading" not in ran.err


@pytest.mark.parametrize(
    "argv",
    [
        ["run", "all.jsonl", "--schema", "missing.json"], ["run", "missing.jsonl"],
        ["run", "all.jsonl", "--no-such-flag"], ["run"], ["walk", "all.jsonl"],
        ["run", "all.jsonl", "--max-tokens", "many"], ["run", "all.jsonl", "--max-tokens", "0"],
        ["run", "all.jsonl", "--temperature", "nan"], ["run", "all.jsonl", "--dtype", "int4"],
        ["run", "all.jsonl", "--device", "tpu"], ["run", "all.jsonl", "--model", "missing"],
        ["run", "all.jsonl", "--model", "."], ["run", "all.jsonl", "--keep", "missing"],
        ["run", "all.jsonl", "--id-column", "missing"], ["run", "all.jsonl", "--stop", ""],
        ["run", "all.jsonl", "--template", "{{missing}}"], ["run", "all.jsonl", "--chat"],
        ["run", "all.jsonl", "--template", "missing.txt"], ["run", "all.jsonl", "--column", "id"],
        ["run", "all.jsonl", "--kv-memory", "much"], ["run", "all.jsonl", "-o", "o.txt"],
        ["run", "all.jsonl", "-o", "missing/o.arrow"], ["run", "all.jsonl", "-o", "."],
        ["run", "all.jsonl", "--allow-failures", "200%"], ["run", "all.jsonl", "--limit", "-1"],
        ["run", "all.jsonl", "--restart", "--resume"], ["plan", "missing.jsonl"],
        ["preview", "all.jsonl", "--row", "missing"], ["preview", "empty.jsonl"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_usage_error_is_exit_code_2_and_one_sentence_and_leaves_nothing(
    jobs: Path, processes: Any, cli: Any, short: Path, argv: list[str]
) -> None:
    """Case sj-01."""
    before = {path.name for path in jobs.iterdir()}
    if "--model" not in argv:
        argv = [*argv, "--model", str(short)]
    if argv[0] == "run" and "-o" not in argv:
        argv = [*argv, "-o", "o.arrow"]
    ran = cli(*argv)
    assert ran.code == 2
    assert "Traceback" not in ran.err
    assert "loading" not in ran.err
    assert ran.err.strip()
    assert ran.out == ""
    left = {path.name for path in jobs.iterdir()} - before
    assert left <= {"o.arrow.batchradix"} if "--device" in argv else not left


def test_cron_gives_no_home_no_terminal_and_another_folder(
    jobs: Path, processes: Any, short: Path, files: ModuleType
) -> None:
    """Case sj-01."""
    paths = processes.environ["PYTHONPATH"]
    with open("log.txt", "wb") as log:
        ran = processes.run(
            "run", jobs / "all.jsonl", "--schema", jobs / "tag.json", "--model", short,
            "--max-tokens", 16, "-o", jobs / "cron.arrow",
            cwd="/", env={"PATH": "/usr/bin:/bin", "PYTHONPATH": paths},
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    said = Path("log.txt").read_text("utf-8")
    assert ran.code == 0, said
    assert "\x1b" not in said
    assert "\r" not in said
    lines = said.splitlines()
    assert len(lines) < 40
    assert re.fullmatch(r"summary rows=200 ok=200 failed=0 truncated=0 seconds=\d+\.\d+", lines[-1])
    assert files.column("cron.arrow", "status") == ["ok"] * 200


def test_the_last_line_is_for_scripts_and_json_is_the_only_line(
    jobs: Path, cli: Any, short: Path
) -> None:
    """Case sj-01."""
    ran = cli("run", "some.jsonl", *_options(short, "o.arrow"))
    words = dict(pair.split("=") for pair in ran.out.splitlines()[-1].split()[1:])
    assert words["rows"] == "8"
    assert (words["ok"], words["failed"], words["truncated"]) == ("5", "3", "0")
    ran = cli("run", "some.jsonl", *_options(short, "o.arrow"), "--json", "--quiet")
    (line,) = ran.out.splitlines()
    found = json.loads(line)
    assert (found["rows"], found["ok"], found["errors"]) == (8, 5, 3)
    assert found["error_codes"] == {"prompt_too_long": 3}
    assert ran.err == ""


@pytest.mark.parametrize("closed", ["1", "2", "012"])
def test_closed_streams_change_neither_table_nor_exit_code(
    jobs: Path, processes: Any, short: Path, files: ModuleType, closed: str
) -> None:
    close = " ".join(f"{number}>&-" for number in closed)
    command = [*processes.command, "run", "some.jsonl", *map(str, _options(short, "o.arrow"))]
    ran = subprocess.run(
        ["sh", "-c", f'"$@" {close}', "sh", *command],
        env=processes.environ, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 1
    assert "Traceback" not in ran.stderr
    assert len(files.read_rows("o.arrow")) == 8


def test_a_reader_that_leaves_early_changes_neither_table_nor_exit_code(
    jobs: Path, processes: Any, short: Path, files: ModuleType
) -> None:
    """Case sj-01."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ran = processes.run("run", "some.jsonl", *_options(short, "o.arrow"), stdout=writer)
        assert ran.code == 1
        assert "Traceback" not in ran.err
        assert "BrokenPipe" not in ran.err
        both = processes.run("run", "all.jsonl", *_options(short, "p.arrow"), stdout=writer,
                             stderr=writer)  # fmt: skip
        assert both.code == 0
    finally:
        os.close(writer)
    assert len(files.read_rows("o.arrow")) == 8
    assert len(files.read_rows("p.arrow")) == 200


def test_failures_of_an_earlier_night_are_not_forgotten_by_the_exit_code(
    jobs: Path, cli: Any, short: Path
) -> None:
    """Nothing is generated the second time, and the table still has rows that failed."""
    same = ["run", "some.jsonl", *_options(short, "o.arrow"), "--json"]
    assert cli(*same).code == 1
    again = cli(*same)
    assert (again.code, again.summary["forward_steps"], again.summary["errors"]) == (1, 0, 3)
    assert cli(*same, "--allow-failures", "50%").code == 0
    assert cli("run", "none.jsonl", *_options(short, "n.arrow")).code == 3
    assert cli("run", "none.jsonl", *_options(short, "n.arrow")).code == 3


def test_a_log_in_ascii_takes_names_of_any_script(
    jobs: Path, processes: Any, short: Path, files: ModuleType
) -> None:
    (jobs / "some.jsonl").rename(jobs / "zeilen ü 北.jsonl")
    environ = {**processes.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    ran = processes.run("run", "zeilen ü 北.jsonl", *_options(short, "aus ü 北.arrow"), env=environ)
    assert ran.code == 1, ran.err
    assert "Traceback" not in ran.err
    assert len(files.read_rows("aus ü 北.arrow")) == 8


def test_an_output_named_by_nobody_lies_in_the_working_folder(
    jobs: Path, cli: Any, short: Path, files: ModuleType
) -> None:
    (jobs / "elsewhere").mkdir()
    os.chdir(jobs / "elsewhere")
    ran = cli("run", "../some.jsonl", "--model", short, "--max-tokens", 1)
    assert ran.code == 1
    (written,) = Path().glob("*.arrow")
    assert written.name in ran.out
    assert len(files.read_rows(written)) == 8


def test_names_with_blanks_and_letters_of_any_script_are_paths_like_others(
    jobs: Path, cli: Any, short: Path, files: ModuleType
) -> None:
    folder = jobs / "a b ü 北"
    folder.mkdir()
    (folder / "in put.jsonl").write_bytes((jobs / "some.jsonl").read_bytes())
    ran = cli("run", folder / "in put.jsonl", *_options(short, folder / "out put.parquet"))
    assert ran.code == 1
    assert len(files.read_rows(folder / "out put.parquet")) == 8


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_said_before_anything_else(
    jobs: Path, cli: Any, short: Path
) -> None:
    closed = jobs / "closed"
    closed.mkdir(mode=0o555)
    ran = cli("run", "all.jsonl", *_options(short, closed / "o.arrow"))
    assert ran.code == 2
    assert "not writable" in ran.err
    os.chdir(closed)  # a working folder that may not be written is none of our business
    ran = cli("run", jobs / "some.jsonl", "--model", short, "--max-tokens", 1,
              "-o", jobs / "o.arrow")  # fmt: skip
    assert ran.code == 1


def test_help_needs_no_model_library(processes: Any, folder: Path) -> None:
    script = (
        "import sys\nfrom batchradix.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'polars', 'xgrammar', 'datasets'}\n"
        "heavy |= {'pyarrow'} - {'pyarrow' for word in sys.argv if word == 'models'}\n"
        "sys.exit(f'{heavy & set(sys.modules)}' if heavy & set(sys.modules) else 0)\n"
    )
    for argv in (["--help"], ["run", "--help"], ["--version"], ["models"]):
        ran = subprocess.run(
            [sys.executable, "-c", script, *argv], env=processes.environ, text=True,
            capture_output=True, timeout=60,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout


def test_folders_that_cannot_be_used_stop_no_run(
    jobs: Path, processes: Any, short: Path, files: ModuleType
) -> None:
    inside_a_file = str(Path("tag.json").resolve() / "folder")
    nowhere = dict.fromkeys(("TMPDIR", "HOME", "BATCHRADIX_CACHE"), inside_a_file)
    ran = processes.run("run", "some.jsonl", *_options(short, "o.arrow"), "--limit", 5,
                        env={**processes.environ, **nowhere, "LC_ALL": "C"})  # fmt: skip
    assert ran.code == 0, ran.err
    assert files.column("o.arrow", "status") == ["ok"] * 5
