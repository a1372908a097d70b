"""Measures weights that stay in 4 or 8 bits in memory (``--quantize keep``).

    python benchmarks/keep.py

Layers of 4096 inputs and outputs, as many as no cache holds, in bfloat16, int8 and the
quantisations that GGUF files have, by turns; then all layers of a GGUF model. One thread, by the
processor's clock, which a busy machine changes less; medians. Writes `results/keep.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import gguf  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from measure import load_average, machine  # noqa: E402
from quantize import NoAttention, forward  # noqa: E402

from batchradix.checkpoint.checkpoint import open_checkpoint  # noqa: E402
from batchradix.engine.layers.linear import (  # noqa: E402
    Bf16Linear,
    GroupedLinear,
    Int8Linear,
    Linear,
)
from batchradix.engine.models.gguf_groups import read_groups  # noqa: E402
from batchradix.engine.models.registry import load_model  # noqa: E402
from batchradix_kernels.native import level  # noqa: E402

RESULT = Path(__file__).with_name("results") / "keep.json"
KINDS = ("Q4_0", "Q4_K", "Q6_K", "Q8_0")
ROWS = (1, 16, 64, 512)
SIZE = 4096


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="a GGUF file or its name")
    parser.add_argument("--layers", type=int, default=12, help="of 32 MiB each in bfloat16")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULT)
    return parser.parse_args()


def by_turns(ways: dict[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """The median processor time of each, in ms; every one runs once before."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeat + 1):
        for name, way in ways.items():
            started_s = time.thread_time()
            way()
            if turn:
                took[name].append(1e3 * (time.thread_time() - started_s))
    return {name: round(statistics.median(times), 3) for name, times in took.items()}


def random_bytes(kind: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A weight in the quantisation; its scales may be anything, since nobody reads the results."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return np.random.default_rng(0).integers(0, 60, (SIZE, SIZE // size * num_bytes), np.uint8)


def _all(some: Sequence[Linear], x: torch.Tensor) -> None:
    for layer in some:
        layer(x)


def layers(num_layers: int, repeat: int) -> dict[str, Any]:
    made: dict[str, Sequence[Linear]] = {}
    weight = torch.randn(SIZE, SIZE) / 64
    made["bfloat16"] = [Bf16Linear(weight.bfloat16()) for _ in range(num_layers)]
    made["int8"] = [Int8Linear(weight, None, torch.bfloat16) for _ in range(num_layers)]
    num_bytes = {"bfloat16": 2 * SIZE**2, "int8": SIZE**2 + 4 * SIZE}
    for kind in KINDS:
        groups = read_groups(random_bytes(kind), kind)
        assert groups is not None
        kept = [GroupedLinear([groups]) for _ in range(num_layers)]
        made[kind], num_bytes[kind] = kept, kept[0].weight.num_bytes
    times = {}
    for rows in ROWS:
        x = torch.randn(rows, SIZE).bfloat16()
        ms = by_turns({name: partial(_all, some, x) for name, some in made.items()}, repeat)
        times[str(rows)] = {name: round(value / num_layers, 3) for name, value in ms.items()}
        print(f"{rows} rows, ms a layer: {times[str(rows)]}", flush=True)
    bits = {name: round(8 * size / SIZE**2, 2) for name, size in num_bytes.items()}
    print(f"bits a weight: {bits}")
    return {"size": SIZE, "num_layers": num_layers, "bits_a_weight": bits, "ms_a_layer": times}


def whole_model(name: str, repeat: int) -> dict[str, Any]:
    checkpoint = open_checkpoint(name)
    cpu = torch.device("cpu")
    quantised = {"bfloat16": "off", "int8": "int8", "keep": "keep"}
    models = {
        way: load_model(checkpoint, torch.bfloat16, cpu, quantize=option)  # type: ignore[arg-type]
        for way, option in quantised.items()
    }
    times = {}
    for rows in ROWS:
        ids = torch.arange(rows)
        ways = {way: partial(forward, model, ids, NoAttention()) for way, model in models.items()}
        times[str(rows)] = by_turns(ways, repeat)
        print(f"{rows} tokens, ms a pass: {times[str(rows)]}", flush=True)
    hidden = {way: forward(model, torch.arange(64), NoAttention()) for way, model in models.items()}
    return {
        "model": name,
        "file": checkpoint.path.name,
        "ms_a_pass": times,
        "same_as_bfloat16": bool(torch.equal(hidden["keep"], hidden["bfloat16"])),
    }


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    before = load_average()
    with torch.inference_mode():
        result = {
            "command": "python benchmarks/keep.py",
            "measured": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine() | {"level": str(level())},
            "layers": layers(options.layers, options.repeat),
            "model": whole_model(options.model, options.repeat),
            "load_average": [before, load_average()],
        }
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
