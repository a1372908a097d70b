"""Structured answers with every shortcut and with none, over the same model and prompts.

Engines stand side by side in one process and answer the same rows in turns. Their prompts
are computed before anything is timed, so the times are what the answers alone cost. A forced
opening stands behind the prompt, but is answer: it is computed, and counted, in the timed part.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from workloads import Workload

_ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(_ROOT), str(_ROOT / "kernels")]

SHORTCUTS_OFF: Mapping[str, Any] = {"forced_text": False}
"""The engine options by which a user turns shortcuts off. Computing only those rows of the
output layer that may be chosen has no option, so both sides do it."""

MODES: Mapping[str, Mapping[str, Any]] = {
    "on": {},
    "guessing": {"speculate": "auto"},
    "off": SHORTCUTS_OFF,
}
"""As a user has it, with guessing ahead beside that, and with nothing."""


TIMES = ("decode", "answer", "cpu", "total")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What both sides have in common."""

    model: str
    dtype: str
    threads: int
    batch_size: int
    repeat: int


@dataclass(slots=True, kw_only=True)
class Turn:
    """One time through all rows. ``decode_s`` is of the passes that held answer tokens alone,
    ``answer_s`` of all passes, those that computed forced openings included; ``cpu_s`` the
    processor time of all threads in ``answer_s``, which a busy machine changes less."""

    answer_s: float = 0.0
    decode_s: float = 0.0
    cpu_s: float = 0.0
    num_passes: int = 0
    decode_steps: int = 0
    completion_tokens: int = 0
    forced_tokens: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)


class Side:
    """An engine with the given shortcuts, and a job that it answers again and again."""

    def __init__(self, setup: Setup, workload: Workload, options: Mapping[str, Any]) -> None:
        from batchradix.config import EngineOptions, RunConfig, SamplingOptions
        from batchradix.pipeline.job import RadixEngines
        from batchradix.pipeline.parts import open_parts
        from batchradix.pipeline.planned import plan_rows, settle_engine
        from batchradix.report.progress import Silent

        config = RunConfig(
            input=[{"prompt": prompt} for prompt in workload.prompts],
            model=setup.model,
            schema=workload.schema,
            sampling=SamplingOptions(max_tokens=workload.new_tokens),
            engine=EngineOptions(
                dtype=setup.dtype,  # type: ignore[arg-type]  # checked by EngineOptions
                device="cpu",
                num_threads=setup.threads,
                batch_size=setup.batch_size,
                **options,
            ),
        )
        progress = Silent()
        parts = open_parts(config, progress=progress)
        assert parts.schema is not None
        make_engine = RadixEngines(parts.checkpoint, parts.schema)
        bare_parts = open_parts(
            replace(config, schema=None, sampling=SamplingOptions(max_tokens=1)),
            progress=progress,
            checkpoint=parts.checkpoint,
        )
        self._schema = parts.schema
        self._planned = plan_rows(
            parts, folder=None, progress=progress, opening=make_engine.opening
        )
        bare = plan_rows(bare_parts, folder=None, progress=progress)
        # All prompts stay in the pool beside all answers.
        num_slots = bare.summary.distinct_tokens + workload.num_rows * workload.new_tokens
        settings = replace(settle_engine(parts, self._planned), kv_tokens=num_slots)
        self.prompt_tokens = bare.summary.prompt_tokens
        self.distinct_tokens = bare.summary.distinct_tokens
        self._engine = make_engine(settings)
        self.prompts_s = self._compute_prompts(bare)

    def turn(self) -> Turn:
        """All rows once, from prompts that the pool holds to answers."""
        import numpy as np

        from batchradix.pipeline.planned import make_job

        engine, turn = self._engine, Turn()
        job, _ = make_job(
            self._planned, np.sort(self._planned.plan.order).astype(np.int64), prefix_cache=True
        )
        before = replace(engine.usage)
        started_cpu_s = time.process_time()
        engine.submit(job)
        while engine.has_work:
            num_computed = engine.usage.computed_tokens + engine.usage.recomputed_tokens
            started_s = time.perf_counter()
            completions = engine.step()
            step_s = time.perf_counter() - started_s
            turn.answer_s += step_s
            if engine.usage.computed_tokens + engine.usage.recomputed_tokens == num_computed:
                turn.decode_s += step_s
            for completion in completions:
                turn.texts[completion.row] = completion.text
                status = self._status(completion)
                turn.statuses[status] = turn.statuses.get(status, 0) + 1
        turn.cpu_s = time.process_time() - started_cpu_s
        after = engine.usage
        turn.num_passes = after.forward_steps - before.forward_steps
        turn.decode_steps = after.decode_steps - before.decode_steps
        turn.completion_tokens = after.completion_tokens - before.completion_tokens
        turn.forced_tokens = after.forced_tokens - before.forced_tokens
        return turn

    def close(self) -> None:
        self._engine.close()

    def _compute_prompts(self, bare: Any) -> float:
        """Computes every prompt and leaves it in the pool; the seconds that took."""
        import numpy as np

        from batchradix.pipeline.planned import make_job

        started_s = time.perf_counter()
        todo = np.sort(bare.plan.order).astype(np.int64)
        job, _ = make_job(bare, todo, prefix_cache=True, retain=True)
        self._engine.submit(job)
        while self._engine.has_work:
            self._engine.step()
        return time.perf_counter() - started_s

    def _status(self, completion: Any) -> str:
        from batchradix.schema.answers import InvalidAnswer

        if completion.error is not None:
            return "error"
        if completion.finish_reason == "length":
            return "truncated"
        try:
            self._schema.parse(completion.text)
        except InvalidAnswer:
            return "error"
        return "ok"


