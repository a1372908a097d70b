"""The sample of a planned job: rows chosen over the whole input, the same ones every time."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from batchradix.pipeline.forecasts import forecast
from batchradix.pipeline.parts import Parts
from batchradix.pipeline.planned import (
    Planned,
    first_of_equals,
    make_job,
    settle_engine,
    summed_up,
)
from batchradix.pipeline.table import Table
from batchradix.plan.dedupe import drop_followers
from batchradix.plan.tree import build_tree
from batchradix.report.estimate import Estimate, Work, WorkTimes, guess_answers, guess_seconds
from batchradix.report.summary import Summary
from batchradix.scratch import Scratch
from batchradix.types import I64, U64

_ASKS_LEFT_OUT = (
    "the sample's estimate has no prompts and no time for what `combine` ask asks over the answers "
    "to parts, since these prompts are made of answers"
)


def ranks(begin: int, stop: int, seed: int) -> U64:
    """uint64[stop - begin]: where rows stand in the queue for a sample of that seed; no two rows
    of a seed have the same rank (SplitMix64, which maps numbers of 64 bits one to one)."""
    mixed = np.arange(begin, stop, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= _mixed(np.array([seed % 2**64], dtype=np.uint64))
    return _mixed(mixed)


def _mixed(x: U64) -> U64:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def choose_rows(num_rows: int, size: int, seed: int, scratch: Scratch) -> NDArray[np.bool_]:
    """bool[num_rows]: the ``size`` rows of lowest rank, all where there are fewer. What a seed
    chooses holds what it chooses for a smaller size. Made in ``scratch``."""
    lowest = np.zeros(0, dtype=np.uint64)
    for part in scratch.windows(num_rows):
        lowest = np.concatenate([lowest, ranks(part.start, part.stop, seed)])
        if len(lowest) > size:
            lowest = np.partition(lowest, size - 1)[:size]
    chosen = scratch.zeros(num_rows, np.bool_)
    if len(lowest):
        last = lowest.max()
        for part in scratch.windows(num_rows):
            chosen[part] = ranks(part.start, part.stop, seed) <= last
    return chosen


def take_sample(
    planned: Planned, size: int, seed: int, starts: I64 | None = None
) -> tuple[Planned, str]:
    """What a sample of ``size`` input rows of a whole job has to do, and a sentence about it.

    ``starts``: int64[m + 1], where the results of each of m input rows begin (None for one each):
    a row is taken with all of them. What prompts share, and all else that shows in the table, stays
    that of the whole job. Arrays of a value a row are made in the scratch of ``planned``.
    """
    scratch, rows = planned.scratch, planned.rows
    num_rows = len(rows) if starts is None else len(starts) - 1
    chosen = choose_rows(num_rows, size, seed, scratch)
    members = chosen if starts is None else np.repeat(chosen, np.diff(starts))
    runs = scratch.kept(members)
    runs[rows.errors.rows] = False
    if rows.asks is not None:
        runs[rows.asks] = False
    todo = scratch.where(runs)
    alone = drop_followers(planned.plan, first_of_equals(planned, todo), scratch)
    tree = build_tree(alone, rows.lengths, scratch)
    asks = () if rows.asks is None else (_ASKS_LEFT_OUT,)
    part = replace(
        planned,
        warnings=planned.warnings + asks,
        alone=alone,
        tree=tree,
        members=members,
        summary=summed_up(
            rows, alone, tree, members, scratch, num_errors=int(members[rows.errors.rows].sum())
        ),
    )
    scratch.let_go()
    return part, (
        f"a sample of {int(chosen.sum()):,} of {num_rows:,} rows (seed {seed}); the same command "
        f"without --sample goes on with them{''.join(f'; {text}' for text in asks)}"
    )


def sample_metadata(size: int, seed: int, num_rows: int) -> dict[str, str]:
    """What the table of a sample of ``num_rows`` input rows says of itself."""
    facts = {"size": size, "seed": seed, "rows": num_rows}
    return {"batchradix.sample": json.dumps(facts)}


def estimated(
    parts: Parts, whole: Planned, table: Table, summary: Summary, times: WorkTimes | None
) -> Estimate:
    """What the finished ``table`` of a sample says of the ``whole`` job; ``times`` is what this run
    measured, None where it computed nothing."""
    config, plan = parts.config, whole.summary
    planned_tokens = plan.prompt_tokens + plan.opening_tokens
    computed = plan.distinct_tokens if config.engine.prefix_cache else planned_tokens
    num_runnable = len(whole.rows) - len(whole.rows.errors)
    answer_tokens, error = guess_answers(table.answer_lengths, num_runnable)
    seconds = None
    if times is not None:
        run_s = _run_seconds(parts, whole, computed, summary, times)
        seconds = None if run_s is None else summary.load_s + summary.plan_s + run_s
    price = config.trial.price_per_hour
    return Estimate(
        rows=parts.source.num_rows or 0,
        sampled_rows=table.num_rows,
        prompt_tokens=plan.prompt_tokens,
        opening_tokens=plan.opening_tokens,
        distinct_tokens=plan.distinct_tokens,
        computed_tokens=computed,
        completion_tokens=answer_tokens,
        completion_tokens_error=error,
        seconds=None if seconds is None else round(seconds, 3),
        price_per_hour=price,
        cost=None if seconds is None or price is None else round(seconds / 3600 * price, 4),
    )


def _run_seconds(
    parts: Parts, whole: Planned, computed_tokens: int, summary: Summary, times: WorkTimes
) -> float | None:
    """How long the engine takes for the whole job: by its scheduler, run without a model, where
    this run had enough steps to tell what each costs; else in proportion to the sample."""
    usage, num_ran = summary.usage, summary.ran_rows
    if not num_ran:
        return None
    settings = settle_engine(parts, whole)
    job, _ = make_job(whole, whole.plan.order, prefix_cache=settings.prefix_cache)
    model_hash = parts.checkpoint.content_hash
    expected = forecast(job, whole.rows.lengths, settings, model_hash, summary.answer_tokens)
    if expected.seconds is not None:
        return expected.seconds
    return guess_seconds(
        Work(
            rows=num_ran,
            computed_tokens=usage.computed_tokens + usage.loaded_tokens,
            decode_steps=usage.decode_steps,
        ),
        Work(
            rows=whole.summary.planned_rows,
            computed_tokens=computed_tokens,
            decode_steps=usage.decode_steps / num_ran * whole.summary.planned_rows,
        ),
        times,
    )
