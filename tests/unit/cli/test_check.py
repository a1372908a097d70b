"""``batchradix check``: what a run would refuse and need, without weights and without a trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

MakeTinyModel = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def job(tmp_path: Path, tiny_model_folder: MakeTinyModel) -> list[object]:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"t": "aa"}\n{"t": "ab"}\n')
    model = tiny_model_folder("markov")
    return [rows, "--model", model, "--template", "Say {{ t }}", "-o", tmp_path / "out.arrow"]


def test_a_good_job_is_described_and_nothing_is_written(
    job: list[object], batchradix: Run, tmp_path: Path
) -> None:
    before = sorted(tmp_path.iterdir())
    code, output, error = batchradix("check", *job, "--json", "--max-tokens", "5")
    assert code == 0, error
    found = json.loads(output)
    assert (found["rows"], found["prompt_tokens"], found["distinct_tokens"]) == (2, 14, 8)
    assert found["kv_tokens"] >= 8 + 2 * 4
    assert sorted(tmp_path.iterdir()) == before
    code, output, _ = batchradix("run", *job, "--dry-run")
    assert code == 0
    assert "14 tokens, 8 distinct" in output
    assert sorted(tmp_path.iterdir()) == before


def test_rows_that_cannot_run_are_counted_with_the_first_of_each_kind(
    job: list[object], batchradix: Run, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"t": "aa"}\n{"t": null}\n{"t": null}\nno json\n')
    code, output, _ = batchradix("check", *job)
    assert code == 1
    assert "null_field  2 rows; the first: row 1 (line 2)" in output
    assert "bad_line  1 rows" in output


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--schema", '{"type": "nothing"}'], "schema"),
        (["--template", "{{ u }}"], "u"),
        (["-o", "nowhere/out.arrow"], "there is no folder"),
        (["--device", "cuda:99"], "cuda:99"),
        (["--keep", "v"], "v"),
    ],
)
def test_what_a_run_would_refuse_is_refused(
    job: list[object], batchradix: Run, words: list[str], sentence: str
) -> None:
    code, _, error = batchradix("check", *job, *words)
    assert code == 2
    assert sentence in error


def test_choices_that_part_at_too_many_places_are_refused_as_a_run_would(
    job: list[object], batchradix: Run
) -> None:
    schema = json.dumps({"enum": [f"{number:09b}" for number in range(512)]})
    for command in ("check", "run"):
        code, _, error = batchradix(command, *job, "--schema", schema, "--probabilities")
        assert code == 2
        assert "at most 256 are allowed" in error


def test_an_output_of_another_job_is_refused(job: list[object], batchradix: Run) -> None:
    assert batchradix("run", *job, "--max-tokens", "3")[0] == 0
    code, _, error = batchradix("check", *job, "--max-tokens", "4")
    assert code == 2
    assert "max_tokens: 3 → 4" in error
    assert batchradix("check", *job, "--max-tokens", "3")[0] == 0
    assert batchradix("check", *job, "--max-tokens", "4", "--restart")[0] == 0
