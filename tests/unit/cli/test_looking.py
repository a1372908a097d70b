"""The commands that look: show, diff, preview, and what a run says of a sample."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

MakeTinyModel = Callable[..., Path]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def markov(tiny_model_folder: MakeTinyModel) -> str:
    return str(tiny_model_folder("markov"))


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.jsonl"
    rows = [{"id": f"r{n}", "prompt": "ab"[n % 2], "right": "bc"} for n in range(8)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_sample_its_scores_and_its_rows_are_shown(
    batchradix: Run, markov: str, jobs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.parquet"
    command = ["run", jobs, "-m", markov, "--max-tokens", 2, "-o", out, "--sample", 4]
    code, output, error = batchradix(*command, "--gold", "right", "--price-per-hour", 3)
    assert code == 0, error
    assert "a sample of 4 of 8 rows (seed 0)" in error
    names = [line[:9].strip() for line in output.splitlines()]
    assert {"gold", "whole job", "its time"} <= set(names)
    assert "at 3 an hour" in output
    rows = pq.read_table(out).to_pylist()
    right = sum(row["text"] == "bc" for row in rows)
    assert f"{right} of 4 answers right" in output
    code, output, _ = batchradix("show", out, "--wrong", "--json")
    assert code == 0
    wrong = [json.loads(line) for line in output.splitlines()]
    assert [row["id"] for row in wrong] == [row["id"] for row in rows if row["text"] != "bc"]
    assert all(row["right"] == "bc" for row in wrong)
    code, output, error = batchradix(*command, "--sample-seed", 5, "--json")
    summary = json.loads(output)
    assert summary["rows"] == 4
    assert summary["estimate"]["rows"] == 8
    assert summary["gold"] is None


def test_show_takes_rows_and_columns_and_says_when_there_are_none(
    batchradix: Run, markov: str, jobs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    batchradix("run", jobs, "-m", markov, "--max-tokens", 2, "-o", out)
    code, output, _ = batchradix("show", out, "--limit", 3, "--columns", "id,text,right")
    lines = output.splitlines()
    assert [line.split() for line in lines[:1] + lines[2:]] == [
        ["id", "text", "right"], ["r0", "bc", "bc"], ["r1", "cd", "bc"], ["r2", "bc", "bc"],
    ]  # fmt: skip
    assert batchradix("show", out, "--status", "error")[1] == "no such rows\n"
    assert len(batchradix("show", out, "-n", 0, "--json")[1].splitlines()) == 8
    assert json.loads(batchradix("show", out, "--id", "r5", "--json", "--columns", "text")[1]) == {
        "text": "cd"
    }
    refused = (
        ["--status", "lost"],
        ["-n", -1],
        ["--wrong"],
        ["--gold", "right"],
        ["--input", "no.jsonl"],
        ["--columns", "id,nope"],
        ["--columns", "id,nope.deep", "--json"],
    )
    for words in refused:
        code, _, error = batchradix("show", out, *words)
        assert (code, error.startswith("error: ")) == (2, True)
    assert batchradix("show", tmp_path / "none.arrow")[0] == 2


def test_the_exit_code_of_diff_says_equal_different_or_unreadable(
    batchradix: Run, markov: str, jobs: Path, tmp_path: Path
) -> None:
    a, b, c = (tmp_path / name for name in ("a.arrow", "b.csv", "c.jsonl"))
    for path, tokens in ((a, 2), (b, 2), (c, 3)):
        batchradix("run", jobs, "-m", markov, "--max-tokens", tokens, "-o", path)
    code, output, _ = batchradix("diff", a, b)
    assert code == 0
    assert "8 equal, 0 different, 0 only in A, 0 only in B" in output
    code, output, _ = batchradix("diff", a, c, "--limit", 1)
    assert code == 1
    assert [line.split() for line in output.splitlines() if "text" in line] == [
        ["text", "0", "8"], ["r0", "text", "bc", "bcd"],
    ]  # fmt: skip
    assert batchradix("diff", a, c, "--columns", "status,finish_reason")[0] == 0
    ignored = batchradix("diff", a, c, "--ignore", "text", "--tolerance", "1", "--json")
    assert ignored[0] == 0
    assert json.loads(ignored[1])["is_equal"] is True
    for words in ([tmp_path / "none.csv"], [jobs.parent], [c, "--tolerance", "x"], [c, "-n", -1]):
        code, _, error = batchradix("diff", a, *words)
        assert (code, error.startswith("error: ")) == (2, True)


KINDS: list[tuple[list[str], dict[str, Any], list[str]]] = [
    ([], {"prompt": "raw {0}"}, ["⟦<bos>⟧raw 0"]),
    (["--template", "Say {{ x }}."], {"x": "it {0}"}, ["⟦<bos>⟧Say it 0."]),
    (
        ["--template", "Say {{ x }}.", "--chat", "--system", "Be brief."],
        {"x": "it {0}"},
        ["⟦<|system|>⟧Be brief.", "⟦<|user|>⟧Say it 0."],
    ),
    (
        ["--instruction", "Sort it.", "--column", "x"],
        {"x": "it {0}"},
        ["⟦<|user|>⟧Sort it.", "it 0⟦<|end|>⟧⟦<|assistant|>⟧"],
    ),
    (
        [],
        {"messages": [{"role": "user", "content": "hi {0}"}]},
        ["⟦<|user|>⟧hi 0⟦<|end|>⟧⟦<|assistant|>⟧"],
    ),
    (
        ["--template", "a: {{ a }}\nb: {{ b }}\n", "--reorder-columns"],
        {"a": "own {0}", "b": "of every row the same text"},
        ["⟦<bos>⟧b: of every row the same text\na: own 0"],
    ),
    (
        [],
        {
            "custom_id": "r{0}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "m", "messages": [{"role": "user", "content": "hi {0}"}]},
        },
        ["⟦<|user|>⟧hi 0⟦<|end|>⟧⟦<|assistant|>⟧"],
    ),
]


@pytest.mark.parametrize(
    ("options", "row", "parts"), KINDS,
    ids=["raw", "template", "chat", "instruction", "messages", "reordered", "request"],
)  # fmt: skip
def test_prompts_of_every_kind_are_laid_open(
    batchradix: Run, markov: str, tmp_path: Path, options: list[str], row: Any, parts: list[str]
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(json.dumps(row).replace("{0}", str(n)) for n in range(3)))
    code, output, error = batchradix("preview", path, "-m", markov, *options)
    assert code == 0, error
    for part in parts:
        assert part in output
    shown = json.loads(batchradix("preview", path, "-m", markov, "--json", *options)[1])
    ids = [token for span in shown["spans"] for token in span["ids"]]
    assert f"{len(ids)} tokens, row 0" in error
    assert shown["prompt_tokens"] == len(ids)
    assert shown["marked"] == output.removesuffix("\n")
    beside = shown["neighbour"]
    assert (beside["row"], beside["compared_rows"]) == (1, 3)
    assert shown["text"].startswith(beside["shared_text"])
    assert 0 < beside["shared_tokens"] < len(ids)
    assert f"{beside['shared_tokens']} of them begin the prompt of row 1" in error


def test_a_preview_says_what_answers_are_forced_to_begin_with(
    batchradix: Run, markov: str, jobs: Path, tmp_path: Path
) -> None:
    code, output, error = batchradix(
        "preview", jobs, "-m", markov, "--fields", "kind: cat | cow", "--id", "r2"
    )
    assert code == 0, error
    assert output == "⟦<bos>⟧a\n"
    assert 'answers begin with 10 tokens: {"kind":"c' in error
    assert "all of them begin the prompt of row 0 (id r0) too" in error
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    (tmp_path / "tools.json").write_text(json.dumps(tools))
    options = ["--tools", tmp_path / "tools.json", "--tool-choice", "look", "--tool-format", "json"]
    code, output, error = batchradix("preview", jobs, "-m", markov, "--json", *options)
    assert code == 0, error
    opening = json.loads(output)["opening"]
    assert "look" in opening["text"]
    assert len(opening["ids"]) == len(opening["text"])


def test_an_id_that_looks_like_a_number_is_told_from_a_row(
    batchradix: Run, markov: str, tmp_path: Path
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": "2", "prompt": "a"}\n{"id": "x", "prompt": "b"}\n')
    assert batchradix("preview", path, "-m", markov, "--row", "1")[1] == "⟦<bos>⟧b\n"
    assert batchradix("preview", path, "-m", markov, "--id", "2")[1] == "⟦<bos>⟧a\n"
    assert batchradix("preview", path, "-m", markov, "--id", "1")[0] == 2
    assert batchradix("preview", path, "-m", markov, "--id", "2", "--row", "1")[0] == 2


def test_jobs_with_questions_are_looked_at_as_others_are(
    batchradix: Run, markov: str, tmp_path: Path
) -> None:
    jobs, out = tmp_path / "jobs.jsonl", tmp_path / "out.jsonl"
    right = {"next": "cd", "pick": "yes"}
    rows = [{"id": f"r{n}", "prompt": f"text {n}", "right": right} for n in range(6)]
    jobs.write_text("\n".join(map(json.dumps, rows)))
    questions = tmp_path / "questions.toml"
    questions.write_text('next = "After b"\n[pick]\nquestion = "Say"\nchoices = ["yes", "no"]\n')
    options = [jobs, "-m", markov, "--questions", questions, "--max-tokens", 2]
    code, output, error = batchradix("preview", *options, "--row", "r1", "--ids")
    assert code == 0, error
    assert output.count("⟦<bos>⟧text 1") == 2
    assert "row 1, id r1, question next\n" in error
    assert "row 1, id r1, question pick\n" in error
    code, output, _ = batchradix("preview", *options, "--json")
    shown = [json.loads(line) for line in output.splitlines()]
    assert [one["question"] for one in shown] == ["next", "pick"]
    code, output, error = batchradix("run", *options, "-o", out, "--sample", 3, "--gold", "right")
    assert code == 0, error
    assert "a sample of 3 of 6 rows (seed 0)" in error
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    num_right = sum(row["value"] == right for row in answers)
    assert f"{num_right} of 3 answers right" in output
    assert json.loads(out.with_name("out.jsonl.gold.json").read_text())["fields"]["next"] == {
        "compared": 3, "correct": 3, "accuracy": 1.0,
    }  # fmt: skip
    code, output, _ = batchradix("show", out, "--columns", "id,next,value.pick,prompt")
    assert [line.split()[0] for line in output.splitlines()[2:]] == [row["id"] for row in answers]
    assert batchradix("diff", out, out)[0] == 0
