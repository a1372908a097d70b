"""The recipe's files fit each other, its script reads odd folders, its README's commands run."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import polars as pl
import pytest

from batchradix.schema.load import load_schema

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "recipes" / "debian_copyrights"
DEP5 = """Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: ärger
Source: https://example.org/copyright
Comment:
 Copyright of what was here before: nobody.
 .
 All of it is gone.

Files: *
 extra/*
Copyright: 2001-2003 Ann Other <ann@example.org>
\t2004 Bob
 2005 Carol
License: GPL-2+

Files: debian/*
Copyright: 2010 Dora
License: MIT
"""
FREE_TEXT = """This package was debianized by Eve. Copyright files are read by few.

Copyright:

Copyright (C) 1993 The Group

Permission to use this software is hereby granted.

Nothing follows.
"""


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        f"debian_copyrights_{name}", RECIPE / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def make_jobs() -> ModuleType:
    return load("make_jobs")


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """A folder as /usr/share/doc: two packages, links to one of them, and what is no package."""
    docs = tmp_path / "doc"
    for name, content in {
        "dep5": DEP5.encode(),
        "xfree": FREE_TEXT.encode(),
        "latin1": "Copyright 1999 J\xf6rg, licence: \x07MIT".encode("latin-1"),
        "empty": b" \n",
    }.items():
        (docs / name).mkdir(parents=True)
        (docs / name / "copyright").write_bytes(content)
    (docs / "nothing").mkdir()
    (docs / "README").write_text("not a folder")
    (docs / "a-linked-folder").symlink_to("dep5")
    (docs / "a-linked-file").mkdir()
    (docs / "a-linked-file" / "copyright").symlink_to("../dep5/copyright")
    (docs / "dangling").symlink_to("gone")
    return docs


def test_a_docs_folder_gives_one_row_a_file_under_its_own_name(
    make_jobs: ModuleType, docs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "jobs.parquet"
    make_jobs.main(["--docs", str(docs), "--out", str(out)])
    rows = dict(pl.read_parquet(out).rows())
    assert list(rows) == ["dep5", "latin1", "xfree"]
    assert rows["dep5"] == "Copyright: 2001-2003 Ann Other\n2004 Bob\nLicense: GPL-2+"
    assert rows["latin1"] == "Copyright 1999 J\ufffdrg, licence: MIT"
    assert rows["xfree"] == (
        "Copyright (C) 1993 The Group\nPermission to use this software is hereby granted."
    )


def test_limit_and_only_choose_rows_and_a_package_that_is_not_there_is_named(
    make_jobs: ModuleType, docs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "jobs.parquet"
    make_jobs.main(["--docs", str(docs), "--out", str(out), "--limit", "1"])
    assert pl.read_parquet(out)["id"].to_list() == ["dep5"]
    make_jobs.main(["--docs", str(docs), "--out", str(out), "--only", "xfree,latin1"])
    assert pl.read_parquet(out)["id"].to_list() == ["latin1", "xfree"]
    with pytest.raises(SystemExit) as stopped:
        make_jobs.main(["--docs", str(docs), "--out", str(out), "--only", "xfree,nope"])
    assert stopped.value.code == 2
    assert "no copyright file of nope" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["nothing", "gone"])
def test_a_folder_without_packages_is_refused_and_nothing_written(
    make_jobs: ModuleType, docs: Path, tmp_path: Path, name: str
) -> None:
    out = tmp_path / "jobs.parquet"
    with pytest.raises(SystemExit):
        make_jobs.main(["--docs", str(docs / name), "--out", str(out)])
    assert not out.exists()


def test_a_long_notice_is_cut_at_a_line_and_a_long_line_inside(make_jobs: ModuleType) -> None:
    assert make_jobs.cut("one\ntwo\nthree", 8) == "one\ntwo"
    assert make_jobs.cut("one\ntwo\nthree", 7) == "one\ntwo"
    assert make_jobs.cut("one\ntwo\nthree", 6) == "one"
    assert make_jobs.cut("onetwothree", 6) == "onetwo"
    assert make_jobs.cut("one\ntwo", 7) == "one\ntwo"


def test_the_sample_is_small_and_was_read_by_hand_row_for_row() -> None:
    jobs = pl.read_parquet(RECIPE / "jobs.parquet")
    by_hand = pl.read_csv(RECIPE / "by_hand.csv")
    assert jobs.schema == {"id": pl.String, "text": pl.String}
    assert by_hand["id"].to_list() == jobs["id"].to_list()
    assert 50 <= len(jobs) == jobs["id"].n_unique()
    assert jobs["text"].str.len_chars().is_between(20, 300).all()
    assert not jobs["text"].str.contains("@").any()
    assert (RECIPE / "jobs.parquet").stat().st_size < 150_000


def test_the_examples_of_the_prompt_keep_to_the_schema_and_are_not_in_the_sample() -> None:
    schema = load_schema(str(RECIPE / "schema.json"))
    prompt = (RECIPE / "prompt.jinja").read_text(encoding="utf-8")
    answers = re.findall(r"^Answer: (.*)$", prompt, re.MULTILINE)
    assert len(answers) == 9
    for answer in answers:
        value = schema.parse(answer)
        assert list(value) == ["holder", "year", "licence"]
        assert answer == json.dumps(value, separators=(",", ":"))  # as the engine writes it
    for notice in re.findall(r"Notice:\n(.*?)\nAnswer:", prompt, re.DOTALL):
        assert notice == "{{ text }}" or not (
            pl.read_parquet(RECIPE / "jobs.parquet")["text"]
            .str.contains(notice, literal=True)
            .any()
        )


def test_comparing_counts_choices_containment_and_nulls() -> None:
    values = [
        {"holder": "The ACME Inc.", "year": 1999, "licence": "LGPL"},
        {"holder": "Other", "year": None, "licence": "MIT"},
        None,
    ]
    answers = pl.DataFrame(
        {"id": ["a", "b", "c"], "status": ["ok", "ok", "error"], "value": values}
    )
    by_hand = pl.DataFrame(
        {
            "id": ["a", "b", "c"],
            "licence": ["GPL|LGPL", "GPL", "GPL"],
            "year": [1998, None, 2000],
            "holder": ["acme", None, "x"],
        }
    )
    table = load("show").compare(answers, by_hand)
    assert table["holder_right"].to_list() == [True, False, False]
    assert table["year_right"].to_list() == [False, True, False]
    assert table["licence_right"].fill_null(False).to_list() == [True, False, False]


# -- the README ---------------------------------------------------------------------------------


def readme_commands() -> list[tuple[str, str]]:
    """(kind, command) of each block that a ``<!-- test: KIND -->`` line precedes."""
    text = (RECIPE / "README.md").read_text(encoding="utf-8")
    return re.findall(r"<!-- test: (\w+) -->\n```sh\n(.*?)\n```", text, re.DOTALL)


def test_every_shell_block_of_the_readme_is_marked_for_a_test() -> None:
    text = (RECIPE / "README.md").read_text(encoding="utf-8")
    assert len(readme_commands()) == text.count("```sh") == 4
    assert {kind for kind, _ in readme_commands()} == {"model", "debian"}
    assert all("\n" not in command for _, command in readme_commands())


def run_all(kind: str, folder: Path) -> str:
    """Runs the README's commands of one kind in order, in a copy; their standard output."""
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    programs = folder / "bin"
    programs.mkdir()
    for name, arguments in {"python": "", "batchradix": "-m batchradix"}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (programs / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
    }
    output = ""
    for command in [command for marked, command in readme_commands() if marked == kind]:
        done = subprocess.run(
            ["sh", "-c", command], cwd=folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        output += done.stdout
    return output


@pytest.mark.skipif(
    not any(Path("/usr/share/doc").glob("*/copyright")), reason="not a Debian machine"
)
def test_the_readme_makes_rows_of_this_machine(tmp_path: Path) -> None:
    run_all("debian", tmp_path)
    assert 0 < len(pl.read_parquet(tmp_path / "my_jobs.parquet")) <= 200


@pytest.mark.model
def test_the_readme_answers_every_row_and_most_of_them_rightly(tmp_path: Path) -> None:
    output = run_all("model", tmp_path)
    assert "60 rows: 60 ok" in output
    answers = pl.read_ipc(tmp_path / "answers.arrow")
    assert answers["id"].to_list() == pl.read_parquet(RECIPE / "jobs.parquet")["id"].to_list()
    assert answers["status"].to_list() == ["ok"] * len(answers)
    right = dict(re.findall(r"^(\w+): (\d+) of 60 as read by hand$", output, re.MULTILINE))
    assert list(right) == ["holder", "year", "licence"]
    # Close calls fall differently in bfloat16; far fewer would mean a broken prompt or engine.
    assert min(map(int, right.values())) >= 30
