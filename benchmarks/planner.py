"""Measures the planner: tokens, order, shards, and the order of fields, beside plain ways to do it.

    python benchmarks/planner.py

Tables for the order of fields are those that the package vega_datasets carries (pip install
vega_datasets). Tokens are counted by the plan itself, with the demonstration model's tokenizer.
Prints a table and writes `results/planner.json`. Nothing is computed by a model.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from large_plan import measure_large
from tokenising import measure_tokenising

from batchradix import pipeline
from batchradix.config import PromptOptions, RunConfig
from batchradix.plan.columns import order_fields
from batchradix.plan.order import make_plan
from batchradix.plan.passages import computed_tokens, order_passages
from batchradix.plan.shards import split_plan
from batchradix.plan.tree import build_tree
from batchradix.report.progress import Silent
from batchradix.types import TokenTable

RESULT = Path(__file__).with_name("results") / "planner.json"
TABLES = ("airports", "cars", "barley")
ROUNDS = 3


def best_s(work: Callable[[], Any]) -> float:
    """The least of some rounds, in seconds."""
    times = []
    for _ in range(ROUNDS):
        started_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - started_s)
    return min(times)


def documents(num_rows: int, document_tokens: int) -> TokenTable:
    """Rows of an instruction, one of ``num_rows // 50`` documents and a question, in no order."""
    random = np.random.default_rng(0)
    instruction = random.integers(0, 49_152, 40)
    texts = random.integers(0, 49_152, (num_rows // 50, document_tokens))
    rows = [
        np.concatenate([instruction, texts[which], random.integers(0, 49_152, 12)])
        for which in random.integers(0, len(texts), num_rows)
    ]
    return TokenTable.from_rows([row.astype(np.uint32) for row in rows])


def plain_plan(rows: list[tuple[int, ...]]) -> list[int]:
    """What each row shares with the one before it, by Python's sort and a loop."""
    ordered = sorted(rows)
    shared = [0]
    for before, row in pairwise(ordered):
        length = 0
        for a, b in zip(before, row, strict=False):
            if a != b:
                break
            length += 1
        shared.append(length)
    return shared


def object_trie(rows: list[tuple[int, ...]]) -> int:
    """Nodes of a trie of dictionaries, one for each token that rows do not share."""
    root: dict[int, Any] = {}
    count = 0
    for row in rows:
        node = root
        for token in row:
            if token not in node:
                node[token] = {}
                count += 1
            node = node[token]
    return count


def measure_order(num_rows: int) -> dict[str, Any]:
    table = documents(num_rows, 548)
    rows = [tuple(table[row].tolist()) for row in range(num_rows)]
    plan = make_plan(table)
    assert plan.lcp.tolist() == plain_plan(rows)
    assert table.num_tokens - plan.lcp.sum(dtype=np.int64) == object_trie(rows)
    answers = np.full(num_rows, 64, dtype=np.int32)
    split = split_plan(plan, table.lengths, answers, 64)
    return {
        "rows": num_rows,
        "tokens": table.num_tokens,
        "plan_s": best_s(lambda: make_plan(table)),
        "tree_s": best_s(lambda: build_tree(plan, table.lengths)),
        "python_sort_s": best_s(lambda: plain_plan(rows)),
        "object_trie_s": best_s(lambda: object_trie(rows)),
        "split_in_64_s": best_s(lambda: split_plan(plan, table.lengths, answers, 64)),
        "most_over_mean_cost": float(split.costs.max() / split.costs.mean()),
        "duplicated_share": float(
            split.duplicated_tokens.sum() / build_tree(plan, table.lengths).distinct_tokens
        ),
    }


def measure_table(name: str, model: str) -> dict[str, Any]:
    """Tokens to compute for a table's rows, all columns listed: as written, in the one order that
    has the fewest values first, and reordered."""
    import pyarrow as pa
    from vega_datasets import local_data

    frame = getattr(local_data, name)()
    table = pa.table({c: [str(v) for v in frame[c].tolist()] for c in frame.columns})
    names = table.column_names
    few = sorted(names, key=lambda one: len(set(table[one].to_pylist())))

    def distinct(columns: list[str], reorder: bool = False) -> tuple[int, int]:
        listed = "\n".join(f"{one}: {{{{ {one} }}}}" for one in columns)
        template = f"One record of a table.\n{listed}\nIs this record plausible? Answer:"
        prompt = PromptOptions(template=template, reorder_columns=reorder)
        config = RunConfig(input=table, model=model, prompt=prompt)
        summary = pipeline.plan(config, progress=Silent())
        return summary.prompt_tokens, summary.distinct_tokens

    prompt_tokens, as_written = distinct(names)
    return {
        "table": name,
        "rows": len(table),
        "columns": len(names),
        "prompt_tokens": prompt_tokens,
        "as_written": as_written,
        "fewest_values_first": distinct(few)[1],
        "reordered": distinct(names, reorder=True)[1],
    }


def measure_reordering(num_rows: int) -> dict[str, Any]:
    """Seconds for a table like film reviews: a film with what follows from it, and the review."""
    random = np.random.default_rng(0)
    film = random.integers(0, num_rows // 15, num_rows)
    critic = random.integers(0, num_rows // 50, num_rows)
    each = np.arange(num_rows)
    columns = [each, critic, random.integers(0, 12, num_rows), film, film % 997, film % 21, film]
    codes = np.stack([np.unique(c, return_inverse=True)[1] for c in columns], axis=1)
    sizes = [60, 6, 4, 8, 5, 5, 120]
    tokens = np.stack(
        [1 + np.arange(codes[:, k].max() + 1)[codes[:, k]] % (2 * sizes[k]) for k in range(7)],
        axis=1,
    ).astype(np.int32)
    return {
        "rows": num_rows,
        "columns": codes.shape[1],
        "seconds": best_s(lambda: order_fields(codes, tokens)),
    }


def measure_passages(num_rows: int) -> dict[str, Any]:
    """Tokens to compute of five passages a row, of 5,000 that some searches find more often."""
    random = np.random.default_rng(0)
    weights = np.arange(1, 5_001) ** -0.8
    weights /= weights.sum()
    rows = [random.choice(5_000, 5, replace=False, p=weights) for _ in range(num_rows)]
    codes = np.concatenate(rows)
    offsets = 5 * np.arange(num_rows + 1)
    tokens = random.integers(50, 300, 5_000).astype(np.int32)[codes]
    as_given = np.tile(np.arange(5, dtype=np.int32), num_rows)
    counts = np.bincount(codes)[codes].reshape(-1, 5)
    by_count = np.argsort(-counts, axis=1, kind="stable").astype(np.int32).ravel()
    computed = partial(computed_tokens, codes, offsets, tokens)
    return {
        "rows": num_rows,
        "seconds": best_s(lambda: order_passages(codes, offsets, tokens)),
        "tokens": int(tokens.sum()),
        "as_given": computed(as_given),
        "most_frequent_first": computed(by_count),
        "sorted": computed(order_passages(codes, offsets, tokens)),
    }


def report(result: dict[str, Any]) -> None:
    """Prints the figures, seconds by the clock and (of all threads) of the processors."""
    print("tokenising                            prompts whole         repeats once      as fast")
    for job in result["tokenising"]:
        print(
            f"  {job['job']:<32}{job['whole_s']:7.2f} s {job['whole_cpu_s']:7.2f} s"
            f"{job['seconds']:7.2f} s {job['cpu_s']:7.2f} s {job['times_as_fast']:5.1f}, "
            f"{job['times_less_cpu']:.1f} by CPU"
        )
    order = result["order"]
    print(
        f"order of {order['rows']:,} rows of 600 tokens: {order['plan_s']:.2f} s; Python's sort "
        f"{order['python_sort_s']:.1f} s; a trie of objects {order['object_trie_s']:.1f} s"
    )
    for large in result["large"]:
        print(
            f"order of {large['rows']:,} ({large['shape']}), {large['plan_memory_bytes'] >> 20:,} "
            f"MiB to plan: {large['seconds']:.1f} s, {large['cpu_s']:.1f} s of CPU, "
            f"{large['peak_rss_bytes'] / large['token_bytes']:.2f} of the tokens' bytes resident"
        )
    print(f"order of fields, 30,000 rows: {result['reordering']['seconds']:.1f} s")
    print(f"order of passages, 100,000 rows: {result['passages']['seconds']:.1f} s")
    for table in result["tables"]:
        print("  {table}: {as_written} tokens, reordered {reordered}".format(**table))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--many-rows", type=int, default=1_000_000)
    parser.add_argument("--prompts", type=int, default=4_000)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    result = {
        "measured": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "tokenising": measure_tokenising(options.model, options.prompts),
        "order": measure_order(options.rows),
        "large": measure_large(options.many_rows),
        "reordering": measure_reordering(30_000),
        "passages": measure_passages(100_000),
        "tables": [measure_table(name, options.model) for name in TABLES],
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    report(result)


if __name__ == "__main__":
    main()
