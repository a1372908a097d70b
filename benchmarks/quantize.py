"""Measures what 8-bit layers (``--quantize int8``) cost in accuracy and gain in time.

    python benchmarks/quantize.py --windows 16 --rows 60

The same weights in float32, in bfloat16, and in each with int8 layers: how likely real text is
(licences that Debian installs, windows of 512 tokens), how often the likeliest next token is
that of float32, and the answers to two jobs: the extraction of `recipes/debian_copyrights`, of
which a person read the rows too, and one-of-eight classification. Then the forward pass of a
decode step and of prefill, on one thread by the processor's clock, which a busy machine changes
less. Writes `results/quantize.json`.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch  # noqa: E402
from measure import load_average, machine  # noqa: E402
from torch.nn import functional  # noqa: E402
from workloads import classification  # noqa: E402

from batchradix import pipeline  # noqa: E402
from batchradix.checkpoint.checkpoint import open_checkpoint  # noqa: E402
from batchradix.config import (  # noqa: E402
    EngineOptions,
    PromptOptions,
    RunConfig,
    SamplingOptions,
)
from batchradix.engine.models.batch import Batch  # noqa: E402
from batchradix.engine.models.registry import load_model  # noqa: E402
from batchradix_kernels.native import Level, level, limit_level  # noqa: E402

RESULT = Path(__file__).with_name("results") / "quantize.json"
RECIPE = ROOT / "recipes" / "debian_copyrights"
TEXTS = Path("/usr/share/common-licenses")
WINDOW = 512
WAYS = (("float32", "off"), ("bfloat16", "off"), ("float32", "int8"), ("bfloat16", "int8"))


class WholeText:
    """Attention of one text to itself; implements the part of `AttentionBackend` that runs."""

    def run(self, layer: int, q: Any, k: Any, v: Any, pool: Any, plan: Any) -> torch.Tensor:
        heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
        out = functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(len(q), -1)


class NoAttention(WholeText):
    """Leaves attention out, to time the layers."""

    def run(self, layer: int, q: Any, k: Any, v: Any, pool: Any, plan: Any) -> torch.Tensor:
        return torch.zeros((len(q), q.shape[1] * q.shape[2]), dtype=v.dtype)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--windows", type=int, default=16, help="windows of text of 512 tokens")
    parser.add_argument("--rows", type=int, default=60, help="rows of each job")
    parser.add_argument("--repeat", type=int, default=7, help="forward passes timed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULT)
    return parser.parse_args()


def windows(checkpoint: Any, num_windows: int) -> list[torch.Tensor]:
    """int64[512] each, spread evenly over the texts."""
    files = sorted(p for p in TEXTS.iterdir() if p.is_file() and not p.is_symlink())
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    rows = checkpoint.tokenizer.encode_plain(texts, [True] * len(texts))
    found = [
        torch.tensor(row[at : at + WINDOW], dtype=torch.int64)
        for row in rows
        for at in range(0, len(row) - WINDOW + 1, WINDOW)
    ]
    if len(found) < num_windows:
        raise SystemExit(f"{TEXTS} gives {len(found)} windows, not {num_windows}; ask for fewer")
    return found[:: len(found) // num_windows][:num_windows]


def forward(model: Any, token_ids: torch.Tensor, attention: Any) -> torch.Tensor:
    positions = torch.arange(len(token_ids))
    batch = Batch(
        token_ids=token_ids, positions=positions, attention=attention, plan=None, pool=None
    )
    hidden: torch.Tensor = model.forward(batch)
    return hidden


def read_texts(model: Any, texts: list[torch.Tensor]) -> tuple[list[float], torch.Tensor]:
    """Mean negative log-likelihood (nats a token) of each window, and all likeliest tokens."""
    losses, best = [], []
    for ids in texts:
        logits = model.logits(forward(model, ids, WholeText())).float()
        losses.append(float(functional.cross_entropy(logits[:-1], ids[1:])))
        best.append(logits[:-1].argmax(dim=1))
    return losses, torch.cat(best)


def cpu_ms(model: Any, num_tokens: int, repeat: int) -> float:
    """The median of the layers' forward pass over ``num_tokens`` tokens."""
    ids, took = torch.arange(num_tokens), []
    for _ in range(repeat + 2):
        started_s = time.thread_time()
        forward(model, ids, NoAttention())
        took.append(time.thread_time() - started_s)
    return round(1e3 * statistics.median(took[2:]), 1)


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def answers(options: argparse.Namespace, dtype: str, quantize: str) -> dict[str, list[Any]]:
    """The values that each job gave."""
    engine = EngineOptions(
        dtype=dtype,  # type: ignore[arg-type]
        quantize=quantize,  # type: ignore[arg-type]
        device="cpu",
        num_threads=options.threads,
        kv_tokens=40_000,
    )
    topics = classification(options.rows)
    jobs: dict[str, dict[str, Any]] = {
        "extraction": {
            "input": str(RECIPE / "jobs.parquet"),
            "limit": options.rows,
            "schema": str(RECIPE / "schema.json"),
            "prompt": PromptOptions(template=(RECIPE / "prompt.jinja").read_text()),
            "sampling": SamplingOptions(max_tokens=64),
        },
        "classification": {
            "input": [{"prompt": prompt} for prompt in topics.prompts],
            "schema": topics.schema,
            "sampling": SamplingOptions(max_tokens=topics.new_tokens),
        },
    }
    found = {}
    for name, job in jobs.items():
        outcome = pipeline.run(RunConfig(model=options.model, engine=engine, **job))
        assert outcome.table is not None
        found[name] = outcome.table.column("value").to_pylist()
    return found


