"""Measures guessing ahead (``--speculate``) against decoding token by token.

    python benchmarks/speculation.py --dtype bfloat16 --batch-sizes 1,4,16,64 --repeat 3

Two extractions over real text, with a schema each: ``notices`` is the recipe
`recipes/debian_copyrights` (short fields, most of an answer is forced), ``quotes`` asks for a
sentence of a passage of Python's reference word for word. All ways run in turns in one process
on the same weights; times are those of the steps alone, on the clock and of the processor (all
threads), which a busy machine changes less. Writes what was seen to
`results/ngram-speculation.json`, beside what is there of other dtypes and batch sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from measure import StepTimes, load_average, machine  # noqa: E402
from workloads import passages  # noqa: E402

from batchradix import pipeline  # noqa: E402
from batchradix.config import (  # noqa: E402
    EngineOptions,
    PromptOptions,
    RunConfig,
    SamplingOptions,
)
from batchradix.engine.core import RadixEngine  # noqa: E402
from batchradix.engine.model_runner import ModelRunner  # noqa: E402
from batchradix.prompts.detokenise import IncrementalDetokenizer  # noqa: E402
from batchradix.settings import EngineSettings  # noqa: E402

RESULT = Path(__file__).with_name("results") / "ngram-speculation.json"
RECIPE = ROOT / "recipes" / "debian_copyrights"
WAYS: tuple[Any, ...] = ("off", "auto", 4)
KV_TOKENS = 40_000
QUOTES_SCHEMA = {
    "type": "object",
    "properties": {"first_sentence": {"type": "string"}, "is_code": {"type": "boolean"}},
    "required": ["first_sentence", "is_code"],
    "additionalProperties": False,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default="notices,quotes", help="of notices, quotes; a,b")
    parser.add_argument("--batch-sizes", default="1,4,16,64")
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--single-rows", type=int, default=12, help="rows at batch sizes below 16")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULT)
    return parser.parse_args()


class SharedRunner(ModelRunner):
    """Weights and pool for several engines, one after the other."""

    def close(self) -> None:
        """Leaves them for the next engine."""


class TimedEngines(pipeline.RadixEngines):
    """Engines over one runner; ``times`` are those of the last."""

    runner: SharedRunner | None = None
    times = StepTimes()

    def __call__(self, settings: EngineSettings) -> Any:
        cls = type(self)
        if cls.runner is None:
            cls.runner = SharedRunner(self._checkpoint, settings)
        detokenizer = IncrementalDetokenizer(self._checkpoint.tokenizer.token_bytes)
        engine = RadixEngine(
            self._checkpoint, settings, detokenizer, grammars=self._grammars, runner=cls.runner
        )
        self.times.watch(engine)
        return engine


def rows_of(workload: str, num_rows: int) -> dict[str, Any]:
    """What `RunConfig` needs for a workload."""
    if workload == "notices":
        return {
            "input": str(RECIPE / "jobs.parquet"),
            "limit": num_rows,
            "schema": str(RECIPE / "schema.json"),
            "prompt": PromptOptions(template=(RECIPE / "prompt.jinja").read_text()),
            "sampling": SamplingOptions(max_tokens=64),
        }
    texts = passages(num_rows, 700)
    return {
        "input": [
            {"prompt": f"Passage:\n{t}\n\nThe first sentence of the passage, as JSON:\n"}
            for t in texts
        ],
        "schema": QUOTES_SCHEMA,
        "sampling": SamplingOptions(max_tokens=80),
    }


def run_once(workload: str, batch_size: int, way: Any, options: argparse.Namespace) -> Any:
    """Seconds, counters and answers of one run."""
    num_rows = options.rows if batch_size >= 16 else options.single_rows
    config = RunConfig(
        model=options.model,
        engine=EngineOptions(
            dtype=options.dtype,
            device="cpu",
            num_threads=options.threads,
            batch_size=batch_size,
            kv_tokens=KV_TOKENS,
            speculate=way,
        ),
        **rows_of(workload, num_rows),
    )
    outcome = pipeline.run(config, engines=TimedEngines)
    usage = outcome.summary.usage
    assert outcome.table is not None
    counters = {
        "rows": outcome.summary.rows,
        "completion_tokens": outcome.summary.completion_tokens,
        "forced_tokens": usage.forced_tokens,
        "decode_steps": usage.decode_steps,
        "forward_steps": usage.forward_steps,
        "drafted_tokens": usage.drafted_tokens,
        "accepted_tokens": usage.accepted_tokens,
    }
    return (
        (TimedEngines.times.step_s, TimedEngines.times.step_cpu_s),
        counters,
        outcome.table.column("text").to_pylist(),
    )


def measure_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All ways in turns for each workload and batch size."""
    found = []
    for workload in options.workloads.split(","):
        for batch_size in map(int, options.batch_sizes.split(",")):
            seconds: dict[Any, list[tuple[float, float]]] = {way: [] for way in WAYS}
            counters: dict[Any, Any] = {}
            answers: dict[Any, Any] = {}
            for _ in range(options.repeat):
                for way in WAYS:
                    took, counters[way], answers[way] = run_once(workload, batch_size, way, options)
                    seconds[way].append(took)
            base_s, base_cpu_s = map(statistics.median, zip(*seconds["off"], strict=True))
            for way in WAYS:
                step_s, step_cpu_s = map(list, zip(*seconds[way], strict=True))
                pairs = zip(answers[way], answers["off"], strict=True)
                found.append(
                    {
                        "workload": workload,
                        "batch_size": batch_size,
                        "speculate": way,
                        **counters[way],
                        "step_s": [round(s, 3) for s in step_s],
                        "step_cpu_s": [round(s, 3) for s in step_cpu_s],
                        "ratio": round(base_s / statistics.median(step_s), 3),
                        "cpu_ratio": round(base_cpu_s / statistics.median(step_cpu_s), 3),
                        "answers_as_off": sum(a == b for a, b in pairs),
                    }
                )
                print(found[-1], flush=True)
    return found


def main() -> None:
    options = parse()
    load_before = load_average()
    entry = {
        "command": "python benchmarks/speculation.py "
        + " ".join(
            f"--{name.replace('_', '-')} {value}"
            for name, value in vars(options).items()
            if name != "out"
        ),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "runs": measure_all(options),
        "load_average": {"before": load_before, "after": load_average()},
    }
    record = json.loads(options.out.read_text("utf-8")) if options.out.exists() else {}
    record[f"{options.dtype}, {options.workloads}, {options.batch_sizes}"] = entry
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
