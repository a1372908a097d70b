"""Measures how much memory a row costs, with an engine that answers at once.

    python benchmarks/memory.py --rows 200000,1000000,3000000

For each number of rows it writes an input (Parquet, prompts of about 30 tokens that share their
beginnings), runs the whole job over it in a process of its own and watches that process: peaks
of its anonymous, its file-backed and its whole resident memory, by phase. Prints and writes to
`results/memory.json` what a row costs between two neighbouring numbers.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).with_name("results") / "memory.json"
KINDS = {"RssAnon": "anonymous", "RssFile": "file", "RssShmem": "shared", "VmRSS": "all"}
SAMPLE_S = 0.1
WRITE_ROWS = 50_000


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="200000,1000000,3000000", help="numbers; a,b")
    parser.add_argument("--folder", type=Path, help="where inputs and outputs go for the while")
    parser.add_argument("--plan-memory", type=int, help="bytes; the option's default otherwise")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--child", nargs=3, metavar=("MODEL", "INPUT", "OUTPUT"))
    return parser.parse_args()


def load(path: Path) -> ModuleType:
    """The module in a file of the tests, which are no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def write_rows(path: Path, num_rows: int) -> None:
    """``num_rows`` prompts in no order; each shares its beginning with hundreds of others."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("id", pa.string()), ("prompt", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for begin in range(0, num_rows, WRITE_ROWS):
            rows = range(begin, min(begin + WRITE_ROWS, num_rows))
            ids = [f"r{row}" for row in rows]
            prompts = [f"Is item {row * 7919 % 4093:04d} like {row:09d}?" for row in rows]
            writer.write_batch(pa.RecordBatch.from_pydict({"id": ids, "prompt": prompts}, schema))


def measure(model: Path, folder: Path, num_rows: int, plan_memory: int | None) -> dict[str, Any]:
    """Runs the job over ``num_rows`` rows in a child and watches it.

    Peaks in bytes by phase; raises `SystemExit` with what the child said when it fails.
    """
    given, made = folder / "rows.parquet", folder / "answers.parquet"
    write_rows(given, num_rows)
    command = [sys.executable, __file__, "--child", str(model), str(given), str(made)]
    if plan_memory is not None:
        command += ["--plan-memory", str(plan_memory)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "BATCHRADIX_HISTORY": "off"}
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    phase = ["start"]
    seconds: dict[str, float] = {}

    def listen() -> None:
        began_s = time.monotonic()
        assert child.stdout is not None
        for line in child.stdout:
            now_s = time.monotonic()
            seconds[phase[0]] = seconds.get(phase[0], 0.0) + now_s - began_s
            phase[0], began_s = line.strip(), now_s

    listener = threading.Thread(target=listen)
    listener.start()
    peaks: dict[str, dict[str, int]] = {}
    while child.poll() is None:
        now = resident(child.pid)
        peak = peaks.setdefault(phase[0], dict.fromkeys(KINDS.values(), 0))
        for kind, num_bytes in now.items():
            peak[kind] = max(peak[kind], num_bytes)
        time.sleep(SAMPLE_S)
    listener.join()
    if child.returncode:
        raise SystemExit(f"the run over {num_rows} rows failed")
    whole = {kind: max(peak[kind] for peak in peaks.values()) for kind in KINDS.values()}
    return {
        "rows": num_rows,
        "peak_bytes": whole,
        "peak_bytes_by_phase": peaks,
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
    }


def resident(pid: int) -> dict[str, int]:
    """Bytes resident by kind; nothing when the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return {kind: 1024 * int(fields[n].split()[0]) for n, kind in KINDS.items() if n in fields}


def run_child(model: str, given: str, made: str, plan_memory: int | None) -> None:
    """One job with the echo engine; says on standard output which phase begins."""
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
    from batchradix import pipeline
    from batchradix.config import EngineOptions, OutputOptions, RunConfig
    from batchradix.report.progress import Silent

    class Phases(Silent):
        def message(self, text: str) -> None:
            print("settle" if text.startswith("loading") else "open", flush=True)

        def start(self, num_rows: int, num_done: int) -> None:
            print("run", flush=True)

        def stop(self) -> None:
            print("finish", flush=True)

    print("plan", flush=True)
    options = {} if plan_memory is None else {"plan_memory_bytes": plan_memory}
    pipeline.run(
        RunConfig(
            input=Path(given),
            model=model,
            engine=EngineOptions(dtype="float32", num_threads=1, batch_size=256, **options),
            output=OutputOptions(path=Path(made)),
        ),
        progress=Phases(),
        engines=load(ROOT / "tests" / "e2e" / "echo.py").EchoEngines,
    )
    print("end", flush=True)


def main() -> None:
    arguments = parse()
    if arguments.child:
        run_child(*arguments.child, arguments.plan_memory)
        return
    results = []
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="memory-") as name:
        model = Path(name) / "model"
        load(ROOT / "tests" / "conftest.py")._build(model, "const", prefer="a")
        for num_rows in map(int, arguments.rows.split(",")):
            folder = Path(name) / str(num_rows)
            folder.mkdir()
            results.append(measure(model, folder, num_rows, arguments.plan_memory))
            print(json.dumps(results[-1]), flush=True)
    growth = [
        {
            "from_rows": a["rows"],
            "to_rows": b["rows"],
            "bytes_a_row": {
                kind: round((b["peak_bytes"][kind] - peak) / (b["rows"] - a["rows"]), 1)
                for kind, peak in a["peak_bytes"].items()
            },
        }
        for a, b in pairwise(results)
    ]
    for one in growth:
        print(json.dumps(one))
    sys.path.insert(0, str(Path(__file__).parent))
    from measure import load_average, machine

    report = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "load": load_average(),
        "runs": results,
        "growth": growth,
    }
    arguments.output.parent.mkdir(exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
