"""The nightly recipe: its three nights, units, crontab and README, and the schedulers' files."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import polars as pl
import pytest

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "recipes" / "nightly"
SUMMARY = {"rows": 12, "resumed_rows": 9, "rows_left": 0}
AIRFLOW = "apache-airflow==3.3.2"
DAGSTER = "dagster==1.13.29"

MakeTinyModel = Callable[..., Path]
Scheduler = Callable[[str, str, int], subprocess.CompletedProcess[str]]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"nightly_{name}", RECIPE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def quick(tiny_model_folder: MakeTinyModel) -> Path:
    """A model that ends the strings of the schema at once."""
    return tiny_model_folder("const", prefer='"1', context_length=4096)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder as /opt/batchradix: the recipes, and .venv/bin with batchradix and python."""
    home = tmp_path / "opt"
    shutil.copytree(ROOT / "recipes", home / "recipes")
    programs = home / ".venv" / "bin"
    programs.mkdir(parents=True)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    for name, arguments in {"python": "", "batchradix": "-m batchradix"}.items():
        (programs / name).write_text(
            f'#!/bin/sh\nexport PYTHONPATH="{paths}"\nexec "{sys.executable}" {arguments} "$@"\n'
        )
        (programs / name).chmod(0o755)
    return home


def use_model(home: Path, model: Path) -> None:
    job = home / "recipes" / "nightly" / "job.toml"
    text = job.read_text(encoding="utf-8")
    assert text.count('model = "smollm2-135m"') == 1
    job.write_text(text.replace("smollm2-135m", str(model)), encoding="utf-8")


# -- nights -------------------------------------------------------------------------------------


