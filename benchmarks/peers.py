"""The systems that are measured. Each runs in a process of its own, started by `measure`.

    python peers.py TASK.json RESULT.json

The interpreter is that of the system's own environment, where it has one (`peer_env`), so what a
system imports it imports when it runs.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llama_peer import run_llama_cpp
from tasks import Measurement, Task
from vllm_peer import run_vllm

_ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(_ROOT), str(_ROOT / "kernels")]

TRANSFORMERS_BATCH_SIZE = 8


def run_batchradix(task: Task) -> Measurement:
    """This package, by its pipeline, over rows in memory."""
    from batchradix import pipeline
    from batchradix.config import EngineOptions, RunConfig, SamplingOptions
    from batchradix.types import Completion

    completions: list[Completion] = []
    load_cpu_s: list[float] = []

    class RecordingEngines(pipeline.RadixEngines):
        """The engine as ever, keeping what it yields: the table has texts, not tokens."""

        def __init__(self, checkpoint: Any, schema: Any = None) -> None:
            if task.ignore_eos:
                checkpoint.tokenizer.eos_ids = ()  # then nothing but max_tokens ends an answer
            super().__init__(checkpoint, schema)

        def __call__(self, settings: Any) -> Any:
            started_cpu_s = time.process_time()
            engine = super().__call__(settings)
            load_cpu_s.append(time.process_time() - started_cpu_s)
            step = engine.step

            def recorded_step() -> list[Completion]:
                finished = step()
                completions.extend(finished)
                return finished

            engine.step = recorded_step  # type: ignore[method-assign]
            return engine

    config = RunConfig(
        input=[{"prompt": prompt} for prompt in task.prompts],
        model=task.model,
        schema=task.schema,
        sampling=SamplingOptions(max_tokens=task.new_tokens),
        engine=EngineOptions(
            dtype=task.dtype,  # type: ignore[arg-type]  # checked by EngineOptions
            device="cpu",
            num_threads=task.threads,
            batch_size=task.batch_size,
            kv_tokens=task.kv_tokens,
            **task.engine,
        ),
    )
    started_cpu_s = time.process_time()
    summary = pipeline.run(config, engines=RecordingEngines).summary
    cpu_s = time.process_time() - started_cpu_s - load_cpu_s[0]
    if task.schema is None and summary.ok != len(task.prompts):
        raise SystemExit(f"{len(task.prompts) - summary.ok} rows failed: {summary.error_codes}")
    by_row = {completion.row: completion for completion in completions}
    answers = [by_row[row] for row in range(len(task.prompts))]
    usage = summary.usage
    return Measurement(
        system=task.system,
        rows=summary.rows,
        prompt_tokens=summary.prompt_tokens,
        computed_tokens=usage.computed_tokens,
        recomputed_tokens=usage.recomputed_tokens,
        distinct_tokens=summary.distinct_tokens,
        output_tokens=summary.completion_tokens,
        load_s=summary.load_s,
        prepare_s=summary.plan_s,
        run_s=summary.run_s,
        cpu_s=cpu_s,
        steps=usage.forward_steps,
        peak_kv_tokens=usage.peak_kv_tokens,
        settings=dict(task.engine),
        answers=[list(answer.token_ids) for answer in answers],
        # A cut answer is closed to valid JSON here, but is no complete one.
        texts=[answer.text if answer.finish_reason == "stop" else "" for answer in answers]
        if task.schema
        else [],
    )


def run_transformers(task: Task) -> Measurement:
    """Plain ``generate`` of transformers on the same weights: left padding, prompts sorted by
    length so that a batch pads little."""
    import torch
    from peer_models import load_transformers

    from batchradix.checkpoint.checkpoint import open_checkpoint

    torch.set_num_threads(task.threads)
    started_s = time.monotonic()
    checkpoint = open_checkpoint(task.model)
    tokenizer, model = load_transformers(checkpoint, task.dtype)
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    load_s = time.monotonic() - started_s

    encoded = [list(ids) for ids in task.prompt_ids] or tokenizer(list(task.prompts)).input_ids
    result = Measurement(system=task.system, rows=len(encoded), load_s=load_s)
    eos_ids = [] if task.ignore_eos else list(checkpoint.tokenizer.eos_ids)
    batch_size = task.batch_size or TRANSFORMERS_BATCH_SIZE
    started_s, started_cpu_s = time.monotonic(), time.process_time()
    order = sorted(range(len(encoded)), key=lambda row: len(encoded[row]))
    result.answers = [[] for _ in encoded]
    result.gaps = [[] for _ in encoded]
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        batch = tokenizer.pad({"input_ids": [encoded[row] for row in rows]}, return_tensors="pt")
        with torch.inference_mode():
            output = model.generate(
                **batch,
                do_sample=False,
                max_new_tokens=task.new_tokens,
                min_new_tokens=task.new_tokens if task.ignore_eos else None,
                eos_token_id=eos_ids or None,
                pad_token_id=tokenizer.pad_token_id,
                return_dict_in_generate=True,
                output_logits=task.want_gaps,
            )
        _take_batch(result, rows, output, width=batch.input_ids.shape[1], eos_ids=eos_ids)
        if task.want_gaps:
            top_TB2 = torch.stack(output.logits).float().topk(2, dim=-1).values
            gaps_BT = (top_TB2[..., 0] - top_TB2[..., 1]).T.tolist()
            for place, row in enumerate(rows):
                result.gaps[row] = gaps_BT[place][: len(result.answers[row])]
    result.run_s = time.monotonic() - started_s
    result.cpu_s = time.process_time() - started_cpu_s
    result.prompt_tokens = result.computed_tokens = sum(map(len, encoded))
    return result


def _take_batch(
    result: Measurement, rows: list[int], output: Any, *, width: int, eos_ids: list[int]
) -> None:
    """Takes each row's answer up to its end-of-sequence token out of what ``generate`` gave."""
    for place, row in enumerate(rows):
        ids = output.sequences[place, width:].tolist()
        ends = [n for n, token in enumerate(ids) if token in eos_ids]
        result.output_tokens += ends[0] + 1 if ends else len(ids)
        result.answers[row] = ids[: ends[0]] if ends else ids
    result.steps += output.sequences.shape[1] - width


