"""``--shard``, ``merge`` and ``plan --shards`` as a user types them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

Run = Callable[..., tuple[int, str, str]]
MakeTinyModel = Callable[..., Path]


@pytest.fixture
def job(tiny_model_folder: MakeTinyModel, tmp_path: Path) -> list[object]:
    prompts = [f"document {n % 3} asks {n}" for n in range(12)]
    pq.write_table(pa.table({"prompt": [*prompts, None]}), tmp_path / "jobs.parquet")
    model = str(tiny_model_folder("markov"))
    return [tmp_path / "jobs.parquet", "--model", model]


def test_parts_run_and_join_and_exit_as_one_run_does(
    batchradix: Run, job: list[object], tmp_path: Path
) -> None:
    options = [*job, "--max-tokens", "3", "--keep", "all", "--quiet"]
    whole, joined = tmp_path / "whole.jsonl", tmp_path / "joined.jsonl"
    errors = tmp_path / "errors.jsonl"
    assert batchradix("run", *options, "-o", whole)[0] == 1
    codes = [
        batchradix("run", *options, "-o", joined, "--errors", errors, "--shard", f"{n}/2")[0]
        for n in (1, 2)
    ]
    assert codes == [1, 0]
    assert (tmp_path / "errors.1-of-2.jsonl").exists()
    assert not (tmp_path / "errors.2-of-2.jsonl").exists()
    code, said, _ = batchradix("merge", joined)
    assert (code, said) == (1, f"13 rows of 2 parts: 12 ok, 1 error; {joined}\n")
    assert joined.read_bytes() == whole.read_bytes()
    code, said, _ = batchradix("merge", joined, "--json", "--allow-failures", "10%")
    assert code == 0
    assert json.loads(said) == {
        "rows": 13,
        "ok": 12,
        "truncated": 0,
        "errors": 1,
        "parts": 2,
        "output": str(joined),
    }


def test_plan_shows_what_each_worker_would_do(batchradix: Run, job: list[object]) -> None:
    code, said, _ = batchradix("plan", *job, "--shards", 3)
    assert code == 0
    told, *_ = said.split("\n\n")  # the tree is drawn behind the blank line
    assert [line.split()[0] for line in told.splitlines()[-3:]] == ["1/3", "2/3", "3/3"]
    plan = json.loads(batchradix("plan", *job, "--shards", 3, "--json")[1])
    shards = plan["shards"]
    assert sum(shard["rows"] for shard in shards) == plan["rows"] == 13
    assert sum(shard["prompt_tokens"] for shard in shards) == plan["prompt_tokens"]
    distinct = sum(shard["distinct_tokens"] for shard in shards)
    assert distinct - plan["distinct_tokens"] == sum(s["duplicated_tokens"] for s in shards)
    assert sum(shard["cost_share"] for shard in shards) == pytest.approx(1)


@pytest.mark.parametrize("shard", ["3/2", "two"])
def test_a_shard_that_is_none_is_refused(
    batchradix: Run, job: list[object], tmp_path: Path, shard: str
) -> None:
    code, _, said = batchradix("run", *job, "-o", tmp_path / "out.csv", "--shard", shard)
    assert code == 2
    assert "--shard must be a part and how many there are" in said


def test_an_output_of_unknown_format_is_refused_before_its_parts_run(
    batchradix: Run, job: list[object], tmp_path: Path
) -> None:
    code, _, said = batchradix("run", *job, "-o", tmp_path / "out.txt", "--shard", "1/2")
    assert code == 2
    assert "known are .arrow" in said


def test_merge_without_parts_says_how_to_make_them(batchradix: Run, tmp_path: Path) -> None:
    code, _, said = batchradix("merge", tmp_path / "out.parquet")
    assert code == 2
    assert "out.parquet.1-of-4.arrow" in said
