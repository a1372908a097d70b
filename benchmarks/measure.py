"""Runs a task in a process of its own, checks answers, and says what the machine is."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from operator import eq
from pathlib import Path
from typing import Any

from peer_env import preloads, python_of
from tasks import Measurement, Task

MAX_TIE_GAP = 1e-3  # a lead in logits below which either token may come first
_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "bf16", "asimd")


ENVIRONMENT_OF = {"vllm": "vllm", "vllm-whitespace": "vllm", "llama.cpp": "llama.cpp"}
"""The environment of each system that has one of its own."""


def run_task(task: Task, peers: Path | None = None) -> Measurement:
    """Runs the task in a fresh process, so that peaks of memory are its own.

    ``peers``: where environments of peers lie. Raises `SystemExit` with what the process said
    when it fails.
    """
    python, variables = sys.executable, _variables(task)
    if (name := ENVIRONMENT_OF.get(task.system)) is not None:
        assert peers is not None, "a peer with an environment of its own needs their folder"
        found = python_of(peers, name)
        assert found is not None, f"{name} has no environment; see compare.why_not"
        python = str(found)
        variables["PATH"] = f"{found.parent}{os.pathsep}{os.environ['PATH']}"
        if name == "vllm":
            variables |= _vllm_variables(task, peers)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        given, got = Path(folder) / "task.json", Path(folder) / "result.json"
        given.write_text(json.dumps(asdict(task)), encoding="utf-8")
        script = Path(__file__).with_name("peers.py")
        done = subprocess.run(
            [python, str(script), str(given), str(got)],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{task.system} failed:\n{done.stdout[-4000:]}")
        return Measurement(**json.loads(got.read_text(encoding="utf-8")))


def _variables(task: Task) -> dict[str, str]:
    return dict(os.environ) | {
        "OMP_NUM_THREADS": str(task.threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads starve each other
        "TOKENIZERS_PARALLELISM": "true",
        "HF_HUB_OFFLINE": "1",
    }


def _vllm_variables(task: Task, peers: Path) -> dict[str, str]:
    """As its documentation advises for CPUs; it settles how its threads wait by itself."""
    cores = range(task.threads)
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))[: task.threads]  # type: ignore[assignment]
    return {
        "OMP_WAIT_POLICY": "",
        "LD_PRELOAD": os.pathsep.join(map(str, preloads(peers, "vllm"))),
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CACHE_ROOT": str(peers / "vllm-cache"),
        "VLLM_NO_USAGE_STATS": "1",
    }


def prefix_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Distinct tokens of the prompts' tree: those that are computed when none is twice."""
    order = sorted(prompts)
    num_tokens = len(order[0]) if order else 0
    for before, prompt in itertools.pairwise(order):
        pairs = zip(before, prompt, strict=False)
        num_tokens += len(prompt) - next(
            (n for n, (a, b) in enumerate(pairs) if a != b), min(len(before), len(prompt))
        )
    return num_tokens


def equal_tokens(ours: Mapping[str, list[int]], theirs: Mapping[str, list[int]]) -> float:
    """The share of their tokens, place by place, that we have too; both by prompt."""
    pairs = [(ours[prompt], answer) for prompt, answer in theirs.items()]
    num_equal = sum(sum(map(eq, mine, answer)) for mine, answer in pairs)
    return num_equal / max(1, sum(len(answer) for _, answer in pairs))


def disagreements(ours: Measurement, oracle: Measurement) -> tuple[list[str], int]:
    """What is wrong with our answers, a sentence a row, and the number of ties among them.

    Answers must be equal token for token. Where they part, the oracle's lead there must be at
    most `MAX_TIE_GAP` (a tie); what follows a tie is not compared.
    """
    wrong, num_ties = [], 0
    if ours.prompt_tokens != oracle.prompt_tokens:
        wrong.append(f"prompts have {ours.prompt_tokens} tokens, not {oracle.prompt_tokens}")
    triples = zip(ours.answers, oracle.answers, oracle.gaps, strict=True)
    for row, (mine, theirs, gaps) in enumerate(triples):
        if mine == theirs:
            continue
        pairs = enumerate(zip(mine, theirs, strict=False))
        place = next((n for n, (a, b) in pairs if a != b), min(len(mine), len(theirs)))
        if place < len(gaps) and gaps[place] <= MAX_TIE_GAP:
            num_ties += 1
        else:
            lead = f"{gaps[place]:.4f}" if place < len(gaps) else "the end"
            wrong.append(f"row {row} parts at token {place}, where the oracle leads by {lead}")
    return wrong, num_ties


def rates(results: Sequence[Measurement]) -> dict[str, Any]:
    """Medians over repeats, with all times, as they are printed and written."""
    last, run_s = results[-1], statistics.median(result.run_s for result in results)
    return {
        "rows": last.rows,
        "prompt_tokens": last.prompt_tokens,
        "output_tokens": last.output_tokens,
        "computed_tokens": last.computed_tokens,
        "recomputed_tokens": last.recomputed_tokens,
        "distinct_tokens": last.distinct_tokens,
        "steps": last.steps,
        "peak_kv_tokens": last.peak_kv_tokens,
        "run_s": [round(result.run_s, 3) for result in results],
        "prepare_s": [round(result.prepare_s, 3) for result in results],
        "load_s": [round(result.load_s, 3) for result in results],
        "cpu_s": [round(result.cpu_s, 3) for result in results],
        "median_run_s": round(run_s, 3),
        "rows_per_cpu_s": round(
            last.rows / max(statistics.median(result.cpu_s for result in results), 1e-9), 4
        ),
        "rows_per_s": round(last.rows / run_s, 4),
        "prompt_tokens_per_s": round(last.prompt_tokens / run_s, 1),
        "output_tokens_per_s": round(last.output_tokens / run_s, 2),
        "computed_share": round(last.computed_tokens / last.prompt_tokens, 4),
        "peak_rss_mib": round(max(result.peak_rss_bytes for result in results) / 2**20),
    }


def machine() -> dict[str, Any]:
    """Cores, instruction sets, memory and versions; nothing that names the machine."""
    try:
        cpuinfo = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        cpuinfo = set()
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    packages = ("torch", "transformers", "numpy", "xgrammar", "tokenizers")
    return {
        "cores": cores,
        "architecture": platform.machine(),
        "cpu_flags": [flag for flag in _FLAGS if flag in cpuinfo],
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "commit": _commit(),
    }


def _commit() -> str | None:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() or None


class StepTimes:
    """Seconds that an engine's steps took, on the clock and of the processor (all threads)."""

    def __init__(self) -> None:
        self.step_s = self.step_cpu_s = 0.0

    def watch(self, engine: Any) -> None:
        """Begins anew, with the steps of this engine."""
        self.step_s = self.step_cpu_s = 0.0
        step = engine.step

        def timed_step() -> Any:
            started_s, started_cpu_s = time.perf_counter(), time.process_time()
            finished = step()
            self.step_s += time.perf_counter() - started_s
            self.step_cpu_s += time.process_time() - started_cpu_s
            return finished

        engine.step = timed_step


def load_average() -> float:
    """Processes that want to run, averaged over a minute."""
    return round(os.getloadavg()[0], 2)
