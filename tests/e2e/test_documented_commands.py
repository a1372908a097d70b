"""Every command and program in README, CONTRIBUTING and docs is run, here or by ``.ci/run``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchradix.cli.main import main
from batchradix.errors import RowErrorCode
from batchradix.jobs.openai_request import SETTINGS, WITHOUT_EFFECT
from batchradix.report.estimate import Estimate
from batchradix.report.trace import STEPS

ROOT = Path(__file__).parents[2]
BATCHRADIX = [sys.executable, "-m", "batchradix"]
SCHEMA = '{"type":"object","properties":{"n":{"type":"integer","minimum":0,"maximum":9}},"required":["n"]}'  # noqa: E501

MakeTinyModel = Callable[..., Path]


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.+?)\n```", text, re.DOTALL)


def installed_command(line: str) -> list[str]:
    """The words after the virtual environment's set-up, with this interpreter's batchradix."""
    words = line.split(" && ")[-1].split()
    assert words[0] in ("batchradix", ".venv/bin/batchradix")
    return [*BATCHRADIX, *words[1:]]


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def jobs_folder(folder: Path) -> Path:
    pq.write_table(pa.table({"prompt": ["One digit:", "Another:"]}), folder / "jobs.parquet")
    (folder / "schema.json").write_text(SCHEMA)
    return folder


def test_the_commands_of_the_readme_are_the_three_that_are_run() -> None:
    first, second, third = blocks("README.md", "sh")
    assert first.splitlines() == [first]
    assert "recipes/debian_copyrights" in first
    assert second.endswith("-m pytest -q")
    assert third.startswith("batchradix run jobs.parquet")


def test_ci_runs_the_test_command_of_the_readme_and_every_check_of_contributing() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "<!-- test-command -->" in script
    assert "<!-- test-command -->" in (ROOT / "README.md").read_text()
    page = (ROOT / "CONTRIBUTING.md").read_text()
    tools = re.findall(r"\| `\.venv/bin/(?:python -m )?([a-z-]+)", page)
    assert {"ruff", "mypy", "lint-imports", "pytest"} <= set(tools)
    for tool in set(tools) - {"python"}:
        assert re.search(rf"\b{tool}\b", script), f"{tool} is not run by .ci/run"


def test_the_general_example_runs_on_a_folder_of_its_names(
    tiny_model_folder: MakeTinyModel, tmp_path: Path
) -> None:
    jobs_folder(tmp_path)
    shutil.copytree(tiny_model_folder("const", prefer='7}"1'), tmp_path / "Qwen3-4B")
    done = run(installed_command(blocks("README.md", "sh")[2]), tmp_path)
    assert done.returncode == 0, done.stderr
    assert pq.read_table(tmp_path / "answers.parquet")["value"].to_pylist() == [{"n": 7}] * 2


def test_the_job_file_of_the_docs_is_good(tiny_model_folder: MakeTinyModel, tmp_path: Path) -> None:
    [job] = blocks("docs/jobs.md", "toml")
    for folder in ("tickets", "answers"):
        (tmp_path / folder).mkdir()
    rows = pa.table({"text": ["a", "b"], "customer": ["x", "y"]})
    pq.write_table(rows, tmp_path / "tickets" / "2026-11-29.parquet")
    (tmp_path / "prompt.jinja").write_text("{{ text }}{{ schema }}")
    (tmp_path / "schema.json").write_text(SCHEMA)
    (tmp_path / "nightly.toml").write_text(job)
    model = str(tiny_model_folder("const", prefer='7}"1'))
    command = ["run", "nightly.toml", "--date", "2026-11-30", "--model", model]
    done = run([*BATCHRADIX, *command], tmp_path)
    assert done.returncode == 0, done.stderr
    table = pq.read_table(tmp_path / "answers" / "2026-11-29.parquet")
    assert table["value"].to_pylist() == [{"n": 7}] * 2
    assert table["customer"].to_pylist() == ["x", "y"]


def test_the_commands_and_the_program_of_the_page_on_traces_run(
    tiny_model_folder: MakeTinyModel, tmp_path: Path
) -> None:
    jobs_folder(tmp_path)
    shutil.copytree(tiny_model_folder("const", prefer='7}"1'), tmp_path / "Qwen3-4B")
    [commands] = blocks("docs/report.md", "sh")
    for line in commands.splitlines():
        done = run(installed_command(line), tmp_path)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "answers.report.html").exists()
    [program] = blocks("docs/report.md", "python")
    done = run([sys.executable, "-c", program], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "model_tokens" in done.stdout


def test_the_commands_of_the_page_on_looking_run(
    tiny_model_folder: MakeTinyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(tiny_model_folder("const", prefer='7}"1'), tmp_path / "Qwen3-4B")
    (tmp_path / "schema.json").write_text(SCHEMA)
    rows = [{"id": f"r{n}", "review": f"the {n}th", "label": {"n": n % 8}} for n in range(24)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "reviews.parquet")
    for name in ("review", "other"):
        (tmp_path / f"{name}.jinja").write_text(f"{name}: {{{{ review }}}} {{{{ schema }}}}")
    [commands] = blocks("docs/looking.md", "sh")
    monkeypatch.chdir(tmp_path)
    said = []
    for line in commands.splitlines():  # in this process: eight would each load torch
        monkeypatch.setattr(sys, "argv", ["batchradix", *installed_command(line)[3:]])
        with pytest.raises(SystemExit) as stop:
            main()
        output, error = capfd.readouterr()
        assert stop.value.code == 0, error
        said.append(output)
    assert said[0].startswith("⟦<bos>⟧review: the 0th")
    assert "whole job  24 rows" in said[1]
    assert len(said[2].splitlines()) == 2 + 5
    assert "r7 " not in said[3]
    assert "20 of them from an earlier run" in said[4]
    assert said[5] == ""
    assert "24 equal, 0 different" in said[7]
    page = (ROOT / "docs" / "looking.md").read_text(encoding="utf-8")
    assert [name for name in Estimate.__slots__ if f"`{name}`" not in page] == ["price_per_hour"]


def test_the_command_of_the_page_on_runs_measures_and_keeps_what_auto_goes_by(
    tiny_model_folder: MakeTinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHRADIX_CACHE", str(tmp_path / "cache"))
    shutil.copytree(tiny_model_folder("random"), tmp_path / "Qwen3-4B")
    command = blocks("docs/runs.md", "sh")[0]
    done = run(installed_command(command), tmp_path)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    shown = blocks("docs/runs.md", "text")[0]
    labels = [
        [line[:10] for line in lines if line[9] != "-"] for lines in (said, shown.splitlines())
    ]
    assert labels[0] == labels[1]
    [table] = (tmp_path / "cache" / "attention").iterdir()
    assert said[-1].endswith(str(table))


def test_the_job_of_the_page_on_prompts_thinks_first(
    thinker_folder: MakeTinyModel, tmp_path: Path
) -> None:
    shutil.copytree(thinker_folder("switch"), tmp_path / "Qwen3-4B")
    [rows] = blocks("docs/prompts.md", "json")
    (tmp_path / "chats.jsonl").write_text(f"{rows}\n")
    [command] = blocks("docs/prompts.md", "sh")
    done = run(installed_command(command), tmp_path)
    assert done.returncode == 0, done.stderr
    table = pq.read_table(tmp_path / "answers.parquet")
    assert table["reasoning"].to_pylist() == ["um"] * 2
    assert set(table["value"].to_pylist()) <= {"2", "4", "6", "8"}


def test_the_check_of_the_page_on_gpus_runs_on_a_cpu_without_what_is_not_named(
    tmp_path: Path,
) -> None:
    """Polars and what else batchradix needs, a machine that is lent has not."""
    install, check, download, offline = blocks("docs/gpu.md", "sh")
    assert install.endswith("pip install -c constraints.txt '.[gpu]'")
    python, script = check.split()
    assert (python, script) == ("python", "benchmarks/gpu_check.py")
    put, again = offline.splitlines()
    assert put.endswith("--target site wheels/*.whl")
    assert again == f"PYTHONPATH=site python3 {script}"
    assert "-d wheels" in download
    absent = "polars", "jsonschema_rs", "datasets", "gguf", "typer", "rich"
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nfor name in {absent!r}:\n    sys.modules[name] = None\n"
    )
    options = ["--device", "cpu", "--parts", "kv_move,llama", "--out", str(tmp_path / "out.json")]
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *options],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok       kv_move 9 of 9 agree" in done.stdout
    assert "with tree" in done.stdout


def test_the_page_on_gpus_names_every_part_and_option_of_its_check() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    listing = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/gpu_check.py"), "--parts", "?"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert listing.returncode == 2
    parts = re.findall(r"[\w-]+", listing.stderr.rpartition("only ")[2])
    assert len(parts) > 15
    assert [part for part in parts if f"`{part}`" not in page] == []
    helped = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/gpu_check.py"), "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    flags = set(re.findall(r"^  (--[\w-]+)", helped.stdout, re.MULTILINE))
    assert flags > {"--out", "--budget"}
    assert [flag for flag in sorted(flags) if flag not in page] == []


def batch_page(folder: Path, model: str) -> str:
    """What the program of the page on batch files prints after its command, with ``model``."""
    [requests] = blocks("docs/openai_batch.md", "json")
    (folder / "batch.jsonl").write_text(f"{requests}\n", encoding="utf-8")
    [command] = blocks("docs/openai_batch.md", "sh")
    words = installed_command(command.replace("smollm2-135m", model))
    done = run(words, folder)
    assert done.returncode == 1, done.stderr  # one request cannot be answered
    [program] = blocks("docs/openai_batch.md", "python")
    done = run([sys.executable, "-c", program], folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_and_the_program_of_the_page_on_batch_files_run(
    tiny_model_folder: MakeTinyModel, tmp_path: Path
) -> None:
    printed = batch_page(tmp_path, str(tiny_model_folder("const", prefer='7"}')))
    [shown] = blocks("docs/openai_batch.md", "text")
    places = [[line.split()[:2] for line in text.splitlines()] for text in (printed, shown)]
    assert places[0] == places[1]


@pytest.mark.model
def test_the_page_on_batch_files_shows_what_its_program_prints(tmp_path: Path) -> None:
    [shown] = blocks("docs/openai_batch.md", "text")
    assert batch_page(tmp_path, "smollm2-135m") == f"{shown}\n"


def test_the_page_on_batch_files_names_every_parameter() -> None:
    page = (ROOT / "docs" / "openai_batch.md").read_text(encoding="utf-8")
    names = {*SETTINGS, *WITHOUT_EFFECT, *RowErrorCode} & set(page.split("`"))
    assert {*SETTINGS, *WITHOUT_EFFECT} <= names
    assert {"unsupported_parameter", "unsupported_endpoint", "unsupported_content"} <= names


def test_the_parts_of_the_page_on_runs_join_and_say_what_it_shows(
    tiny_model_folder: MakeTinyModel, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    model = str(tiny_model_folder("const", prefer='"1', context_length=4096))
    said = []
    for line in blocks("docs/runs.md", "sh")[1].splitlines():
        command = installed_command(line)
        done = run(command if "merge" in command else [*command, "--model", model], tmp_path)
        assert done.returncode == 0, done.stderr
        said.append(re.sub(r"\d[\d,.]*", "N", done.stdout.split("\n\n")[0].strip("\n")))
    shown = re.sub(r"\d[\d,.]*", "N", blocks("docs/runs.md", "text")[1])
    assert "\n".join([said[0], said[-1]]) == shown.strip("\n")
    rows = pq.read_table(tmp_path / "answers.parquet")["row"].to_pylist()
    assert rows == list(range(60))


def test_the_page_on_plans_shows_what_its_command_says(
    tiny_model_folder: MakeTinyModel, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    template = blocks("docs/planning.md", "jinja")[0]
    line, drawing = blocks("docs/planning.md", "sh")[:2]
    before, after, tree = blocks("docs/planning.md", "text")[:3]
    model = str(tiny_model_folder("random", context_length=4096))
    said = []
    rest = template.split("\n", 1)[1].replace("Notice:", "Notice of {{ id }}:")
    for text in (template, rest):
        (tmp_path / "licence.jinja").write_text(text + "\n")
        done = run([*installed_command(line), "--model", model], tmp_path)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    told, branches = zip(*(page.split("\n\n") for page in said), strict=True)
    names = [[row[:9] for row in page.splitlines()] for page in (*told, before, after)]
    assert names[0] == names[2]
    assert names[1][2:] == names[3]
    assert branches[1].splitlines()[0] == tree.splitlines()[0]
    done = run([*installed_command(drawing), "--model", model], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "What rows share" in (tmp_path / "plan.html").read_text()
    lint = before.splitlines()[-1]
    assert re.sub(r"[\d,]+ tokens", "N", told[0].splitlines()[-1]) == re.sub(
        r"[\d,]+ tokens", "N", lint
    )


def test_reordered_fields_save_what_the_page_on_plans_shows(
    tiny_model_folder: MakeTinyModel, tmp_path: Path
) -> None:
    films = ["Alien", "Amélie", "Babe", "Casablanca", "Fargo"]
    about = "directed with care, filmed at length, and shown to a great many people"
    rows = [
        {
            "film": films[n % 5],
            "about": f"{films[n % 5]} was {about}.",
            "review": f"Seen {n} times.",
        }
        for n in range(60)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "reviews.parquet")
    (tmp_path / "review.jinja").write_text(blocks("docs/planning.md", "jinja")[1] + "\n")
    model = str(tiny_model_folder("random", context_length=4096))
    done = run(
        [*installed_command(blocks("docs/planning.md", "sh")[2]), "--model", model], tmp_path
    )
    assert done.returncode == 0, done.stderr
    message, *shown = blocks("docs/planning.md", "text")[3].splitlines()
    said = done.stderr.splitlines()[-1]
    assert re.sub(r"[\d,]+", "N", said) == re.sub(r"[\d,]+", "N", message)
    assert [line[:9] for line in done.stdout.splitlines()][:5] == [line[:9] for line in shown]


def test_the_commands_of_the_page_on_models_run(
    tiny_model_folder: MakeTinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHRADIX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    shutil.copytree(tiny_model_folder("random"), tmp_path / "Qwen" / "Qwen3-4B-Instruct-2507")
    said = {}
    for line in "\n".join(blocks("docs/models.md", "sh")).splitlines():
        if line.startswith("batchradix models"):
            done = run(installed_command(line), tmp_path)
            assert done.returncode == 0, done.stderr
            said[line.split()[2]] = done.stdout
    assert set(said) == {"list", "check", "pull", "path"}
    assert said["pull"] == said["path"] == "Qwen/Qwen3-4B-Instruct-2507\n"
    assert "Qwen/Qwen3-4B-Instruct-2507" in said["list"]


def test_the_page_on_traces_names_every_column() -> None:
    page = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    assert [name for name in STEPS.names if f"`{name}`" not in page] == []


@pytest.mark.model
@pytest.mark.timeout(900)
def test_the_main_command_of_the_readme_ends_in_a_typed_table(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    done = run(installed_command(blocks("README.md", "sh")[0]), tmp_path)
    assert done.returncode in (0, 1), done.stderr
    table = pl.read_ipc(tmp_path / "answers.arrow")
    rows = pq.read_metadata(tmp_path / "recipes/debian_copyrights/jobs.parquet").num_rows
    assert len(table) == rows
    assert isinstance(table.schema["value"], pl.Struct)
    assert (table["status"] == "ok").mean() > 0.8


@pytest.mark.model
def test_the_program_of_the_readme_runs(tmp_path: Path) -> None:
    [program] = blocks("README.md", "python")
    done = run([sys.executable, "-c", program], jobs_folder(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
