"""vLLM over token ids, run by the interpreter of its own environment.

Block size 32, prefix caching and, under a schema, JSON without white space: the settings that
were fastest (vllm-whitespace leaves white space to the model, as vLLM does by default).
"""

from __future__ import annotations

import os
import time
from typing import Any

from tasks import Measurement, Task

BLOCK_SIZE = 32
KV_SPACE_GIB = 4  # far more than any workload needs that sets no limit


def run_vllm(task: Task) -> Measurement:
    """All rows in one ``generate`` call, in the order given."""
    import psutil
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    started_s = time.monotonic()
    longest = max(map(len, task.prompt_ids)) + task.new_tokens
    settings: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "enable_prefix_caching": True,
        "max_model_len": -(-longest // BLOCK_SIZE) * BLOCK_SIZE,
    }
    if task.kv_tokens is not None:
        # Its first block never holds a token.
        settings["num_gpu_blocks_override"] = task.kv_tokens // BLOCK_SIZE + 1
    if task.batch_size is not None:
        settings["max_num_seqs"] = task.batch_size
    structured = None
    if task.schema is not None:
        compact = task.system != "vllm-whitespace"
        settings["structured_outputs_config"] = {
            "backend": "xgrammar",
            "disable_any_whitespace": compact,
        }
        structured = StructuredOutputsParams(json=dict(task.schema))
    llm = LLM(model=task.model, dtype=task.dtype, disable_log_stats=True, **settings)
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=task.new_tokens,
        ignore_eos=task.ignore_eos,
        structured_outputs=structured,
    )
    prompts: Any = [{"prompt_token_ids": list(ids)} for ids in task.prompt_ids]
    load_s = time.monotonic() - started_s

    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    started_s, started_cpu_s = time.monotonic(), _cpu_s(processes)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    run_s, cpu_s = time.monotonic() - started_s, _cpu_s(processes) - started_cpu_s
    prompt_tokens = sum(map(len, task.prompt_ids))
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    return Measurement(
        system=task.system,
        rows=len(outputs),
        prompt_tokens=prompt_tokens,
        # Of a row that was preempted this counts what its last start found.
        computed_tokens=prompt_tokens - sum(output.num_cached_tokens or 0 for output in outputs),
        output_tokens=sum(map(len, answers)),
        load_s=load_s,
        run_s=run_s,
        cpu_s=cpu_s,
        peak_rss_bytes=sum(map(_peak_rss_bytes, processes)),
        settings={
            **settings,
            "preloaded": [
                os.path.basename(path) for path in os.environ.get("LD_PRELOAD", "").split(":")
            ],
            "omp_threads_bind": os.environ.get("VLLM_CPU_OMP_THREADS_BIND"),
        },
        answers=answers,
        texts=[output.outputs[0].text for output in outputs] if task.schema else [],
    )


def _cpu_s(processes: list[Any]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


def _peak_rss_bytes(process: Any) -> int:
    """What Linux says, else what is resident now."""
    try:
        with open(f"/proc/{process.pid}/status", encoding="utf-8") as status:
            peak = next(line for line in status if line.startswith("VmHWM"))
            return int(peak.split()[1]) * 1024
    except (OSError, StopIteration):
        return int(process.memory_info().rss)
