"""Jobs whose input changes from night to night: exactly the changed rows are generated."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from instant_engine import InstantEngine

from batchradix import pipeline
from batchradix.config import EngineOptions, OutputOptions, RunConfig, SamplingOptions

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def markov(tiny_model_folder: Callable[..., Path]) -> str:
    return str(tiny_model_folder("markov"))


class Backwards(InstantEngine):
    """Answers with the prompt's bytes backwards and notes what it was asked.

    A token of the tiny models is a byte, after one for the beginning.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def text(self, row: int) -> str:
        prompt = bytes(self.job.tokens[row][1:].tolist()).decode()
        self.asked.append(prompt)
        return prompt[::-1]


def run(model: str, path: Path, rows: Rows) -> tuple[list[str], Any]:
    """The prompts that were generated, and the summary."""
    engine = Backwards()
    config = RunConfig(
        input=rows,
        model=model,
        sampling=SamplingOptions(max_tokens=4),
        engine=EngineOptions(dtype="float32", num_threads=1),
        output=OutputOptions(path=path, keep=("day",)),
    )
    return engine.asked, pipeline.run(config, engines=engine).summary


def row(number: int, text: str) -> dict[str, Any]:
    return {"id": f"r{number}", "prompt": text, "day": number % 5}


def change(rows: Rows, drawn: random.Random, first_new: int) -> Rows:
    """Some rows added (one of them a duplicate), some edited, some removed, all in new order."""
    kept = drawn.sample(rows, len(rows) - 7)
    for i in drawn.sample(range(len(kept)), 5):
        kept[i] = {**kept[i], "prompt": f"edited {first_new} {i}"}
    added = [row(first_new + i, f"added {first_new + i}") for i in range(6)]
    added.append(row(first_new + 6, kept[0]["prompt"]))
    changed = kept + added
    drawn.shuffle(changed)
    return changed


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ending", ["arrow", "parquet", "jsonl"])
def test_three_nights_generate_exactly_the_rows_that_changed(
    markov: str, tmp_path: Path, ending: str, seed: int
) -> None:
    drawn = random.Random(seed)
    path = tmp_path / f"answers.{ending}"
    read = {"arrow": pl.read_ipc, "parquet": pl.read_parquet, "jsonl": pl.read_ndjson}[ending]
    nights = [[row(i, f"text {i}") for i in range(40)]]
    for night in (1, 2):
        nights.append(change(nights[-1], drawn, 100 * night))
    answered: set[str] = set()
    for rows in nights:
        prompts = [row["prompt"] for row in rows]
        asked, summary = run(markov, path, rows)
        assert sorted(asked) == sorted(set(prompts) - answered)
        assert summary.resumed_rows == sum(prompt in answered for prompt in prompts)
        table = read(path)
        assert table["id"].to_list() == [row["id"] for row in rows]
        assert table["text"].to_list() == [prompt[::-1] for prompt in prompts]
        assert table["day"].to_list() == [row["day"] for row in rows]
        answered = set(prompts)
        before = path.read_bytes(), path.stat().st_mtime_ns
        assert run(markov, path, rows)[0] == []
        assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    asked, _ = run(markov, path, list(reversed(nights[-1])))
    assert asked == []
    assert read(path)["id"].to_list() == [row["id"] for row in reversed(nights[-1])]
