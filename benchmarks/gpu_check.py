"""Proves kernels and engine on a CUDA GPU, and measures them against what the GPU can do.

    python benchmarks/gpu_check.py

From a bare checkout, offline; docs/gpu.md says which packages must be there. Each part
(`gpu_parts.py`) runs in a process of its own and for its own time, since an illegal access ends a
process's use of the GPU: one that fails or hangs does not stop the rest, and what it said before
is kept. Parts that compare run side by side, parts that measure time run alone. All of it goes to
``gpu-check.json`` (``--out``), a short table is printed last. Exit code 0: all that ran agrees; 1:
a comparison or a part failed; 2: there is no CUDA GPU here, or an argument is wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(Path(__file__).parent)]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch  # noqa: E402
from gpu_measure import Setting  # noqa: E402
from gpu_parts import PARTS, run_part  # noqa: E402
from gpu_report import is_good, table  # noqa: E402

from batchradix.checkpoint.cache_folder import cache_folder  # noqa: E402
from batchradix.checkpoint.listed import LISTED_MODELS  # noqa: E402

BUDGET_S = 460.0
LEAST_S = 5.0  # in which a part can still begin
SMALL_MODEL = LISTED_MODELS["smollm2-135m"]
PACKAGES = ("torch", "triton", "transformers", "flashinfer-python", "xgrammar")
NO_GPU = "There is no CUDA GPU here, so nothing was checked: run this on a machine with one."

Result = dict[str, Any]


def run_apart(name: str, arguments: Sequence[str], limit_s: float) -> Result:
    """`run_part` in a process of its own, which is ended with all that it started after
    ``limit_s``; what it said until then is kept."""
    command = [sys.executable, __file__, "--part", name, *arguments]
    began_s = time.perf_counter()
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as complained:
        process = subprocess.Popen(
            command, stdout=said, stderr=complained, text=True, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
        seconds = time.perf_counter() - began_s
        said.seek(0)
        complained.seek(0)
        result = collect(name, limit_s, said.readlines())
        if "ended" not in result:
            result["error"] = (
                f"time ran out: it was not done after {limit_s:.0f} s"
                if code is None
                else f"exit code {code}: {complained.read()[-4000:]}"
            )
    result.pop("ended", None)
    return result | {"seconds": round(seconds, 1)}


def end_with_parent(parent_pid: int) -> None:
    """Lets no part outlive the run that asked for it, whatever ended that, and hold the GPU."""

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(1)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    if os.getpgrp() == os.getpid():  # what `run_apart` starts leads a group of its own
        threading.Thread(target=watch, daemon=True).start()


def collect(name: str, limit_s: float, lines: Sequence[str]) -> Result:
    """What a part said, by kind; lines that are no records are somebody else's."""
    kinds = {"found": "checks", "timed": "speeds", "skipped": "skips"}
    result: Result = {"part": name, "limit_s": limit_s, "seconds": 0.0, "error": None}
    result |= {kind: [] for kind in kinds.values()}
    for line in lines:
        try:
            record = json.loads(line)
            kind = record.pop("record")
        except (json.JSONDecodeError, AttributeError, KeyError):
            continue
        if kind == "end":
            result |= {"error": record["error"], "ended": True}
        else:
            result[kinds[kind]].append(record)
    return result


def run_all(
    names: Sequence[str],
    arguments: Sequence[str],
    *,
    budget_s: float,
    jobs: int,
    patience: float = 1.0,
) -> Iterator[Result]:
    """Every part in order; those that may run side by side do, ``jobs`` at a time. Their limits
    are so many times as long."""
    began_s = time.perf_counter()

    def run(name: str) -> Result:
        left_s = budget_s - (time.perf_counter() - began_s)
        limit_s = PARTS[name].limit_s * patience
        if left_s < LEAST_S:
            missed = collect(name, limit_s, ())
            missed.pop("ended", None)
            return missed | {"error": f"time ran out: the {budget_s:.0f} s of --budget are spent"}
        print(f"{name} …", file=sys.stderr, flush=True)
        return run_apart(name, arguments, min(limit_s, left_s))

    with ThreadPoolExecutor(jobs) as pool:
        for alone, some in groupby(names, key=lambda name: PARTS[name].alone):
            yield from (map if alone else pool.map)(run, some)


