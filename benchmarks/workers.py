"""Workers on Ray beside one process on the same cores: how long a whole job's rows take.

    python benchmarks/workers.py MODEL [--rows 400] [--rounds 3] [--cores 2]

Runs take turns, so that what else the machine does falls on all alike. Prints one JSON object: for
each way the seconds of every round (``run``: from the first ready worker to the last row) and the
tokens that were computed. Answers of all ways are compared, in float32.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import batchradix
from batchradix.config import EngineOptions, SamplingOptions

WORDS = ["red", "green", "stone", "river", "cloud", "seven", "lamp", "tea", "paper", "window"]


def prompts(num_rows: int) -> list[dict[str, str]]:
    """Questions about 16 texts of some 120 tokens, in mixed order."""
    draw = random.Random(1)
    texts = [" ".join(draw.choices(WORDS, k=100)) for _ in range(16)]
    rows = [
        {"prompt": f"Read the text. {texts[i % 16]}. Which word stands after {WORDS[i % 10]}? {i}:"}
        for i in range(num_rows)
    ]
    draw.shuffle(rows)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2)
    arguments = parser.parse_args()
    rows, cores = prompts(arguments.rows), arguments.cores
    ways: dict[str, dict[str, Any]] = {
        f"one process, {cores} threads": {"threads": cores},
        f"1 worker, {cores} threads": {"threads": cores, "workers": 1},
        f"{cores} workers, 1 thread each": {"threads": 1, "workers": cores},
    }
    figures: dict[str, Any] = {name: {"run": [], "load": []} for name in ways}
    texts: set[str] = set()
    for _ in range(arguments.rounds):
        for name, way in ways.items():
            with tempfile.TemporaryDirectory() as folder:
                result = batchradix.run(
                    rows,
                    output=Path(folder) / "answers.arrow",
                    model=arguments.model,
                    sampling=SamplingOptions(max_tokens=24),
                    engine=EngineOptions(
                        dtype="float32", device="cpu", num_threads=way["threads"], kv_tokens=16_000
                    ),
                    workers=way.get("workers"),
                )
                texts.add(json.dumps(result.to_arrow()["text"].to_pylist()))
            summary, found = result.summary, figures[name]
            found["run"].append(round(summary.run_s, 2))
            found["load"].append(round(summary.load_s, 2))
            found["computed_tokens"] = summary.usage.computed_tokens
            found["duplicated_tokens"] = summary.usage.duplicated_tokens
            found["forward_steps"] = summary.usage.forward_steps
    for found in figures.values():
        found["median_run"] = statistics.median(found["run"])
    print(json.dumps({"rows": len(rows), "equal": len(texts) == 1, "ways": figures}, indent=1))


if __name__ == "__main__":
    main()
