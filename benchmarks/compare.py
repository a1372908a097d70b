"""One workload by every system in turns: checked before, measured, compared after."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from measure import (
    ENVIRONMENT_OF,
    disagreements,
    equal_tokens,
    load_average,
    prefix_tokens,
    rates,
    run_task,
)
from peer_env import python_of
from peers import SYSTEMS
from tasks import Measurement, Task
from workloads import Workload

ENGINES: Mapping[str, Mapping[str, Any]] = {
    "batchradix": {},
    "batchradix-int8": {"quantize": "int8"},
    "batchradix-deterministic": {"deterministic": True},
    "batchradix-no-cache": {"prefix_cache": False},
}
"""This package by its defaults and with other engine options, by the names of the variants."""

UNSHARED = {"prefix_cache": False}
PEERS = ("unshared", *(name for name in SYSTEMS if name not in ("batchradix", "matmul")))
SLOW_PEERS = ("unshared", "transformers")  # get a part of the rows
WITHOUT_SCHEMAS = ("transformers",)

_GATE_TOKENS = 20
_LONG_PROMPT_TOKENS = 2000  # from here on one row is enough for the gate
_PREFILL_TOKENS = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A system as it is measured: ``name`` is what reports call it."""

    name: str
    system: str
    order: str = "shuffled"
    engine: Mapping[str, Any] | None = None  # of variants of this package


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What stays the same over all turns. ``prompt_ids`` are the workload's prompts as tokens;
    ``models``: what each peer with an environment of its own reads; ``peers``: where those are.
    ``peer_rows``: rows that slow peers get."""

    base: Task
    workload: Workload
    prompt_ids: Mapping[str, tuple[int, ...]]
    models: Mapping[str, Path]
    peers: Path
    peer_rows: int
    peer_batch_size: int | None

    @property
    def kv_tokens(self) -> int | None:
        """Tokens that the pool holds, None for as many as the system likes."""
        if self.workload.kv_share is None:
            return None
        longest = max(map(len, self.prompt_ids.values())) + self.workload.new_tokens
        distinct = prefix_tokens(list(self.prompt_ids.values()))
        return max(longest, int(distinct * self.workload.kv_share))

    def task(self, turn: Turn) -> tuple[Task, Sequence[str]]:
        """The task of a turn, and its prompts in the order in which it gets them."""
        workload = self.workload
        prompts = workload.prompts
        if turn.system in SLOW_PEERS:
            prompts = workload.subset(self.peer_rows).prompts
        if turn.order == "sorted":
            prompts = tuple(sorted(prompts, key=self.prompt_ids.__getitem__))
        is_ours = turn.engine is not None
        task = replace(
            self.base,
            system=turn.system,
            model=str(self.models.get(turn.system, self.base.model)),
            prompts=prompts if is_ours else (),
            prompt_ids=() if is_ours else tuple(self.prompt_ids[prompt] for prompt in prompts),
            new_tokens=workload.new_tokens,
            ignore_eos=workload.schema is None,
            schema=workload.schema,
            kv_tokens=self.kv_tokens,
            batch_size=self.base.batch_size if is_ours else self.peer_batch_size,
            engine=turn.engine or {},
        )
        return task, prompts


def why_not(system: str, workload: Workload, peers: Path) -> str | None:
    """A sentence why a system cannot be measured here, None if it can."""
    from batchradix.config import EngineOptions

    options = ENGINES.get(system, {})
    if missing := set(options).difference(field.name for field in fields(EngineOptions)):
        return f"{system} is skipped: this batchradix has no option {', '.join(sorted(missing))}"
    name = ENVIRONMENT_OF.get(system)
    if name is not None and python_of(peers, name) is None:
        return (
            f"{system} is skipped: it has no environment in {peers}; "
            f"python benchmarks/peer_env.py {name} makes one"
        )
    if system in WITHOUT_SCHEMAS and workload.schema is not None:
        return f"{system} is skipped: it cannot keep answers to a schema"
    return None


def turns(engines: Sequence[str], peers: Sequence[str], workload: Workload) -> list[Turn]:
    """All systems, peers in each order that the workload is about."""
    found = [Turn(name=name, system=name, engine=ENGINES[name]) for name in engines]
    for peer in peers:
        if peer == "unshared":
            found.append(Turn(name=peer, system=peer, engine=UNSHARED))
            continue
        for order in workload.peer_orders:
            name = peer if order == "sorted" else f"{peer}, {order}"
            found.append(Turn(name=name, system=peer, order=order))
    return found


def gate(comparison: Comparison, num_rows: int | None) -> dict[str, Any]:
    """Compares float32 answers with transformers', one prompt at a time; exits if wrong."""
    if num_rows is None:
        longest = max(map(len, comparison.prompt_ids.values()))
        num_rows = 1 if longest > _LONG_PROMPT_TOKENS else 4
    prompts = comparison.workload.subset(num_rows).prompts
    new_tokens = min(comparison.workload.new_tokens, _GATE_TOKENS)
    task = replace(comparison.base, dtype="float32", prompts=prompts, new_tokens=new_tokens)
    oracle = run_task(replace(task, system="transformers", batch_size=1, want_gaps=True))
    num_ties = 0
    for system, engine in (("batchradix", {}), ("unshared", UNSHARED)):
        ours = run_task(replace(task, system=system, engine=engine))
        wrong, ties = disagreements(ours, oracle)
        if wrong:
            raise SystemExit(f"answers of {system} are wrong, not measuring: " + "; ".join(wrong))
        num_ties += ties
    print(f"gate: {num_rows} rows in float32 answered as transformers does, {num_ties} ties")
    return {"rows": num_rows, "ties": num_ties}


