"""The picture of a run: one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchradix.report.charts import hit_share, timeline, tree
from batchradix.report.figures import figures
from batchradix.report.pages import render_page
from batchradix.report.trace import TracedRun

_MOST_RUNS = 50  # in the table; older ones are in the totals


def page(runs: Sequence[TracedRun], title: str) -> str:
    """The whole page. Its size does not grow with rows or steps; there is no script in it.

    The plan that is drawn is that of the run with most to compute.
    """
    largest = max(runs, key=lambda run: int(run.plan.facts["distinct_tokens"]))
    numbers = figures(runs)
    return render_page(
        "page.html.jinja",
        title,
        tables=[_totals(numbers), _runs(numbers["runs"][-_MOST_RUNS:])],
        timeline=timeline(runs),
        hits=hit_share(largest.plan),
        tree=tree(largest.plan),
        tree_run=f", of run {largest.number}" if len(runs) > 1 else "",
    )


def lines(numbers: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and value pairs of `figures` for a person."""
    seconds, total_s = numbers["seconds"], numbers["seconds"]["total"]
    parts = [
        f"{name} {value / total_s:.1%}"
        for name, value in seconds.items()
        if name != "total" and total_s
    ]
    num_runs = len(numbers["runs"])
    runs = f" of {num_runs:,} runs" if num_runs > 1 else ""
    plans = f", by the plans of {num_runs:,} runs together" if num_runs > 1 else ""
    planned = sum(run["predicted"]["planned_tokens"] for run in numbers["runs"])
    distinct = sum(run["predicted"]["distinct_tokens"] for run in numbers["runs"])
    return [
        ("steps", f"{numbers['steps']:,} in {total_s:,.1f} s" + runs),
        ("rows", f"{numbers['finished_rows']:,} finished ({_rate(numbers['rows_per_second'])}/s)"),
        ("predicted", f"{distinct:,} of {planned:,} prompt tokens to compute{plans}"),
        (
            "achieved",
            f"{numbers['computed_tokens']:,} computed, {numbers['recomputed_tokens']:,} again, "
            f"{numbers['cached_tokens']:,} found in the cache"
            + (f", {numbers['loaded_tokens']:,} loaded" if numbers["loaded_tokens"] else ""),
        ),
        ("tokens", ", ".join(f"{count:,} {kind}" for kind, count in numbers["kinds"].items())),
        ("time", ", ".join(parts)),
        (
            "memory",
            f"{numbers['peak_kv_tokens']:,} KV tokens at most, "
            f"{numbers['evicted_tokens']:,} evicted, {numbers['preemptions']:,} preemptions",
        ),
    ]


def _totals(numbers: Mapping[str, Any]) -> list[list[str]]:
    return [["", ""], *(list(line) for line in lines(numbers))]


def _runs(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    heads = ["run", "begun", "model", "rows", "finished", "seconds", "distinct", "computed"]
    heads += ["again", "shared, predicted", "shared, achieved", "KV pool", "most taken"]
    return [
        heads,
        *(
            [
                str(run["run"]),
                str(run["started"]),
                f"{run['model']} in {run['dtype']}",
                f"{run['rows']:,}",
                f"{run['finished_rows']:,}",
                f"{run['seconds']['total']:,.1f}",
                f"{run['predicted']['distinct_tokens']:,}",
                f"{run['computed_tokens']:,}",
                f"{run['recomputed_tokens']:,}",
                f"{run['predicted']['cached_tokens']:,}",
                f"{run['cached_tokens']:,}",
                f"{run['kv_tokens']:,}",
                f"{run['peak_kv_tokens']:,}",
            ]
            for run in runs
        ),
    ]


def _rate(value: float | None) -> str:
    return "0" if value is None else f"{value:,.3g}"