def right_fields(values: list[Any]) -> dict[str, float]:
    """The share of each field that is as a person read it."""
    with (RECIPE / "by_hand.csv").open(encoding="utf-8", newline="") as file:
        read = list(csv.DictReader(file))[: len(values)]
    shares = {}
    for field in ("licence", "year", "holder"):
        given = ["" if v is None or v[field] is None else str(v[field]) for v in values]
        right = [one == by_hand[field] for one, by_hand in zip(given, read, strict=True)]
        shares[field] = round(sum(right) / len(right), 3)
    return shares


def measure(options: argparse.Namespace, way: tuple[str, str], base: dict[str, Any]) -> Any:
    """The numbers of one way; ``base`` holds what the first found, and is filled by it."""
    checkpoint = open_checkpoint(options.model)
    texts = windows(checkpoint, options.windows)
    dtype, quantize = way
    with torch.inference_mode():
        model = load_model(
            checkpoint,
            getattr(torch, dtype),
            torch.device("cpu"),
            quantize=quantize,  # type: ignore[arg-type]
        )
        losses, best = read_texts(model, texts)
        with one_thread():
            times = {str(n): cpu_ms(model, n, options.repeat) for n in (1, 64, 512)}
            limit_level(Level.AVX512)
            without_amx = {str(n): cpu_ms(model, n, options.repeat) for n in (1, 64, 512)}
            limit_level(Level.AMX)
    del model
    found = answers(options, *way)
    base.setdefault("best", best)
    base.setdefault("losses", losses)
    base.setdefault("answers", found)
    more = [loss - first for loss, first in zip(losses, base["losses"], strict=True)]
    loss = statistics.mean(losses)
    return {
        "dtype": dtype,
        "quantize": quantize,
        "nats_a_token": round(loss, 5),
        "more_nats_than_float32": round(statistics.mean(more), 5),
        "most_more_in_a_window": round(max(more), 5),
        "likeliest_token_as_float32": round(float((best == base["best"]).float().mean()), 4),
        "answers_as_float32": {
            name: round(
                sum(a == b for a, b in zip(values, base["answers"][name], strict=True))
                / len(values),
                3,
            )
            for name, values in found.items()
        },
        "extraction_as_by_hand": right_fields(found["extraction"]),
        "layers_cpu_ms_by_tokens": times,
        "our_kernels_without_amx_cpu_ms": without_amx,
    }


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    load_before = load_average()
    base: dict[str, Any] = {}
    ways = []
    for way in WAYS:
        ways.append(measure(options, way, base))
        print(json.dumps(ways[-1]), flush=True)
    best = level()
    record = {
        "command": f"python benchmarks/quantize.py --model {options.model} "
        f"--windows {options.windows} --rows {options.rows} --threads {options.threads}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "instruction_set": None if best is None else best.name,
        "ways": ways,
        "load_average": {"before": load_before, "after": load_average()},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
