"""Measures attention alone: torch operations against the C kernels on each instruction set.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/attention.py --threads 2 --repeat 15

Two steps in the shapes of SmolLM2-135M (30 layers, 9 query heads and 3 key heads of 64), on random
numbers: ``decode``, 64 rows below 300 shared tokens, eight documents of 400 and tails of 50;
``prefill``, a chunk of 512 tokens behind 700. All ways run in turns. Times are those of all
layers of a step: on the clock, and of the processor over all threads, which a busy machine changes
less; the medians, and the least. Writes `results/attention.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).with_name("results") / "attention.json"
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch  # noqa: E402
from measure import load_average, machine  # noqa: E402

from batchradix.engine.attention.base import AttentionBackend, AttentionShape  # noqa: E402
from batchradix.engine.attention.bench import BenchStep, typical_steps  # noqa: E402
from batchradix.engine.attention.cpu_backend import CpuAttention  # noqa: E402
from batchradix.engine.attention.torch_backend import TorchAttention  # noqa: E402
from batchradix.engine.step import Step  # noqa: E402
from batchradix_kernels.native import Level, level, limit_level  # noqa: E402

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 30, 9, 3, 64
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


STEPS = dict(zip(("decode", "prefill"), typical_steps(), strict=False))


def flops(step: Step) -> float:
    """Of the two products of a whole step, all layers."""
    pairs = sum(n * (end - start) for _, n, start, end in step.context.tolist())
    pairs += sum(n * (n + 1) / 2 for _, n, _, _ in step.causal.tolist())
    return 4.0 * pairs * NUM_HEADS * HEAD_DIM * NUM_LAYERS


def prepare(
    backend: AttentionBackend, workload: BenchStep, dtype: torch.dtype
) -> Callable[[], Any]:
    """A function that plans the step and runs all its layers."""
    pool = backend.allocate(workload.num_slots)
    storage = pool if isinstance(pool, torch.Tensor) else pool.storage
    storage.normal_()
    num_heads = NUM_HEADS + 2 * NUM_KV_HEADS
    qkv = torch.randn(workload.step.num_tokens, num_heads, HEAD_DIM).to(dtype)
    q, k, v = qkv.split((NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS), dim=1)

    def run() -> torch.Tensor:
        plan = backend.plan(workload.step)
        for layer in range(NUM_LAYERS):
            out = backend.run(layer, q, k, v, pool, plan)
        return out

    return run


def ways(dtype: torch.dtype) -> list[tuple[str, Level | None]]:
    """Names, and for the C kernels the instruction set."""
    best = level()
    levels = [] if best is None else [each for each in Level if each <= best]
    if dtype == torch.float32:  # the further ones are about bfloat16
        levels = [each for each in levels if each <= Level.AVX512]
    return [("torch", None), *((f"cpu {each.name.lower()}", each) for each in reversed(levels))]


def measure(name: str, dtype_name: str, repeat: int) -> list[dict[str, Any]]:
    dtype, workload = DTYPES[dtype_name], STEPS[name]
    shape = AttentionShape(
        num_layers=NUM_LAYERS,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        scale=HEAD_DIM**-0.5,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    runs = {"torch": prepare(TorchAttention(shape), workload, dtype)}
    if CpuAttention.serves(shape):
        runs["cpu"] = prepare(CpuAttention(shape), workload, dtype)
    every_way = ways(dtype)
    clock: dict[str, list[float]] = {way: [] for way, _ in every_way}
    processor: dict[str, list[float]] = {way: [] for way, _ in every_way}
    for turn in range(repeat + 1):
        for way, limit in every_way:
            limit_level(Level.AMX if limit is None else limit)
            start = time.perf_counter(), time.process_time()
            runs[way.split()[0]]()
            if turn:  # the first warms up
                clock[way].append(time.perf_counter() - start[0])
                processor[way].append(time.process_time() - start[1])
    limit_level(Level.AMX)
    records = []
    for way, _ in every_way:
        median, least = statistics.median(clock[way]), min(clock[way])
        records.append(
            {
                "step": name,
                "dtype": dtype_name,
                "way": way,
                "median_ms": round(1e3 * median, 2),
                "least_ms": round(1e3 * least, 2),
                "processor_median_ms": round(1e3 * statistics.median(processor[way]), 2),
                "gflop_per_s_at_least_ms": round(flops(workload.step) / least / 1e9, 1),
                "ratio_to_torch": round(statistics.median(clock["torch"]) / median, 2),
            }
        )
        print(json.dumps(records[-1]), flush=True)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--steps", default="decode,prefill")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    before = load_average()
    records = []
    with torch.inference_mode():
        for dtype in options.dtypes.split(","):
            for step in options.steps.split(","):
                records += measure(step, dtype, options.repeat)
    report = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "threads": options.threads,
        "repeat": options.repeat,
        "load_average": [before, load_average()],
        "steps": records,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
