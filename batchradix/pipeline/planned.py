"""Every row of a job read, ordered and deduplicated; and what the engine gets of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from batchradix.config import (
    DEFAULT_BATCH_SIZE,
    EngineSettings,
    RunConfig,
    resolve_engine,
)
from batchradix.errors import RowErrorCode
from batchradix.pipeline.budget import Budgets
from batchradix.pipeline.intake import FormerSettings, Intake, read_rows
from batchradix.pipeline.parts import Parts
from batchradix.pipeline.row_formats import AnswerFormats, Opening
from batchradix.plan.cached import PlanSummary, demand_tokens, plan_summary, shared_prefix
from batchradix.plan.dedupe import drop_followers, find_duplicates
from batchradix.plan.order import make_plan
from batchradix.plan.tree import build_tree, flat_tree
from batchradix.report.machine import machine
from batchradix.report.progress import Progress
from batchradix.types import (
    I32,
    I64,
    U64,
    EngineJob,
    GrammarSpec,
    Plan,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Every row read and ordered. ``plan`` holds all rows that can run, ``cached``:
    int32[n] what each prompt shares over the whole job, ``leaders``: int64[n] whose answer it
    takes. ``rng_key``: uint64[n]. ``warnings``: what reading the rows brought up, said already."""

    rows: Intake
    plan: Plan
    leaders: I64
    cached: I32
    rng_key: U64
    summary: PlanSummary
    warnings: tuple[str, ...]


def plan_rows(
    parts: Parts,
    *,
    folder: Path | None,
    progress: Progress,
    opening: Opening | None = None,
    former: FormerSettings | None = None,
) -> Planned:
    """Reads, tokenises, orders and deduplicates every row; ``folder`` takes the token files.

    ``opening`` tells with which tokens every answer under a grammar begins; they then stand
    behind the prompts and are planned with them. None for an engine that samples them.
    ``former``: settings under which rows may have been run before.
    """
    from batchradix.engine.rng import rng_keys

    formats = AnswerFormats(
        parts.schema,
        parts.row_formats,
        opening=opening,
        is_forced=parts.config.engine.forced_text,
    )
    rows = read_rows(
        parts.source,
        parts.prompts,
        sampling=parts.config.sampling,
        formats=formats,
        may_retry=parts.config.retries > 0,
        context_length=parts.checkpoint.config.context_length,
        folder=folder,
        budgets=Budgets(parts.checkpoint),
        former=former,
    )
    warnings = list(formats.notices)
    if rows.num_cleaned:
        warnings.append(f"{rows.num_cleaned:,} prompts held lone surrogates, replaced by U+FFFD")
    for text in warnings:
        progress.warn(text)
    plan = make_plan(rows.tokens, rows.runnable)
    rng_key = rng_keys(
        parts.config.sampling.seed or 0,
        rows.base_keys,
        rows.occurrence,
        rows.seeds,
        rows.has_seed,
    )
    greedy = np.array([settings.temperature == 0 for settings in rows.requests.settings])
    leaders = find_duplicates(
        rows.tokens,
        plan,
        settings_id=_answer_kind(rows),
        max_tokens=rows.requests.max_tokens,
        rng_key=rng_key,
        is_greedy=greedy[rows.requests.settings_id],
    )
    return Planned(
        rows=rows,
        plan=plan,
        leaders=leaders,
        cached=np.minimum(shared_prefix(plan, len(rows)), rows.prompt_lengths).astype(np.int32),
        rng_key=rng_key,
        summary=_summary(rows, plan, leaders),
        warnings=tuple(warnings),
    )


def _summary(rows: Intake, plan: Plan, leaders: I64) -> PlanSummary:
    alone = drop_followers(plan, leaders)
    codes = [error.code for error in rows.errors.values()]
    return plan_summary(
        rows.tokens,
        alone,
        build_tree(alone, rows.tokens.lengths),
        num_forced=rows.requests.num_forced,
        num_rows=len(rows),
        num_duplicates=len(plan) - len(alone),
        num_over_long=codes.count(RowErrorCode.PROMPT_TOO_LONG),
    )


def _answer_kind(rows: Intake) -> I32:
    """int32[n]: equal for rows of equal settings whose answers are read alike."""
    _, kind = np.unique(
        np.stack([rows.requests.settings_id, rows.format_id]), axis=1, return_inverse=True
    )
    return kind.reshape(-1).astype(np.int32)


def check_device(config: RunConfig) -> None:
    """Raises `OptionError` when the device asked for is not there."""
    from batchradix.engine.device import find_device

    find_device(config.engine.device)


def check_budget(parts: Parts) -> None:
    """Raises `OptionError` when no answer under the schema fits the run's ``max_tokens``."""
    if parts.schema is not None:
        Budgets(parts.checkpoint).check_run(parts.schema.grammar, parts.config.sampling.max_tokens)


def check_scores(parts: Parts, check: Callable[[GrammarSpec], None]) -> None:
    """Lets ``check`` see the grammar of a job that wants probabilities, or to choose by them."""
    sampling = parts.config.sampling
    if parts.schema is not None and (sampling.probabilities or sampling.choose == "joint"):
        check(parts.schema.grammar)


def settle_engine(parts: Parts, planned: Planned) -> EngineSettings:
    """The engine's open options from machine, model and plan."""
    from batchradix.engine.device import find_device

    options, model = parts.config.engine, parts.checkpoint.config
    device, free_device_memory_bytes = find_device(options.device)
    alone = drop_followers(planned.plan, planned.leaders)
    lengths = planned.rows.tokens.lengths
    tree = (build_tree if options.prefix_cache else flat_tree)(alone, lengths)
    requests = planned.rows.requests
    tails = requests.max_tokens - (0 if requests.num_forced is None else requests.num_forced)
    demand = demand_tokens(alone, tree, tails, options.batch_size or DEFAULT_BATCH_SIZE)
    return resolve_engine(
        options,
        machine(device, free_device_memory_bytes),
        num_kv_elements_per_token=model.num_kv_elements_per_token,
        weight_bytes_float32=4 * model.num_parameters,
        demand_tokens=demand,
    )


def make_job(
    planned: Planned, todo: I64, *, prefix_cache: bool, retain: bool = False
) -> tuple[EngineJob, I64]:
    """What the engine gets, and int64[n]: for each row of ``todo`` the row that runs for it.

    Of several rows with one answer the first in ``todo`` runs, so that a run that was stopped
    between a row and its duplicates can go on. Elsewhere the second array is -1.
    """
    runs_for = np.full(len(planned.rows), -1, dtype=np.int64)
    _, first, group = np.unique(planned.leaders[todo], return_index=True, return_inverse=True)
    runs_for[todo] = todo[first][group]
    plan = drop_followers(planned.plan, runs_for)
    requests = planned.rows.requests
    job = EngineJob(
        tokens=planned.rows.tokens,
        plan=plan,
        tree=(build_tree if prefix_cache else flat_tree)(plan, planned.rows.tokens.lengths),
        requests=replace(requests, rng_key=planned.rng_key),
        retain=retain,
    )
    return job, runs_for
