"""Measures batchradix beside its peers and writes what was seen as JSON.

    python benchmarks/run.py --rows 2000 --peers transformers --peer-rows 24

    python benchmarks/run.py --workload structured-6-fields --repeat 5

Before anything is timed, greedy float32 answers are compared with those of transformers; when
they are wrong there is no benchmark (exit code 1). All systems run the same weights, dtype,
threads and prompts and write as many tokens, each in a process of its own, in turns.

structured-6-fields compares batchradix with itself instead, its shortcuts on and off: the same
rows by several engines in turns (`structured`), and beside them an enum-of-8 classification.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from measure import (
    disagreements,
    load_average,
    machine,
    rates,
    run_task,
)
from peers import SYSTEMS, Measurement, Task
from structured import Setup, measure_modes, report_modes
from workloads import WORKLOADS, Workload, classification, extraction

RESULTS = Path(__file__).with_name("results")
STRUCTURED = "structured-6-fields"
PEERS = tuple(name for name in SYSTEMS if name not in ("batchradix", "matmul"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=(*WORKLOADS, STRUCTURED), default="shared-documents")
    parser.add_argument("--rows", type=int, help=f"default: 2000, all 60 of {STRUCTURED}")
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=20)
    parser.add_argument("--peers", default="transformers", help=f"of {', '.join(PEERS)}; a,b")
    parser.add_argument("--peer-rows", type=int, default=24, help="rows that slow peers get")
    parser.add_argument("--peer-batch-size", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--gate-rows", type=int, default=4)
    parser.add_argument("--enum-rows", type=int, default=256, help="rows to classify")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--out", type=Path, help="default: results/WORKLOAD-ROWS.json")
    options = parser.parse_args()
    if options.rows is None:
        options.rows = 60 if options.workload == STRUCTURED else 2000
    options.peers = [name for name in options.peers.split(",") if name]
    if unknown := set(options.peers).difference(PEERS):
        parser.error(f"there is no peer {', '.join(sorted(unknown))}; choose of {', '.join(PEERS)}")
    for name in (
        *("rows", "documents", "new_tokens", "peer_rows", "gate_rows", "enum_rows"),
        *("threads", "repeat"),
    ):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return options


def gate(base: Task, workload: Workload, num_rows: int) -> dict[str, Any]:
    """Compares float32 answers with transformers', one prompt at a time; exits if wrong."""
    prompts = workload.subset(num_rows).prompts
    task = replace(base, dtype="float32", prompts=prompts, new_tokens=workload.new_tokens)
    oracle = run_task(replace(task, system="transformers", batch_size=1, want_gaps=True))
    num_ties = 0
    for system in ("batchradix", "unshared"):
        wrong, ties = disagreements(run_task(replace(task, system=system)), oracle)
        if wrong:
            raise SystemExit(f"answers of {system} are wrong, not measuring: " + "; ".join(wrong))
        num_ties += ties
    print(f"gate: {num_rows} rows in float32 answered as transformers does, {num_ties} ties")
    return {"rows": num_rows, "ties": num_ties}


def prefill(base: Task, workload: Workload) -> dict[str, Any]:
    """Prompt tokens a second with nothing shared and one answer token, against the ceiling
    that the linear layers set at the machine's best matrix product."""
    from batchradix.checkpoint.checkpoint import open_checkpoint

    config = open_checkpoint(base.model).config
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
    flop_per_token = 2 * (config.num_parameters - embeddings)
    before = run_task(replace(base, system="matmul"))
    run = run_task(replace(base, system="unshared", prompts=workload.prompts, new_tokens=1))
    after = run_task(replace(base, system="matmul"))
    gflops_per_s = max(before.gflops_per_s, after.gflops_per_s)
    rate, ceiling = run.computed_tokens / run.run_s, gflops_per_s * 1e9 / flop_per_token
    return {
        "rows": run.rows,
        "tokens_per_s": round(rate, 1),
        "matmul_gflops_per_s": round(gflops_per_s, 1),
        "linear_gflop_per_token": round(flop_per_token / 1e9, 4),
        "ceiling_tokens_per_s": round(ceiling, 1),
        "share_of_ceiling": round(rate / ceiling, 4),
    }


