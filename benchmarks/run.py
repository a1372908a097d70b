"""Measures batchradix beside its peers and writes what was seen as JSON.

    python benchmarks/peer_env.py vllm llama.cpp
    python benchmarks/run.py --workload shared-documents --peers vllm,llama.cpp --repeat 3
    python benchmarks/run.py --workload all --peers vllm,llama.cpp --repeat 3

Before anything is timed, greedy float32 answers are compared with those of transformers; when
they are wrong there is no benchmark (exit code 1). All systems run the same weights, dtype,
threads and prompts and write as many tokens, each in a process of its own, in turns.

structured-6-fields compares batchradix with itself instead, its shortcuts on and off: the same
rows by several engines in turns (`structured`), and beside them an enum-of-8 classification.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from compare import (
    ENGINES,
    PEERS,
    Comparison,
    gate,
    measure_all,
    prefill,
    ratios,
    turns,
    why_not,
)
from measure import ENVIRONMENT_OF, load_average, machine, prefix_tokens
from peer_env import peers_folder, versions_of
from peer_models import DTYPE, peer_model
from structured import Setup, measure_modes, report_modes
from tasks import Task
from workloads import OVER_DOCUMENTS, WORKLOADS, Workload, classification, extraction

RESULTS = Path(__file__).with_name("results")
STRUCTURED = "structured-6-fields"
ALL = "all"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workload", choices=(*WORKLOADS, ALL, STRUCTURED), default="shared-documents"
    )
    parser.add_argument("--rows", type=int, help="default: the workload's own")
    parser.add_argument("--documents", type=int, help=f"of {', '.join(OVER_DOCUMENTS)}")
    parser.add_argument("--new-tokens", type=int, help="default: the workload's own")
    parser.add_argument("--engines", default="batchradix", help=f"of {', '.join(ENGINES)}; a,b")
    parser.add_argument("--peers", default="transformers", help=f"of {', '.join(PEERS)}; a,b")
    parser.add_argument("--peers-folder", type=Path, help="as in peer_env.py")
    parser.add_argument("--peer-rows", type=int, default=24, help="rows that slow peers get")
    parser.add_argument("--peer-batch-size", type=int, help="default: each peer's best")
    parser.add_argument("--batch-size", type=int, help="default: batchradix's own")
    parser.add_argument("--gate-rows", type=int, help="default: 4, of long prompts 1")
    parser.add_argument("--enum-rows", type=int, default=256, help="rows to classify")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument(
        "--out", type=Path, help="default: results/WORKLOAD-ROWS.json; a folder with all"
    )
    options = parser.parse_args()
    for name, known in (("engines", tuple(ENGINES)), ("peers", PEERS)):
        given = [each for each in getattr(options, name).split(",") if each]
        if unknown := set(given).difference(known):
            parser.error(
                f"--{name}: there is no {', '.join(sorted(unknown))}; choose of {', '.join(known)}"
            )
        setattr(options, name, given)
    rounded = sorted(ENVIRONMENT_OF.keys() & options.peers)
    if rounded and options.dtype != DTYPE:
        parser.error(f"{', '.join(rounded)} get the model in {DTYPE}; leave --dtype out")
    if "batchradix" not in options.engines:
        options.engines.insert(0, "batchradix")  # answers are compared with its
    for name in (
        *("rows", "documents", "new_tokens", "peer_rows", "peer_batch_size", "batch_size"),
        *("gate_rows", "enum_rows", "threads", "repeat"),
    ):
        number = getattr(options, name)
        if number is not None and number < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return options


def make_workload(name: str, options: argparse.Namespace) -> Workload:
    """The workload by its own sizes, but for those that were asked for."""
    sizes = {}
    if options.rows is not None:
        sizes["num_rows"] = options.rows
    if options.documents is not None and name in OVER_DOCUMENTS:
        sizes["num_documents"] = options.documents
    workload = WORKLOADS[name](**sizes)
    if options.new_tokens is not None:
        workload = replace(workload, new_tokens=options.new_tokens)
    return workload


def compare(workload: Workload, options: argparse.Namespace) -> dict[str, Any]:
    """batchradix beside its peers on one workload, gate first, printed at the end."""
    from batchradix.checkpoint.checkpoint import open_checkpoint

    folder = peers_folder(options.peers_folder)
    engines = _present(options.engines, workload, folder)
    peers = _present(options.peers, workload, folder)
    checkpoint = open_checkpoint(options.model, notify=print)
    encoder = checkpoint.tokenizer
    encoded = encoder.encode_plain(list(workload.prompts), [True] * workload.num_rows)
    around = (encoder.prefix_ids, encoder.suffix_ids)
    ids = [(*around[0], *each, *around[1]) for each in encoded]
    comparison = Comparison(
        base=Task(
            system="",
            model=options.model,
            dtype=options.dtype,
            threads=options.threads,
            batch_size=options.batch_size,
        ),
        workload=workload,
        prompt_ids=dict(zip(workload.prompts, ids, strict=True)),
        models={
            peer: peer_model(folder, checkpoint, peer) for peer in peers if peer in ENVIRONMENT_OF
        },
        peers=folder,
        peer_rows=options.peer_rows,
        peer_batch_size=options.peer_batch_size,
    )
    load_before = load_average()
    checked = gate(comparison, options.gate_rows)
    filled = prefill(comparison)
    systems = measure_all(comparison, turns(engines, peers, workload), options.repeat)
    environments = sorted({ENVIRONMENT_OF[peer] for peer in comparison.models})
    record = {
        "workload": _about(comparison),
        "settings": {
            "model": options.model,
            "dtype": options.dtype,
            "threads": options.threads,
            "repeat": options.repeat,
        },
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "peer_versions": {name: versions_of(folder, name) for name in environments},
        "load_average": {"before": load_before, "after": load_average()},
        "gate": checked,
        "prefill": filled,
        "systems": systems,
        "ratios": ratios(systems, engines),
    }
    report(record)
    return record


def _present(names: Sequence[str], workload: Workload, folder: Path) -> list[str]:
    """Those systems that can run here; of each other one a sentence is printed."""
    reasons = {name: why_not(name, workload, folder) for name in names}
    for reason in filter(None, reasons.values()):
        print(reason, flush=True)
    return [name for name, reason in reasons.items() if reason is None]


def _about(comparison: Comparison) -> dict[str, Any]:
    workload, ids = comparison.workload, list(comparison.prompt_ids.values())
    num_tokens, num_distinct = sum(map(len, ids)), prefix_tokens(ids)
    return {
        "name": workload.name,
        "digest": workload.digest,
        "rows": workload.num_rows,
        "prompt_tokens": num_tokens,
        "distinct_tokens": num_distinct,
        "shareable_share": round(1 - num_distinct / num_tokens, 4),
        "new_tokens": workload.new_tokens,
        "kv_tokens": comparison.kv_tokens,
        "peer_rows": comparison.peer_rows,
    }


def report(record: dict[str, Any]) -> None:
    """The table that a person reads."""
    about, all_ratios = record["workload"], record["ratios"]
    print(
        f"\n{about['name']}: {about['rows']:,} rows, {about['prompt_tokens']:,} prompt tokens, "
        f"{about['distinct_tokens']:,} distinct ({about['shareable_share']:.1%} shareable)"
    )
    columns = ["rows", "start s", "run s", "rows/s", "complete", "prompt tok/s", "output tok/s"]
    columns += ["computed", "equal", "MiB", *all_ratios]
    print(f"{'':20}" + "".join(f"{name:>{max(13, len(name) + 2)}}" for name in columns))
    for system, numbers in record["systems"].items():
        cells = [
            f"{numbers['rows']:,}",
            f"{numbers['load_s'][-1] + numbers['prepare_s'][-1]:,.1f}",
            f"{numbers['median_run_s']:,.1f}",
            f"{numbers['rows_per_s']:.2f}",
            f"{numbers['complete']:,}" if "complete" in numbers else "-",
            f"{numbers['prompt_tokens_per_s']:,.0f}",
            f"{numbers['output_tokens_per_s']:,.1f}",
            f"{numbers['computed_share']:.1%}",
            f"{numbers['equal_tokens']:.1%}" if "equal_tokens" in numbers else "-",
            f"{numbers['peak_rss_mib']:,}",
        ]
        for over in all_ratios.values():
            ratio = over.get(system, {}).get("wall")
            cells.append("-" if ratio is None else f"{ratio:.2f}x")
        widths = [max(13, len(name) + 2) for name in columns]
        print(
            f"{system:20}"
            + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        )
    print("the last columns: times the system's rows a second (of complete values, with a schema)")
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
        batch_size=options.batch_size or 64,
        repeat=options.repeat,
    )
    load_before = load_average()
    workloads = {}
    for workload in (extraction(options.rows or 60), classification(options.enum_rows)):
        workloads[workload.name] = measure_modes(setup, workload)
        report_modes(workload.name, workloads[workload.name])
    return {
        "workloads": workloads,
        "settings": asdict(setup),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "load_average": {"before": load_before, "after": load_average()},
    }


def write(record: dict[str, Any], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"written to {out}", flush=True)


def main() -> None:
    options = parse()
    if options.workload == STRUCTURED:
        write(measure_structured(options), options.out or RESULTS / f"{STRUCTURED}.json")
        return
    for name in WORKLOADS if options.workload == ALL else (options.workload,):
        workload = make_workload(name, options)
        out = options.out or RESULTS
        if options.out is None or options.workload == ALL:
            out = out / f"{name}-{workload.num_rows}.json"
        write(compare(workload, options), out)


if __name__ == "__main__":
    main()
