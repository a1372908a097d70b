"""Proves the Triton kernels on a CUDA GPU and measures them against what the GPU can do.

    python benchmarks/gpu_check.py

From a bare checkout with torch and triton, offline. Each part (`gpu_parts.py`) runs in a process of
its own, since an illegal access ends a process's use of the GPU: one that fails or hangs does not
stop the rest. Every kernel is compared with its reference in float32, float16 and bfloat16, then
timed beside the rates of a plain copy and a large matrix product on the same GPU. Everything goes
to ``gpu-check.json`` (``--out``), a short table is printed last. Exit code 0: all agree; 1: a part
failed; 2: there is no CUDA GPU here.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(Path(__file__).parent)]

import torch  # noqa: E402
from gpu_parts import PARTS, ceilings, check, time_part  # noqa: E402

CEILINGS = "ceilings"
PART_TIMEOUT_S = 120
NO_GPU = "There is no CUDA GPU here, so nothing was checked: run this on a machine with one."

Result = dict[str, Any]


def run_part(name: str, device: torch.device) -> Result:
    """What one part finds in this process, errors included: JSON as `report` takes it."""
    result: Result = {"part": name, "checks": [], "timings": [], "error": None}
    try:
        if name == CEILINGS:
            result["ceilings"] = ceilings(device)
        else:
            result["checks"] = [found.as_json() for found in check(PARTS[name], device)]
            result["timings"] = [timed.as_json() for timed in time_part(PARTS[name], device)]
    except Exception:  # of any kind: it is what is to be reported
        result["error"] = traceback.format_exc()
    return result


def run_apart(name: str, device: torch.device, timeout_s: float = PART_TIMEOUT_S) -> Result:
    """`run_part` in a process of its own."""
    failed: Result = {"part": name, "checks": [], "timings": []}
    command = [sys.executable, __file__, "--part", name, "--device", str(device)]
    started_s = time.perf_counter()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return failed | {"error": f"it was not done after {timeout_s:.0f} s"}
    seconds = round(time.perf_counter() - started_s, 1)
    try:
        result: Result = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        result = failed | {"error": f"exit code {done.returncode}: {done.stderr[-4000:]}"}
    return result | {"seconds": seconds}


def is_good(result: Mapping[str, Any]) -> bool:
    return result["error"] is None and all(found["ok"] for found in result["checks"])


def report(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of the short table: parts, kernels beside the ceilings, and what went wrong."""
    measured = next((r["ceilings"] for r in results if r.get("ceilings")), {})
    copy_gbs, matmul_tflops = measured.get("copy_gbs"), measured.get("matmul_tflops")
    lines = []
    if measured:
        lines.append(f"copy {copy_gbs:,.0f} GB/s, bfloat16 product {matmul_tflops:,.1f} TFLOP/s")
    for result in results:
        checks = result["checks"]
        agreed = sum(found["ok"] for found in checks)
        state = "ok" if is_good(result) else "FAILED"
        agree = f"{agreed} of {len(checks)} comparisons agree" if checks else ""
        lines.append(f"{state:7}{result['part']:18}{agree}".rstrip())
        for timed in result["timings"]:
            share = f", {timed['gbs'] / copy_gbs:.0%} of copy" if copy_gbs else ""
            lines.append(
                f"{'':7}  {timed['label']}: {timed['us']:,.1f} µs, {timed['gbs']:,.0f} GB/s{share}"
            )
        for found in checks:
            if not found["ok"]:
                lines.append(f"{'':7}  {found['label']}: {found['error']}")
        if result["error"] is not None:
            lines.append(f"{'':7}  {result['error'].strip().splitlines()[-1]}")
    return lines


def device_facts(device: torch.device) -> dict[str, Any]:
    """Names and versions, for the file."""
    facts: dict[str, Any] = {"device": str(device), "torch": torch.__version__}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "processors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    return facts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"))
    parser.add_argument("--parts", default=",".join((CEILINGS, *PARTS)))
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--part", help=argparse.SUPPRESS)  # this process is one part
    options = parser.parse_args(arguments)
    names = [options.part] if options.part else options.parts.split(",")
    for name in names:
        if name not in (CEILINGS, *PARTS):
            parser.error(f"there is no part {name!r}, only {', '.join((CEILINGS, *PARTS))}")
    if options.device.type == "cuda" and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    if options.part:
        print(json.dumps(run_part(options.part, options.device)))
        return 0
    results = [run_apart(name, options.device) for name in names]
    written = {"machine": device_facts(options.device), "parts": results}
    options.out.write_text(json.dumps(written, indent=1) + "\n")
    print("\n".join(report(results)))
    return 0 if all(map(is_good, results)) else 1


if __name__ == "__main__":
    sys.exit(main())