def run_matmul(task: Task) -> Measurement:
    """The machine's best matrix product in this dtype, the ceiling of a linear layer."""
    import torch

    torch.set_num_threads(task.threads)
    size = 2048
    a, b = (torch.randn(size, size).to(getattr(torch, task.dtype)) for _ in range(2))
    best_s, started_s = float("inf"), time.monotonic()
    while time.monotonic() - started_s < 3:
        before_s = time.perf_counter()
        torch.mm(a, b)
        best_s = min(best_s, time.perf_counter() - before_s)
    return Measurement(system=task.system, gflops_per_s=2 * size**3 / best_s / 1e9)


SYSTEMS: Mapping[str, Callable[[Task], Measurement]] = {
    "batchradix": run_batchradix,
    "transformers": run_transformers,
    "vllm": run_vllm,
    "vllm-whitespace": run_vllm,
    "llama.cpp": run_llama_cpp,
    "matmul": run_matmul,
}


def main() -> None:
    task = Task(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    if hasattr(os, "sched_setaffinity"):
        # All systems on the same cores, threads that they start included.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: task.threads])
    # Variants of this package (batchradix-int8) are one system with other engine options.
    result = SYSTEMS.get(task.system, run_batchradix)(task)
    if not result.peak_rss_bytes:
        # Linux counts KiB, macOS bytes.
        unit = 1 if sys.platform == "darwin" else 1024
        result.peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    Path(sys.argv[2]).write_text(json.dumps(asdict(result)), encoding="utf-8")


if __name__ == "__main__":
    main()
