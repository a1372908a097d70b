"""Cache-aware routing beside taking turns, simulated: tokens to compute, and how even the load is.

    python benchmarks/routing.py

Requests about shared documents come one by one, popular documents more often (Zipf). A worker
computes 8,000 tokens a second and finds what it computed before in its cache, as far as that holds
it; both ways have the same caches. Writes `results/routing.json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).with_name("results") / "routing.json"
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from batchradix.fleet.routing import Router  # noqa: E402

TOKENS_A_SECOND = 8_000
NUM_REQUESTS = 4_000
QUESTION_TOKENS = 64
ANSWER_TOKENS = 48


def requests(num_documents: int, document_tokens: int, zipf: float) -> list[Any]:
    draw = np.random.default_rng(3)
    weights = 1 / np.arange(1, num_documents + 1) ** zipf
    chosen = draw.choice(num_documents, NUM_REQUESTS, p=weights / weights.sum())
    documents = draw.integers(0, 2**20, (num_documents, document_tokens), dtype=np.uint32)
    questions = draw.integers(0, 2**20, (NUM_REQUESTS, QUESTION_TOKENS), dtype=np.uint32)
    return [np.concatenate([documents[one], q]) for one, q in zip(chosen, questions, strict=True)]


def simulate(rows: list[Any], num_workers: int, load: float, cache: int, by_turns: bool) -> Any:
    """``load``: requests arrive so fast that workers without a cache would be so busy."""
    router = Router(num_workers, cache_tokens=cache)
    alone = [Router(1, cache_tokens=cache) for _ in range(num_workers)]
    mean = np.mean([len(row) for row in rows]) + ANSWER_TOKENS
    gap_s = mean / (TOKENS_A_SECOND * num_workers * load)
    free_at, computed = np.zeros(num_workers), np.zeros(num_workers)
    queued: list[list[tuple[float, int]]] = [[] for _ in range(num_workers)]
    waits = []
    for number, row in enumerate(rows):
        now = number * gap_s
        for worker, items in enumerate(queued):
            while items and items[0][0] <= now:
                router.done(worker, items.pop(0)[1])
        if by_turns:
            worker = number % num_workers
            _, new = alone[worker].route(row)
            alone[worker].done(0, new)
        else:
            worker, new = router.route(row)
        begins = max(now, free_at[worker])
        free_at[worker] = begins + (new + ANSWER_TOKENS) / TOKENS_A_SECOND
        computed[worker] += new
        queued[worker].append((free_at[worker], new))
        waits.append(begins + new / TOKENS_A_SECOND - now)
    return {
        "computed_tokens": int(computed.sum()),
        "busiest_over_mean": round(float(computed.max() / computed.mean()), 2),
        "mean_first_token_s": round(float(np.mean(waits)), 3),
        "p99_first_token_s": round(float(np.quantile(waits, 0.99)), 3),
    }


def main() -> None:
    found = []
    for num_workers in (2, 8):
        for zipf in (0.0, 1.1):
            rows = requests(64, 1024, zipf)
            way = {"workers": num_workers, "zipf": zipf, "cache_tokens": 16_384}
            for name, by_turns in (("routed", False), ("by_turns", True)):
                way[name] = simulate(rows, num_workers, 1.5, 16_384, by_turns)
            found.append(way)
            print(json.dumps(way))
    RESULT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
