"""Measures a run that begins warm (``--kv-store``) against the same run without a store.

    python benchmarks/kv_store.py --rows 16,64 --prefix-tokens 2000 --repeat 5

Every prompt begins with the same examples (real text, about ``--prefix-tokens`` tokens) and ends
with a passage of its own. The first night fills the store; the second night has other rows and
runs without a store, warm from it, and filling an empty one, in turns. Each run loads the model
anew; times are those of the steps alone, on the clock and of the processor (all threads), which a
busy machine changes less. Writes `results/kv-store.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from measure import StepTimes, load_average, machine  # noqa: E402
from workloads import passages  # noqa: E402

from batchradix import pipeline  # noqa: E402
from batchradix.checkpoint.checkpoint import open_checkpoint  # noqa: E402
from batchradix.config import (  # noqa: E402
    EngineOptions,
    RunConfig,
    SamplingOptions,
)
from batchradix.settings import EngineSettings  # noqa: E402

RESULT = Path(__file__).with_name("results") / "kv-store.json"
WAYS = ("without", "warm", "filling")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="16,64", help="rows of the second night; a,b")
    parser.add_argument("--prefix-tokens", type=int, default=2000)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULT)
    return parser.parse_args()


class TimedEngines(pipeline.RadixEngines):
    """``times`` are those of the last engine."""

    times = StepTimes()

    def __call__(self, settings: EngineSettings) -> Any:
        engine = super().__call__(settings)
        self.times.watch(engine)
        return engine


def nights(model: str, num_rows: int, prefix_tokens: int) -> list[list[str]]:
    """The prompts of two nights, which share their beginning and no row."""
    tokenizer = open_checkpoint(model).tokenizer
    texts = passages(2 * num_rows + 40, 400)
    prefix = ""
    while len(tokenizer.encode_plain([prefix], [True])[0]) < prefix_tokens:
        prefix += f"Passage:\n{texts.pop()}\nIn a word: text\n\n"
    rows = [f"{prefix}Passage:\n{text}\nIn a word:" for text in texts[: 2 * num_rows]]
    return [rows[:num_rows], rows[num_rows:]]


def run_once(prompts: list[str], store: Path | None, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and counters of one run."""
    outcome = pipeline.run(
        RunConfig(
            input=[{"prompt": prompt} for prompt in prompts],
            model=options.model,
            sampling=SamplingOptions(max_tokens=options.max_tokens),
            engine=EngineOptions(
                dtype=options.dtype, device="cpu", num_threads=options.threads, kv_store=store
            ),
        ),
        engines=TimedEngines,
    )
    summary = outcome.summary.to_json()
    assert not summary["warnings"], summary["warnings"]
    assert summary["computed_tokens"] + summary["loaded_tokens"] == summary["distinct_tokens"], (
        "tokens were lost"
    )
    names = ("distinct_tokens", "computed_tokens", "loaded_tokens", "completion_tokens")
    return {
        "seconds": round(TimedEngines.times.step_s, 2),
        "cpu_seconds": round(TimedEngines.times.step_cpu_s, 2),
        **{name: summary[name] for name in names},
    }


def measure(num_rows: int, options: argparse.Namespace) -> dict[str, Any]:
    first, second = nights(options.model, num_rows, options.prefix_tokens)
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        warm = Path(folder) / "warm"
        run_once(first, warm, options)
        for turn in range(options.repeat):
            for way in WAYS:
                store = {"without": None, "warm": warm, "filling": Path(folder) / str(turn)}[way]
                runs[way].append(run_once(second, store, options))
                print(num_rows, way, runs[way][-1], flush=True)
        store_bytes = sum(path.stat().st_size for path in warm.iterdir())
    medians = {
        unit: {way: statistics.median(run[unit] for run in runs[way]) for way in WAYS}
        for unit in ("seconds", "cpu_seconds")
    }
    return {
        "rows": num_rows,
        "store_bytes": store_bytes,
        "medians": medians,
        "times_as_fast": {
            unit: round(median["without"] / median["warm"], 2) for unit, median in medians.items()
        },
        "runs": runs,
    }


def main() -> None:
    options = parse()
    before = load_average()
    results = [measure(int(number), options) for number in options.rows.split(",")]
    report = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine() | {"load_before": before, "load_after": load_average()},
        "settings": {
            name: value
            for name, value in vars(options).items()
            if isinstance(value, str | int) and name != "rows"
        },
        "results": results,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    for result in results:
        print(json.dumps({k: v for k, v in result.items() if k != "runs"}))


if __name__ == "__main__":
    main()
