"""The end of a run as a Prometheus text file, for node_exporter's textfile collector."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from batchradix.report.summary import Summary

_HELP = {
    "rows": "Rows of the finished table, by status.",
    "rows_left": "Rows that have no result yet.",
    "prompt_tokens": "Prompt tokens of all rows.",
    "distinct_tokens": "Prompt tokens that no other row shares or that are counted once.",
    "computed_tokens": "Prompt tokens that went through the model in this run.",
    "loaded_tokens": "Prompt tokens that came from the KV store instead.",
    "recomputed_tokens": "Tokens that went through the model again in this run.",
    "completion_tokens": "Answer tokens of all rows.",
    "forced_tokens": "Answer tokens of this run that were not sampled.",
    "decode_steps": "Row and forward pass pairs of this run that led to a sampled token.",
    "forward_steps": "Forward passes of this run.",
    "peak_kv_tokens": "Most KV tokens in use at once.",
    "peak_rss_bytes": "Most resident memory.",
    "seconds": "Duration of this run, by part.",
    "exit_code": "Exit code of this run.",
    "finished_timestamp_seconds": "When this run ended.",
}


def metrics_text(summary: Summary, exit_code: int, finished_s: float, job: str) -> str:
    """Gauges named ``batchradix_…`` with the label ``job``, in the text exposition format.

    ``finished_s``: seconds since the epoch.
    """
    usage = summary.usage
    label = _quoted(job)
    values: Mapping[str, Mapping[str, float]] = {
        "rows": {
            f'job={label},status="ok"': summary.ok,
            f'job={label},status="truncated"': summary.truncated,
            f'job={label},status="error"': summary.errors,
        },
        "rows_left": {f"job={label}": summary.rows_left},
        "prompt_tokens": {f"job={label}": summary.prompt_tokens},
        "distinct_tokens": {f"job={label}": summary.distinct_tokens},
        "computed_tokens": {f"job={label}": usage.computed_tokens},
        "loaded_tokens": {f"job={label}": usage.loaded_tokens},
        "recomputed_tokens": {f"job={label}": usage.recomputed_tokens},
        "completion_tokens": {f"job={label}": summary.completion_tokens},
        "forced_tokens": {f"job={label}": usage.forced_tokens},
        "decode_steps": {f"job={label}": usage.decode_steps},
        "forward_steps": {f"job={label}": usage.forward_steps},
        "peak_kv_tokens": {f"job={label}": usage.peak_kv_tokens},
        "peak_rss_bytes": {f"job={label}": summary.peak_rss_bytes},
        "seconds": {
            f'job={label},part="load"': summary.load_s,
            f'job={label},part="plan"': summary.plan_s,
            f'job={label},part="run"': summary.run_s,
        },
        "exit_code": {f"job={label}": exit_code},
        "finished_timestamp_seconds": {f"job={label}": finished_s},
    }
    lines = []
    for name, samples in values.items():
        lines += [f"# HELP batchradix_{name} {_HELP[name]}", f"# TYPE batchradix_{name} gauge"]
        lines += [f"batchradix_{name}{{{labels}}} {value}" for labels, value in samples.items()]
    return "\n".join(lines) + "\n"


def write_metrics(path: Path, text: str) -> None:
    """Replaces the file at once, so that a collector never reads half of it.

    Raises `OSError` when it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