def measure_all(
    base: Task, workload: Workload, options: argparse.Namespace
) -> dict[str, list[Measurement]]:
    """All systems in turns, ``repeat`` times; peers get a subset."""
    few = workload.subset(options.peer_rows)
    results: dict[str, list[Measurement]] = defaultdict(list)
    for turn in range(options.repeat):
        for system in ("batchradix", *options.peers):
            is_peer = system != "batchradix"
            task = replace(
                base,
                system=system,
                prompts=(few if is_peer else workload).prompts,
                new_tokens=workload.new_tokens,
                batch_size=options.peer_batch_size if system == "transformers" else base.batch_size,
            )
            result = run_task(task)
            results[system].append(result)
            print(
                f"turn {turn + 1}: {system} ran {result.rows:,} rows in {result.run_s:.1f} s "
                f"(load average {load_average()})",
                flush=True,
            )
    return results


def report(record: dict[str, Any]) -> None:
    """The table that a person reads."""
    columns = (
        "rows",
        "run s",
        "rows/s",
        "prompt tok/s",
        "output tok/s",
        "computed",
        "MiB",
        "ratio",
    )
    print(f"\n{'':14}" + "".join(f"{name:>13}" for name in columns))
    for system, numbers in record["systems"].items():
        cells = (
            f"{numbers['rows']:,}",
            f"{numbers['median_run_s']:,.1f}",
            f"{numbers['rows_per_s']:.2f}",
            f"{numbers['rows_per_cpu_s']:.3f}",
            f"{numbers['prompt_tokens_per_s']:,.0f}",
            f"{numbers['output_tokens_per_s']:,.1f}",
            f"{numbers['computed_share']:.1%}",
            f"{numbers['peak_rss_mib']:,}",
            f"{record['ratios'][system]['wall']:.2f}",
            f"{record['ratios'][system]['cpu']:.2f}",
        )
        print(f"{system:14}" + "".join(f"{cell:>13}" for cell in cells))
    print(
        "ratio: rows a second of batchradix over the system's; cpu: rows a second of processor "
        "time\n"
    )
    filled = record["prefill"]
    print(
        f"prefill: {filled['tokens_per_s']:,.0f} tokens/s with nothing shared, "
        f"{filled['share_of_ceiling']:.1%} of the linear layers' ceiling of "
        f"{filled['ceiling_tokens_per_s']:,.0f} "
        f"(matmul {filled['matmul_gflops_per_s']:,.0f} GFLOP/s)"
    )


def measure_structured(options: argparse.Namespace) -> dict[str, Any]:
    """Shortcuts on and off over extraction and classification, printed as they are done."""
    setup = Setup(
        model=options.model,
        dtype=options.dtype,
        threads=options.threads,
        batch_size=options.batch_size,
        repeat=options.repeat,
    )
    load_before = load_average()
    workloads = {}
    for workload in (extraction(options.rows), classification(options.enum_rows)):
        workloads[workload.name] = measure_modes(setup, workload)
        report_modes(workload.name, workloads[workload.name])
    return {
        "workloads": workloads,
        "settings": asdict(setup),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "load_average": {"before": load_before, "after": load_average()},
    }


def measure_shared(options: argparse.Namespace) -> dict[str, Any]:
    """batchradix beside its peers, gate first, printed at the end."""
    workload = WORKLOADS[options.workload](
        options.rows, num_documents=options.documents, new_tokens=options.new_tokens
    )
    base = Task(
        system="",
        model=options.model,
        dtype=options.dtype,
        threads=options.threads,
        batch_size=options.batch_size,
    )
    load_before = load_average()
    checked = gate(base, workload, options.gate_rows)
    filled = prefill(base, workload.subset(options.peer_rows))
    results = measure_all(base, workload, options)
    systems = {system: rates(runs) for system, runs in results.items()}
    ours = systems["batchradix"]
    record = {
        "workload": {
            "name": workload.name,
            "digest": workload.digest,
            "rows": options.rows,
            "documents": options.documents,
            "new_tokens": options.new_tokens,
            "peer_rows": options.peer_rows,
        },
        "settings": {
            "model": options.model,
            "dtype": options.dtype,
            "threads": options.threads,
            "batch_size": options.batch_size,
            "peer_batch_size": options.peer_batch_size,
            "repeat": options.repeat,
        },
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "load_average": {"before": load_before, "after": load_average()},
        "gate": checked,
        "prefill": filled,
        "systems": systems,
        "ratios": {
            system: {
                "wall": round(ours["rows_per_s"] / numbers["rows_per_s"], 3),
                "cpu": round(ours["rows_per_cpu_s"] / numbers["rows_per_cpu_s"], 3),
            }
            for system, numbers in systems.items()
        },
    }
    report(record)
    return record


def main() -> None:
    options = parse()
    if options.workload == STRUCTURED:
        record, name = measure_structured(options), STRUCTURED
    else:
        record, name = measure_shared(options), f"{options.workload}-{options.rows}"
    out = options.out or RESULTS / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
