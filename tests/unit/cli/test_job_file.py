"""Job files: a command's options in TOML, files relative to it, dates in file names."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path

import polars as pl
import pytest

from batchradix.cli.job_file import fill_dates
from batchradix.errors import OptionError

MakeTinyModel = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path, tiny_model_folder: MakeTinyModel) -> Path:
    (tmp_path / "rows-2024-01-31.jsonl").write_text('{"t": "a"}\n{"t": "b"}\n')
    (tmp_path / "ask.txt").write_text("Say {{ t }}")
    (tmp_path / "model").symlink_to(tiny_model_folder("markov"))
    return tmp_path


def write(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text)
    return path


JOB = """
input = "rows-{date}.jsonl"
output = "out-{yesterday:%d}.jsonl"
model = "model"
template = "ask.txt"
max-tokens = 3
no_prefix_cache = true
stop = ["x", "y"]
"""


def test_a_job_file_gives_the_options_and_its_files_are_beside_it(
    folder: Path, batchradix: Run
) -> None:
    job = write(folder, JOB)
    code, _, error = batchradix("run", job, "--date", "2024-01-31")
    assert code == 0, error
    assert pl.read_ndjson(folder / "out-30.jsonl")["completion_tokens"].to_list() == [3, 3]
    code, shown, _ = batchradix("preview", job, "--date", "2024-01-31", "--row", "1")
    assert (code, shown) == (0, "⟦<bos>⟧Say b\n")


def test_a_store_is_beside_the_job_file(folder: Path, batchradix: Run) -> None:
    (folder / "rows.jsonl").write_text('{"t": "a"}\n{"t": "b"}\n')
    (folder / "ask.txt").write_text("Say the letter " * 4 + "{{ t }}")
    job = write(folder, JOB.replace("no_prefix_cache = true", "kv-store = 'warm'"))
    (folder / "rows.jsonl").rename(folder / "rows-2024-01-31.jsonl")
    code, _, error = batchradix("run", job, "--date", "2024-01-31")
    assert code == 0, error
    assert len(list((folder / "warm").iterdir())) == 1


def test_the_command_line_goes_before_the_job_file(folder: Path, batchradix: Run) -> None:
    job = write(folder, JOB)
    words = ["--date", "2024-01-31", "--max-tokens", "2", "-o", folder / "own.jsonl"]
    code, _, error = batchradix("run", *words, job)
    assert code == 0, error
    assert pl.read_ndjson(folder / "own.jsonl")["completion_tokens"].to_list() == [2, 2]


def test_a_table_is_a_schema(folder: Path, batchradix: Run) -> None:
    job = write(folder, JOB + '[schema]\ntype = "boolean"\n')
    code, _, error = batchradix("run", job, "--date", "2024-01-31", "--max-tokens", "9")
    assert code == 0, error
    values = pl.read_ndjson(folder / "out-30.jsonl")["value"]
    assert values.dtype == pl.Boolean


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("max_token = 3", "there is no option 'max_token'; did you mean 'max_tokens'?"),
        ("max_tokens = true", "max_tokens must be a text or a number, not True"),
        ("unnest = 1", "unnest must be true or false, not 1"),
        ("stop = [{}]", "stop must be a list of texts, not [{}]"),
        ("engine = {}\nx = ", "is not TOML"),
        ("[model]", "model must be a text or a number, not a table"),
        ("max_tokens = 'many'", "max-tokens"),
        ("questions = ''", "must be a file or a mapping"),
    ],
)
def test_a_wrong_job_file_is_refused_in_a_sentence(
    folder: Path, batchradix: Run, line: str, sentence: str
) -> None:
    code, _, error = batchradix("run", write(folder, f"input = 'rows.jsonl'\n{line}\n"))
    assert code == 2
    assert sentence in error


def test_a_job_file_must_exist_and_name_an_input(folder: Path, batchradix: Run) -> None:
    code, _, error = batchradix("run", folder / "none.toml")
    assert (code, error) == (2, f"error: there is no job file {folder / 'none.toml'}\n")
    code, _, error = batchradix("run", write(folder, "max_tokens = 3"))
    assert code == 2
    assert "it names no input" in error


def test_dates_are_those_of_today_or_of_the_day_that_is_given() -> None:
    assert fill_dates("a/{date:%Y/%m}/{date-1}.x", "2024-03-01") == "a/2024/03/2024-02-29.x"
    assert fill_dates("{yesterday+2}", "2024-03-01") == "2024-03-02"
    assert fill_dates("{dates} {other}", "2024-03-01") == "{dates} {other}"
    today = date.today()
    assert fill_dates("{date}", None) in (str(today), str(today - timedelta(days=1)))
    with pytest.raises(OptionError, match="must be a date such as"):
        fill_dates("{date}", "1.2.2024")


def test_tools_may_stand_in_the_job_file_as_tables(folder: Path, batchradix: Run) -> None:
    tools = 'tool-choice = "f"\ntool-format = "json"\n\n[[tools]]\nname = "f"\n'
    path = write(folder, f"{JOB.replace('max-tokens = 3', 'max-tokens = 40')}{tools}")
    code, _, error = batchradix("run", path, "--date", "2024-01-31")
    assert (code, error.count("error")) == (0, 0)
    [output] = folder.glob("out-*.jsonl")
    assert output.read_text().count('"value":[{"name":"f","arguments":{}}]') == 2