def prefill(comparison: Comparison) -> dict[str, Any]:
    """Prompt tokens a second with nothing shared and one answer token, against the ceiling
    that the linear layers set at the machine's best matrix product."""
    from batchradix.checkpoint.checkpoint import open_checkpoint

    base = comparison.base
    config = open_checkpoint(base.model).config
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
    flop_per_token = 2 * (config.num_parameters - embeddings)
    longest = max(map(len, comparison.prompt_ids.values()))
    prompts = comparison.workload.subset(max(1, _PREFILL_TOKENS // longest)).prompts
    before = run_task(replace(base, system="matmul"))
    run = run_task(replace(base, system="unshared", engine=UNSHARED, prompts=prompts))
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
    comparison: Comparison, all_turns: Sequence[Turn], repeat: int
) -> dict[str, dict[str, Any]]:
    """All systems one after the other, ``repeat`` times; what was seen of each, by its name."""
    results: dict[str, list[Measurement]] = defaultdict(list)
    answers: dict[str, dict[str, list[int]]] = {}
    for number in range(repeat):
        for turn in all_turns:
            task, prompts = comparison.task(turn)
            result = run_task(task, comparison.peers)
            num_tokens = sum(len(comparison.prompt_ids[prompt]) for prompt in prompts)
            if result.prompt_tokens != num_tokens:
                raise SystemExit(
                    f"{turn.name} counts {result.prompt_tokens} prompt tokens, not {num_tokens}"
                )
            results[turn.name].append(result)
            answers[turn.name] = dict(zip(prompts, result.answers, strict=True))
            print(
                f"turn {number + 1}: {turn.name} ran {result.rows:,} rows in "
                f"{result.run_s:.1f} s after {result.load_s + result.prepare_s:.1f} s to start "
                f"(load average {load_average()})",
                flush=True,
            )
    found = {}
    for turn in all_turns:
        numbers = rates(results[turn.name])
        numbers |= {"order": turn.order, "settings": results[turn.name][-1].settings}
        if comparison.workload.schema is not None:
            numbers |= complete_rates(results[turn.name], comparison.workload.schema)
        if turn.name != all_turns[0].name:
            share = equal_tokens(answers[all_turns[0].name], answers[turn.name])
            numbers["equal_tokens"] = round(share, 4)
        found[turn.name] = numbers
    return found


def complete_rates(results: Sequence[Measurement], schema: Mapping[str, Any]) -> dict[str, Any]:
    """How many answers are whole values under the schema, and those a second."""
    from batchradix.schema.answers import InvalidAnswer
    from batchradix.schema.load import load_schema

    answer_format = load_schema(schema)
    num_complete = 0
    for text in results[-1].texts:
        try:
            answer_format.parse(text.strip())
        except InvalidAnswer:
            continue
        num_complete += 1
    run_s = statistics.median(result.run_s for result in results)
    return {
        "complete": num_complete,
        "complete_rows_per_s": round(num_complete / run_s, 4),
    }


def ratios(systems: Mapping[str, Mapping[str, Any]], engines: Sequence[str]) -> dict[str, Any]:
    """Rows a second of each variant of ours over each system's, by the clock and by processor
    time; under a schema only rows with complete values count."""

    def over(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, float | None]:
        wall = "complete_rows_per_s" if "complete_rows_per_s" in ours else "rows_per_s"
        return {
            name: round(ours[key] / theirs[key], 3) if theirs[key] else None
            for name, key in (("wall", wall), ("cpu", "rows_per_cpu_s"))
        }

    return {
        engine: {
            name: over(systems[engine], numbers)
            for name, numbers in systems.items()
            if name != engine
        }
        for engine in engines
    }
