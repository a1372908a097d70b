"""``batchradix report``: what it finds, writes, prints and refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

MakeTinyModel = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def traced(
    batchradix: Run,
    tiny_model_folder: MakeTinyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """The output of a traced run, in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("jobs.jsonl").write_text('{"prompt": "<b> a"}\n{"prompt": "<b> b"}\n')
    model = tiny_model_folder("markov")
    words = ("--max-tokens", 3, "--dtype", "float32", "--threads", 1, "--trace")
    code, _, error = batchradix("run", "jobs.jsonl", "-m", model, "-o", "out.arrow", *words)
    assert code == 0, error
    return Path("out.arrow")


def test_a_traced_run_is_drawn_as_a_page_and_printed_in_numbers(
    batchradix: Run, traced: Path
) -> None:
    code, output, _ = batchradix("report", traced)
    assert code == 0
    assert "predicted  7 of 12 prompt tokens to compute" in output
    assert output.endswith("page  out.report.html\n")
    html = Path("out.report.html").read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>")
    assert "&lt;b&gt; …" in html
    assert "<b>" not in html


def test_json_prints_one_object_and_writes_a_page_only_if_told(
    batchradix: Run, traced: Path
) -> None:
    code, output, _ = batchradix("report", traced, "--json")
    assert code == 0
    numbers = json.loads(output)
    assert (numbers["computed_tokens"], numbers["cached_tokens"]) == (7, 5)
    assert numbers["finished_rows"] == 2
    assert not list(Path().glob("*.html"))
    assert batchradix("report", traced, "--json", "-o", "page.html")[0] == 0
    assert Path("page.html").exists()


def test_a_run_is_named_by_its_output_its_work_folder_or_a_link(
    batchradix: Run, traced: Path
) -> None:
    Path("link.arrow").symlink_to(traced)
    work = Path("out.arrow.batchradix")
    for name in (work, work / "trace", "link.arrow", traced.absolute()):
        code, output, error = batchradix("report", name, "--json")
        assert code == 0, error
        assert json.loads(output)["steps"] > 0
    traced.unlink()  # as before the end of a run
    assert batchradix("report", traced, "--json")[0] == 0


def test_what_has_no_trace_is_refused_with_what_to_do(batchradix: Run, traced: Path) -> None:
    code, _, error = batchradix("report", "jobs.jsonl")
    assert code == 2
    assert error == "error: jobs.jsonl has no trace; run with --trace to have one\n"
    code, _, error = batchradix("report", "missing.arrow")
    assert code == 2
    assert "missing.arrow does not exist; give the output of a run with --trace" in error
    code, _, error = batchradix("report", traced, "-o", "no/such/page.html")
    assert code == 2
    assert "no/such/page.html cannot be written: No such file or directory" in error
    assert batchradix("run", "jobs.jsonl", "--trace", "--nonsense")[0] == 2


def test_an_empty_trace_says_why_it_is_empty(
    batchradix: Run,
    tiny_model_folder: MakeTinyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tiny_model_folder("markov")
    words = ("jobs.jsonl", "-m", model, "--max-tokens", 3, "-o", "out.arrow", "--trace")
    Path("jobs.jsonl").write_text('{"prompt": null}\n')  # an error row
    assert batchradix("run", *words)[0] == 3
    for run in ("out.arrow", "out.arrow.batchradix"):
        code, _, error = batchradix("report", run)
        assert code == 2
        assert error == f"error: the trace of {run} is empty: its run had no row to compute\n"

    def killed(*args: object, **named: object) -> None:
        raise KeyboardInterrupt

    Path("jobs.jsonl").write_text('{"prompt": "a"}\n')
    with monkeypatch.context() as patch:
        patch.setattr("batchradix.pipeline.job.plan_rows", killed)
        assert batchradix("run", *words, "--restart")[0] == 130
    code, _, error = batchradix("report", "out.arrow.batchradix")
    assert code == 2
    assert "its run has yet to plan its rows, or was ended before; run the same command" in error
    assert batchradix("run", *words)[0] == 0
    assert batchradix("report", "out.arrow")[0] == 0


def test_a_restart_throws_the_trace_away_too(
    batchradix: Run, traced: Path, tiny_model_folder: MakeTinyModel
) -> None:
    words = ("--max-tokens", 3, "--dtype", "float32", "--threads", 1, "--restart")
    model = tiny_model_folder("markov")
    assert batchradix("run", "jobs.jsonl", "-m", model, "-o", traced, *words)[0] == 0
    assert batchradix("report", traced)[0] == 2


def test_a_page_takes_the_place_of_no_table(batchradix: Run, traced: Path) -> None:
    before = traced.read_bytes()
    code, _, error = batchradix("report", traced, "-o", traced)
    assert code == 2
    assert "its name ends in .html, unlike out.arrow" in error
    assert traced.read_bytes() == before
