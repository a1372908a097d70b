"""What `batchradix check` expects of three real jobs, beside what they take: counts and seconds.

    python benchmarks/forecasts.py

Each job runs twice. The first run measures what steps take and how long answers are; the second is
predicted from that. Writes ``results/forecasts.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workloads import Workload, json_one_of_8, shared_documents

from batchradix.checkpoint.cache_folder import cache_folder

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).with_name("results") / "forecasts.json"
COUNTS = (
    "computed_tokens", "recomputed_tokens", "decode_steps", "forward_steps", "peak_kv_tokens"
)  # fmt: skip


def recipe(folder: Path) -> list[str]:
    """Records of copyright notices, as the README runs them."""
    place = ROOT / "recipes" / "debian_copyrights"
    return [
        str(place / "jobs.parquet"),
        *("--template", str(place / "prompt.jinja"), "--schema", str(place / "schema.json")),
        *("--max-tokens", "64"),
    ]


def of_workload(workload: Workload) -> Callable[[Path], list[str]]:
    """A job of `workloads`: raw prompts, and a schema where it has one."""

    def words(folder: Path) -> list[str]:
        jobs = folder / "jobs.jsonl"
        with jobs.open("w", encoding="utf-8") as file:
            for number, prompt in enumerate(workload.prompts):
                file.write(json.dumps({"id": number, "prompt": prompt}) + "\n")
        found = [str(jobs), "--max-tokens", str(workload.new_tokens)]
        if workload.schema is not None:
            (folder / "schema.json").write_text(json.dumps(workload.schema))
            found += ["--schema", str(folder / "schema.json")]
        return found

    return words


JOBS: dict[str, Callable[[Path], list[str]]] = {
    "records of 60 copyright notices (recipes/debian_copyrights)": recipe,
    "256 questions about 32 passages of a manual": of_workload(shared_documents(256)),
    "one of 8 licences for 256 notices": of_workload(json_one_of_8(256)),
}


def measure(words: list[str], model: str, folder: Path) -> dict[str, Any]:
    """Runs a job twice, and gives prediction and outcome of the second run."""
    environment = os.environ | {
        "BATCHRADIX_CACHE": str(folder / "cache"),
        "BATCHRADIX_HISTORY": str(folder / "history.parquet"),
    }
    (folder / "cache").mkdir()
    models = cache_folder() / "models"
    if models.is_dir():
        (folder / "cache" / "models").symlink_to(models)
    for number in (1, 2):
        output = folder / f"{number}.arrow"
        command = [sys.executable, "-m", "batchradix", "run", *words, "--model", model]
        done = subprocess.run(
            [*command, "-o", str(output), "--json"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode > 1:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    summary = json.loads(done.stdout)
    predicted = summary["predicted"]
    return {
        "rows": summary["rows"],
        "prompt_tokens": summary["prompt_tokens"],
        "answer_tokens": summary["answer_tokens"],
        **{name: [predicted[name], summary[name]] for name in COUNTS},
        "seconds": [predicted["seconds"], summary["seconds"]["run"]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    result: dict[str, Any] = {
        "measured": datetime.now(UTC).strftime("%Y-%m-%d"),
        "model": options.model,
        "cores": os.cpu_count(),
        "predicted_and_achieved": {},
    }
    for name, job in JOBS.items():
        with tempfile.TemporaryDirectory() as folder:
            found = measure(job(Path(folder)), options.model, Path(folder))
        result["predicted_and_achieved"][name] = found
        print(name, json.dumps(found))
    options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