def measure_modes(setup: Setup, workload: Workload) -> dict[str, Any]:
    """All sides in turns; the first turn of each warms it up and is not counted."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sides = {name: Side(setup, workload, options) for name, options in MODES.items()}
    turns: dict[str, list[Turn]] = {name: [] for name in sides}
    try:
        for number in range(setup.repeat + 1):
            for name, side in sides.items():
                turn = side.turn()
                if number:
                    turns[name].append(turn)
    finally:
        for side in sides.values():
            side.close()
    found = {name: _medians(sides[name], turns[name], workload.num_rows) for name in sides}
    off, last_off = found["off"], turns["off"][-1]
    return {
        "rows": workload.num_rows,
        "digest": workload.digest,
        "prompt_tokens": sides["on"].prompt_tokens,
        "distinct_tokens": sides["on"].distinct_tokens,
        "answers": len(last_off.texts),
        "modes": found,
        "off_over": {
            name: {
                **{what: _ratio(off[f"{what}_s"], found[name][f"{what}_s"]) for what in TIMES},
                "equal_texts": sum(
                    turns[name][-1].texts[row] == text for row, text in last_off.texts.items()
                ),
            }
            for name in sides
            if name != "off"
        },
    }


def _ratio(slow_s: float, fast_s: float) -> float | None:
    """None where the fast one took no time that was measured."""
    return round(slow_s / fast_s, 2) if fast_s else None


def _medians(side: Side, turns: Sequence[Turn], num_rows: int) -> dict[str, Any]:
    """Counts of the last turn, medians of the times, and all times of ``answer_s``."""
    last = turns[-1]
    num_answers = sum(last.statuses.values())
    answer_s = statistics.median(turn.answer_s for turn in turns)
    return {
        "statuses": last.statuses,
        "completion_tokens": last.completion_tokens,
        "forced_tokens": last.forced_tokens,
        "sampled_tokens": last.completion_tokens - last.forced_tokens,
        "decode_steps": last.decode_steps,
        "decode_steps_per_row": round(last.decode_steps / num_answers, 2),
        "decode_step_share": round(last.decode_steps / last.completion_tokens, 4),
        "forward_passes": last.num_passes,
        "decode_s": round(statistics.median(turn.decode_s for turn in turns), 4),
        "answer_s": round(answer_s, 4),
        "cpu_s": round(statistics.median(turn.cpu_s for turn in turns), 4),
        "prompts_s": round(side.prompts_s, 3),
        "total_s": round(side.prompts_s + answer_s, 3),
        "answer_ms_per_row": round(1000 * answer_s / num_rows, 3),
        "all_answer_s": [round(turn.answer_s, 4) for turn in turns],
    }


def report_modes(name: str, numbers: Mapping[str, Any]) -> None:
    """What a person reads of one workload."""
    print(f"\n{name}: {numbers['rows']} rows, {numbers['answers']} distinct")
    columns = ("ok", "tokens", "forced", "sampled", "steps/row", "share", "passes")
    times = ("decode s", "answer s", "total s", "ms/row")
    print(f"{'shortcuts':10}" + "".join(f"{column:>11}" for column in (*columns, *times)))
    for mode, found in numbers["modes"].items():
        cells = (
            str(found["statuses"].get("ok", 0)),
            f"{found['completion_tokens']:,}",
            f"{found['forced_tokens']:,}",
            f"{found['sampled_tokens']:,}",
            f"{found['decode_steps_per_row']:.2f}",
            f"{found['decode_step_share']:.1%}",
            str(found["forward_passes"]),
            f"{found['decode_s']:.2f}",
            f"{found['answer_s']:.2f}",
            f"{found['total_s']:.2f}",
            f"{found['answer_ms_per_row']:.1f}",
        )
        print(f"{mode:10}" + "".join(f"{cell:>11}" for cell in cells))
    for mode, ratios in numbers["off_over"].items():
        times_less = ", ".join(f"{what} {ratios[what] or '-'}" for what in TIMES)
        print(
            f"off over {mode}: {times_less}; {ratios['equal_texts']} of {numbers['answers']} "
            f"answers have the same text"
        )
