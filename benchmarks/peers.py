"""The systems that are measured. Each runs in a process of its own, started by `measure`.

    python peers.py TASK.json RESULT.json

A task is ``{"system": NAME, "prompts": [...], "new_tokens": 20, "model": ..., "dtype": ...,
"threads": 2, "batch_size": 64}``; a result is a `Measurement` as JSON.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(_ROOT), str(_ROOT / "kernels")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a system is to do: greedy answers of ``new_tokens`` tokens to all ``prompts``."""

    system: str
    model: str
    dtype: str
    threads: int
    prompts: tuple[str, ...] = ()
    new_tokens: int = 1
    batch_size: int = 64
    want_gaps: bool = False


@dataclass(slots=True, kw_only=True)
class Measurement:
    """What a system did.

    ``run_s`` is from prompts as text to answers as tokens, without the time to load weights,
    which is ``load_s``; ``cpu_s`` is the processor time of all threads in ``run_s``, which a
    busy machine changes less. ``answers``: token ids by prompt; ``gaps``: the lead of each over
    the next likeliest, where they are asked for. ``peak_rss_bytes`` is of the whole process,
    loading included.
    """

    system: str
    rows: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    distinct_tokens: int = 0
    output_tokens: int = 0
    load_s: float = 0.0
    run_s: float = 0.0
    cpu_s: float = 0.0
    steps: int = 0
    peak_kv_tokens: int = 0
    peak_rss_bytes: int = 0
    gflops_per_s: float = 0.0
    answers: list[list[int]] = field(default_factory=list)
    gaps: list[list[float]] = field(default_factory=list)


def run_batchradix(task: Task) -> Measurement:
    """This package, by its pipeline, over rows in memory."""
    return _run_pipeline(task, prefix_cache=True)


def run_unshared(task: Task) -> Measurement:
    """This package with every prompt computed alone (``--no-prefix-cache``)."""
    return _run_pipeline(task, prefix_cache=False)


def _run_pipeline(task: Task, *, prefix_cache: bool) -> Measurement:
    from batchradix import pipeline
    from batchradix.config import EngineOptions, RunConfig, SamplingOptions
    from batchradix.types import Completion

    completions: list[Completion] = []
    load_cpu_s: list[float] = []

    class RecordingEngines(pipeline.RadixEngines):
        """The engine as ever, keeping what it yields: the table has texts, not tokens."""

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
        sampling=SamplingOptions(max_tokens=task.new_tokens),
        engine=EngineOptions(
            dtype=task.dtype,  # type: ignore[arg-type]  # checked by EngineOptions
            device="cpu",
            num_threads=task.threads,
            batch_size=task.batch_size,
            prefix_cache=prefix_cache,
        ),
    )
    started_cpu_s = time.process_time()
    summary = pipeline.run(config, engines=RecordingEngines).summary
    cpu_s = time.process_time() - started_cpu_s - load_cpu_s[0]
    if summary.ok != len(task.prompts):
        raise SystemExit(f"{len(task.prompts) - summary.ok} rows failed: {summary.error_codes}")
    answers: dict[int, list[int]] = {c.row: list(c.token_ids) for c in completions}
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
        run_s=summary.plan_s + summary.run_s,
        cpu_s=cpu_s,
        steps=usage.forward_steps,
        peak_kv_tokens=usage.peak_kv_tokens,
        answers=[answers[row] for row in range(len(task.prompts))],
    )


def run_transformers(task: Task) -> Measurement:
    """Plain ``generate`` of transformers on the same weights: left padding, prompts sorted by
    length so that a batch pads little."""
    import torch
    import transformers

    from batchradix.checkpoint.checkpoint import open_checkpoint

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    checkpoint = open_checkpoint(task.model)
    torch.set_num_threads(task.threads)
    started_s = time.monotonic()
    is_gguf = checkpoint.format == "gguf"
    folder = checkpoint.path.parent if is_gguf else checkpoint.path
    source: dict[str, Any] = {"gguf_file": checkpoint.path.name} if is_gguf else {}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **source)
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, task.dtype), **source
    ).eval()
    result = Measurement(system=task.system, rows=len(task.prompts))
    result.load_s = time.monotonic() - started_s

    started_s, started_cpu_s = time.monotonic(), time.process_time()
    eos_ids = list(checkpoint.tokenizer.eos_ids)
    encoded = tokenizer(list(task.prompts)).input_ids
    order = sorted(range(len(encoded)), key=lambda row: len(encoded[row]))
    result.answers = [[] for _ in encoded]
    result.gaps = [[] for _ in encoded]
    for start in range(0, len(order), task.batch_size):
        rows = order[start : start + task.batch_size]
        batch = tokenizer.pad({"input_ids": [encoded[row] for row in rows]}, return_tensors="pt")
        with torch.inference_mode():
            output = model.generate(
                **batch,
                do_sample=False,
                max_new_tokens=task.new_tokens,
                eos_token_id=eos_ids,
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
    "unshared": run_unshared,
    "transformers": run_transformers,
    "matmul": run_matmul,
}


def main() -> None:
    task = Task(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    result = SYSTEMS[task.system](task)
    # Linux counts KiB, macOS bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    result.peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    Path(sys.argv[2]).write_text(json.dumps(asdict(result)), encoding="utf-8")


if __name__ == "__main__":
    main()