def test_the_three_nights_add_edit_remove_and_reorder_rows() -> None:
    lines = (RECIPE / "notices.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert 5 <= len(rows) == len({row["id"] for row in rows}) <= 12
    first, second, third = (
        {row["id"]: row["text"] for row in now} for _, now in load("nights").nights(rows)
    )
    assert len(first) == 9
    assert len(first.keys() - second.keys()) == 1
    assert len(second.keys() - first.keys()) == 2
    assert len([id for id in first.keys() & second.keys() if first[id] != second[id]]) == 1
    assert len(second.keys() - third.keys()) == len(third.keys() - second.keys()) == 1
    assert len([id for id in first.keys() & third.keys() if first[id] != third[id]]) == 0
    assert [id for id in third if id in second] == [id for id in reversed(second) if id in third]


def test_each_night_generates_exactly_what_changed(quick: Path, installed: Path) -> None:
    """In this order: 5 new rows; 2 added and 1 edited; 1 added, an edit undone is an old answer."""
    done = subprocess.run(
        [installed / ".venv/bin/python", installed / "recipes/nightly/nights.py", "--rows", "8",
         "--model", quick],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = re.findall(r"^night \d: .*: (\d+) generated, (\d+) kept", done.stdout, re.MULTILINE)
    assert told == [("5", "0"), ("3", "3"), ("1", "5")]


# -- systemd and cron ---------------------------------------------------------------------------


def placed(home: Path, text: str, state: Path) -> str:
    for folder, real in {
        "/opt/batchradix": home,
        "/var/lib/batchradix": state,
        "/var/cache/batchradix": state,
        "%S/batchradix": state,
    }.items():
        text = text.replace(folder, str(real))
    return text


def run_clean(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """As a scheduler does: no environment but a PATH, no input."""
    return subprocess.run(
        command, cwd=folder, env={"PATH": "/usr/bin:/bin", "BATCHRADIX_HISTORY": "off"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_finds_nothing_wrong_with_the_units(installed: Path, tmp_path: Path) -> None:
    units = []
    for name in ("batchradix-nightly.service", "batchradix-nightly.timer"):
        text = (RECIPE / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text.replace("/opt/batchradix", str(installed)))
        units.append(str(tmp_path / name))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    ours = [line for line in done.stderr.splitlines() if "batchradix" in line]
    assert not ours
    when = re.search(r"^OnCalendar=(.*)$", Path(units[1]).read_text(), re.MULTILINE)
    assert when is not None
    done = subprocess.run(["systemd-analyze", "calendar", when[1]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_service_starts_a_command_that_runs_and_goes_on(
    installed: Path, quick: Path, tmp_path: Path
) -> None:
    use_model(installed, quick)
    state = tmp_path / "state"
    state.mkdir()
    unit = placed(installed, (RECIPE / "batchradix-nightly.service").read_text(), state)
    [line] = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    assert "SuccessExitStatus=143" in unit.splitlines()
    command = shlex.split(line)
    done = run_clean(command, Path("/"))
    assert done.returncode == 0, done.stderr
    answers = pl.read_parquet(state / "answers.parquet")
    assert answers["status"].to_list() == ["ok"] * 12
    assert (
        'batchradix_rows{job="answers.parquet",status="ok"} 12'
        in (state / "nightly.prom").read_text()
    )
    assert not list((installed / "recipes/nightly").glob("answers*"))


def test_the_crontab_is_a_time_and_a_command_that_runs(
    installed: Path, quick: Path, tmp_path: Path
) -> None:
    use_model(installed, quick)
    state = tmp_path / "state"
    state.mkdir()
    text = placed(installed, (RECIPE / "crontab").read_text(encoding="utf-8"), state)
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"\w+=\S+", line) for line in lines[:-1])
    *times, command = lines[-1].split(maxsplit=5)
    assert times == ["0", "2", "*", "*", "*"]
    assert "%" not in command  # cron reads it as the end of the line
    done = run_clean(["sh", "-c", command], Path("/"))
    assert done.returncode == 0, done.stderr
    assert len(pl.read_parquet(state / "answers.parquet")) == 12


# -- the README ---------------------------------------------------------------------------------


def readme_commands() -> list[tuple[str, str]]:
    """(kind, command) of each block that a ``<!-- test: KIND -->`` line precedes."""
    text = (RECIPE / "README.md").read_text(encoding="utf-8")
    return re.findall(r"<!-- test: (\w+) -->\n```sh\n(.*?)\n```", text, re.DOTALL)


def test_every_shell_block_of_the_readme_is_marked_for_a_test() -> None:
    text = (RECIPE / "README.md").read_text(encoding="utf-8")
    assert len(readme_commands()) == text.count("```sh")
    assert {kind for kind, _ in readme_commands()} == {"run", "root"}


def run_readme(installed: Path) -> str:
    path = os.pathsep.join([str(installed / ".venv" / "bin"), os.environ["PATH"]])
    output = ""
    for kind, command in readme_commands():
        if kind == "run":
            done = subprocess.run(
                ["sh", "-c", command], cwd=installed, env=os.environ | {"PATH": path},
                capture_output=True, text=True,
            )  # fmt: skip
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
            output += done.stdout
    return output


def test_the_commands_of_the_readme_run(installed: Path, quick: Path) -> None:
    use_model(installed, quick)
    output = run_readme(installed)
    assert re.findall(r"(\d+) generated, (\d+) kept", output) == [
        ("9", "0"),
        ("3", "7"),
        ("1", "9"),
    ]
    assert "12 rows" in output


@pytest.mark.model
@pytest.mark.timeout(900)
def test_the_readme_runs_with_its_own_model(installed: Path) -> None:
    output = run_readme(installed)
    assert re.findall(r"(\d+) generated, (\d+) kept", output) == [
        ("9", "0"),
        ("3", "7"),
        ("1", "9"),
    ]


# -- Airflow and Dagster ------------------------------------------------------------------------


@pytest.fixture
def scheduler(tmp_path: Path) -> Scheduler:
    """Installs a package in an environment of its own and runs a program there, beside a
    ``batchradix`` that notes its arguments, prints `SUMMARY` and ends with a code."""

    def run(package: str, program: str, code: int) -> subprocess.CompletedProcess[str]:
        python = tmp_path / "venv" / "bin" / "python"
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
            subprocess.run([python, "-m", "pip", "install", "-q", package], check=True)
        programs = tmp_path / "bin"
        programs.mkdir(exist_ok=True)
        (programs / "batchradix").write_text(
            f'#!/bin/sh\nprintf "%s\\n" "$@" > "{tmp_path}/arguments"\n'
            f"echo '{json.dumps(SUMMARY)}'\nexit {code}\n"
        )
        (programs / "batchradix").chmod(0o755)
        environment = {
            "PATH": f"{programs}:/usr/bin:/bin",
            "HOME": str(tmp_path),
            "AIRFLOW_HOME": str(tmp_path / "airflow"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "DAGSTER_HOME": "",
            "BATCHRADIX_JOB": "/jobs/job.toml",
            "PYTHONPATH": str(RECIPE),
        }
        return subprocess.run(
            [python, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    return run


AIRFLOW_PROGRAM = """
import airflow_dag
from airflow.sdk.exceptions import AirflowSkipException
[task] = airflow_dag.dag.tasks
assert task.retries == 2 and airflow_dag.dag.max_active_runs == 1
try:
    print("pushed", task.execute({}))
except AirflowSkipException:
    print("skipped")
"""
DAGSTER_PROGRAM = """
import dagster_job
ran = dagster_job.definitions.resolve_job_def("batchradix_nightly").execute_in_process(
    raise_on_error=False
)
print("success", ran.success, ran.output_for_node("answer_new_rows") if ran.success else "")
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_airflow_imports_the_dag_and_runs_its_task(scheduler: Scheduler) -> None:
    done = scheduler(AIRFLOW, AIRFLOW_PROGRAM, 0)
    assert done.returncode == 0, done.stderr
    assert f"pushed {json.dumps(SUMMARY)}" in done.stdout
    assert scheduler(AIRFLOW, AIRFLOW_PROGRAM, 143).returncode == 0
    assert "skipped" in scheduler(AIRFLOW, AIRFLOW_PROGRAM, 4).stdout
    failed = scheduler(AIRFLOW, AIRFLOW_PROGRAM, 3)
    assert failed.returncode != 0
    assert "exit code 3" in failed.stderr + failed.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_dagster_runs_the_job(scheduler: Scheduler, tmp_path: Path) -> None:
    assert "success True 3" in scheduler(DAGSTER, DAGSTER_PROGRAM, 0).stdout
    assert (tmp_path / "arguments").read_text().split() == ["run", "/jobs/job.toml", "--json"]
    assert "success True 3" in scheduler(DAGSTER, DAGSTER_PROGRAM, 143).stdout
