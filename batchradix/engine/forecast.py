"""What running a planned job will take: the scheduler runs it, and no model does.

All that the scheduler does with tokens is to count them, so with the lengths of the answers known
it takes the very steps of the run to come.
"""

from __future__ import annotations

from dataclasses import replace

from batchradix.engine.scheduler import Scheduler
from batchradix.engine.step_costs import StepCosts
from batchradix.settings import EngineSettings
from batchradix.types import I32, EngineJob, Usage


def simulate(
    job: EngineJob,
    settings: EngineSettings,
    num_slots: int,
    sampled: I32,
    costs: StepCosts | None,
) -> tuple[Usage, float | None]:
    """The counters of the run, and the seconds of its steps where ``costs`` says what they take.

    ``num_slots``: of the KV pool. ``sampled``: int32[n], by plan position the tokens that an answer
    chooses one after the other, at least 1 and as many as its ``max_tokens`` lets it.
    """
    usage = Usage()
    scheduler = Scheduler(
        num_slots=num_slots,
        batch_size=settings.batch_size,
        prefill_tokens=settings.prefill_tokens,
        prefix_cache=settings.prefix_cache,
        usage=usage,
    )
    scheduler.submit(0, replace(job, retain=False))
    chosen: dict[int, int] = {}  # tokens of running rows, by their number
    seconds = 0.0
    while scheduler.has_work:
        decision = scheduler.schedule()
        for row in decision.rows:
            if row.num_pending:
                continue
            count = chosen.get(row.seq, 0) + 1
            usage.decode_steps += count > 1
            if count < min(int(sampled[row.position]), row.max_tokens):
                chosen[row.seq] = count
                scheduler.append(row, (0,))
            else:
                chosen.pop(row.seq, None)
                scheduler.finish(row)
        if costs is not None and decision.step is not None:
            seconds += costs.seconds(
                decision.step.num_tokens, decision.num_running, decision.num_kv_tokens
            )
    return usage, None if costs is None else seconds