def joined(parts: Sequence[Path], folder: Path) -> Path:
    """The small model from the parts of its file, in order. Raises `ValueError` where they do not
    make it."""
    path, digest = folder / SMALL_MODEL.file_name, hashlib.sha256()
    with path.open("wb") as whole:
        for part in parts:
            data = part.read_bytes()
            digest.update(data)
            whole.write(data)
    if digest.hexdigest() != SMALL_MODEL.sha256:
        raise ValueError(f"{', '.join(map(str, parts))} do not make {SMALL_MODEL.file_name}")
    return path


def find_model() -> Path | None:
    """The small model's file beside the checkout, or where batchradix keeps it."""
    kept = cache_folder() / "models" / SMALL_MODEL.name
    places = (folder / SMALL_MODEL.file_name for folder in (Path.cwd(), ROOT, kept))
    return next((place for place in places if place.exists()), None)


def machine_facts(device: torch.device) -> dict[str, Any]:
    """Names and versions, for the file and the table's first line."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    facts: dict[str, Any] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": str(device),
        "processors": os.cpu_count(),
        "versions": versions,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    return facts


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"))
    parser.add_argument("--parts", default=",".join(PARTS), help="names with commas between them")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--model", type=Path, help=f"{SMALL_MODEL.file_name}, or another model")
    parser.add_argument("--model-parts", help="files with commas between them that make it")
    parser.add_argument(
        "--size",
        choices=("full", "tiny"),
        help="of the large models with random weights; default: full, tiny on a CPU",
    )
    parser.add_argument("--rows", type=int, help="of each of them; default: 1000, 24 on a CPU")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for all of it")
    parser.add_argument("--patience", type=float, help="times of it and of all limits; 4 on a CPU")
    parser.add_argument("--jobs", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--part", help=argparse.SUPPRESS)  # this process is one part
    options = parser.parse_args(arguments)
    for name in [options.part] if options.part else options.parts.split(","):
        if name not in PARTS:
            parser.error(f"there is no part {name!r}, only {', '.join(PARTS)}")
    is_small = options.device.type == "cpu"
    options.size = options.size or ("tiny" if is_small else "full")
    options.rows = options.rows or (24 if is_small else 1000)
    options.patience = options.patience or (4.0 if is_small else 1.0)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.device.type == "cuda" and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    if options.part:
        end_with_parent(os.getppid())
        setting = Setting(
            device=options.device,
            model=options.model,
            size=options.size,
            num_rows=options.rows,
        )
        for record in run_part(PARTS[options.part], setting):
            print(json.dumps(record), flush=True)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or find_model()
        if options.model_parts:
            try:
                model = joined([Path(p) for p in options.model_parts.split(",")], Path(folder))
            except (OSError, ValueError) as error:
                print(error, file=sys.stderr)
                return 2
        return check(options, model)


def check(options: argparse.Namespace, model: Path | None) -> int:
    """Runs the parts, writes the file, prints the table; the exit code."""
    passed_on = ["--device", str(options.device), "--size", options.size]
    passed_on += ["--rows", str(options.rows)]
    if model is not None:
        passed_on += ["--model", str(model)]
    began_s = time.perf_counter()
    facts = machine_facts(options.device)
    results = list(
        run_all(
            options.parts.split(","),
            passed_on,
            budget_s=options.budget * options.patience,
            jobs=options.jobs,
            patience=options.patience,
        )
    )
    facts["seconds"] = round(time.perf_counter() - began_s, 1)
    options.out.write_text(json.dumps({"machine": facts, "parts": results}, indent=1) + "\n")
    print("\n".join(table(facts, results, str(options.out))))
    return 0 if all(map(is_good, results)) else 1


if __name__ == "__main__":
    sys.exit(main())
