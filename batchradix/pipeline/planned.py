"""Every row of a job read, ordered and deduplicated; and what the engine gets of it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchradix.config import DEFAULT_BATCH_SIZE, RunConfig
from batchradix.errors import OptionError, RowErrorCode
from batchradix.jobs.row_settings import RowSettingsReader
from batchradix.pipeline.budget import Budgets
from batchradix.pipeline.expansion import Expander, Rooms
from batchradix.pipeline.intake import FormerSettings, Intake, RowSource, read_rows
from batchradix.pipeline.parts import Parts
from batchradix.pipeline.row_formats import AnswerFormats, Opening
from batchradix.plan.blend import blend
from batchradix.plan.cached import PlanSummary, demand_tokens, plan_summary, shared_prefix
from batchradix.plan.dedupe import drop_followers, find_duplicates
from batchradix.plan.order import DEFAULT_PLAN_MEMORY_BYTES, make_plan
from batchradix.plan.tree import build_tree, flat_tree
from batchradix.report.machine import free_memory_bytes, machine
from batchradix.report.progress import Progress
from batchradix.scratch import Scratch, windows
from batchradix.settings import EngineSettings, check_host_memory, resolve_engine
from batchradix.types import (
    I32,
    I64,
    U64,
    EngineJob,
    GrammarSpec,
    Plan,
    PlanTree,
)

_NUMBER_TOKENS = 64  # at least, of what is said around an answer that is listed


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Every row read and ordered. ``plan`` holds all rows that can run, ``cached``:
    int32[n] what each prompt shares over the whole job, ``leaders``: int64[n] whose answer it
    takes. ``rng_key``: uint64[n]. ``warnings``: what reading the rows brought up, said already.
    ``alone`` is the plan of the rows that lead, ``tree`` its tree. ``scratch`` has the arrays.
    ``members``: bool[n], the rows of a shard, which ``alone``, ``tree`` and ``summary`` are of
    then; None for the whole job."""

    rows: Intake
    scratch: Scratch
    plan: Plan
    alone: Plan
    tree: PlanTree
    leaders: I64
    cached: I32
    rng_key: U64
    summary: PlanSummary
    warnings: tuple[str, ...]
    members: NDArray[np.bool_] | None = None


def plan_rows(
    parts: Parts,
    *,
    source: RowSource | None = None,
    folder: Path | None,
    progress: Progress,
    opening: Opening | None = None,
    former: FormerSettings | None = None,
    scratch: Scratch | None = None,
    named: tuple[NDArray[np.uint8], I64] | None = None,
) -> Planned:
    """Reads, tokenises, orders and deduplicates every row, of the job's input or those that a
    ``source`` has made of it; ``folder`` takes the token files.

    ``opening`` tells with which tokens every answer under a grammar begins; they then stand
    behind the prompts and are planned with them. None for an engine that samples them.
    ``former``: settings under which rows may have been run before. Arrays of a value a row are
    made in ``scratch`` (None: in memory). ``named``: base keys and occurrences that rows draw by in
    place of those of their prompts (`RowKeys`).
    """
    scratch = scratch or Scratch(least_bytes=None)
    formats = AnswerFormats(
        parts.schema,
        parts.row_formats,
        opening=opening,
        is_forced=parts.config.engine.forced_text,
    )
    rows = read_rows(
        source or parts.source,
        parts.prompts,
        sampling=parts.config.sampling,
        formats=formats,
        may_retry=parts.config.retries > 0,
        context_length=parts.checkpoint.config.context_length,
        folder=folder,
        scratch=scratch,
        budgets=Budgets(parts.checkpoint),
        expansion=parts.expansion if source is None else None,
        former=former,
    )
    if named is not None:
        rows = replace(rows, base_keys=named[0], occurrence=named[1])
    warnings = list(formats.notices)
    if rows.num_cleaned:
        warnings.append(f"{rows.num_cleaned:,} prompts held lone surrogates, replaced by U+FFFD")
    for text in warnings:
        progress.warn(text)
    plan = make_plan(
        rows.tokens,
        rows.runnable(scratch),
        memory_bytes=parts.config.engine.plan_memory_bytes or DEFAULT_PLAN_MEMORY_BYTES,
        scratch=scratch,
    )
    keys = rng_keys_of(rows, parts.config.sampling.seed or 0, scratch)
    leaders = find_duplicates(
        rows.tokens,
        plan,
        settings_id=_answer_kind(rows, scratch),
        max_tokens=rows.requests.max_tokens,
        rng_key=keys,
        is_greedy=_is_greedy(rows, scratch),
        scratch=scratch,
    )
    alone = drop_followers(plan, leaders, scratch)
    tree = build_tree(alone, rows.lengths, scratch)
    planned = Planned(
        rows=rows,
        scratch=scratch,
        plan=plan,
        alone=alone,
        tree=tree,
        leaders=leaders,
        cached=_cached(rows, plan, scratch),
        rng_key=keys,
        summary=summed_up(rows, alone, tree, None, scratch),
        warnings=tuple(warnings),
    )
    scratch.let_go()
    return planned


def expander_of(parts: Parts) -> Expander:
    """What makes rows of the table of those of a job, for looking at single ones."""
    rooms = Rooms(
        RowSettingsReader(replace(parts.config.sampling, seed=None)),
        AnswerFormats(parts.schema, parts.row_formats),
        Budgets(parts.checkpoint),
        parts.checkpoint.config.context_length,
        parts.config.chats.thinking_tokens,
    )
    return Expander(parts.prompts, parts.expansion, rooms)


def summed_up(
    rows: Intake,
    alone: Plan,
    tree: PlanTree,
    members: NDArray[np.bool_] | None,
    scratch: Scratch,
    *,
    num_errors: int | None = None,
) -> PlanSummary:
    """The totals of a planned job, or of those of its rows that are marked in ``members`` (bool[n])
    and of which ``alone`` and ``tree`` are. ``num_errors``: how many of these cannot run; None
    where they are all or none of those of the job."""
    num_rows = len(rows) if members is None else int(members.sum())
    errors = len(rows.errors)
    has_errors = members is None or bool(members[rows.errors.rows].any())
    num_over_long = rows.errors.by_code().get(RowErrorCode.PROMPT_TOO_LONG, (0, ""))[0]
    if num_errors is not None and members is not None:
        has_errors, errors = True, num_errors
        num_over_long = sum(
            rows.errors[row].code is RowErrorCode.PROMPT_TOO_LONG
            for row in rows.errors.rows[members[rows.errors.rows]].tolist()
        )
    return plan_summary(
        rows.tokens,
        alone,
        tree,
        num_forced=rows.requests.num_forced,
        num_rows=num_rows,
        num_duplicates=num_rows - errors * has_errors - len(alone),
        num_over_long=num_over_long * has_errors,
        chosen=None if members is None else scratch.where(members),
    )


def rng_keys_of(
    rows: Intake, run_seed: int, scratch: Scratch, *, greedy_have_seeds: bool = True
) -> U64:
    """uint64[n]: the keys of the rows' random numbers; without ``greedy_have_seeds`` the seeds of
    greedy rows do not count."""
    from batchradix.engine.rng import rng_keys

    keys = scratch.zeros(len(rows), np.uint64)
    greedy = np.array([settings.temperature == 0 for settings in rows.requests.settings])
    for part in scratch.windows(len(rows)):
        has_seed = rows.has_seed[part]
        if not greedy_have_seeds:
            has_seed = has_seed & ~greedy[rows.requests.settings_id[part]]
        keys[part] = rng_keys(
            run_seed, rows.base_keys[part], rows.occurrence[part], rows.seeds[part], has_seed
        )
    return keys


def _cached(rows: Intake, plan: Plan, scratch: Scratch) -> I32:
    """int32[n]: what each prompt shares, of which the opening of its answer is no part."""
    cached = shared_prefix(plan, len(rows), scratch)
    num_forced = rows.requests.num_forced
    if num_forced is not None:
        for part in scratch.windows(len(rows)):
            cached[part] = np.minimum(cached[part], rows.lengths[part] - num_forced[part])
    return cached


def _is_greedy(rows: Intake, scratch: Scratch) -> NDArray[np.bool_]:
    greedy = np.array([settings.temperature == 0 for settings in rows.requests.settings])
    found = scratch.zeros(len(rows), np.bool_)
    for part in scratch.windows(len(rows)):
        found[part] = greedy[rows.requests.settings_id[part]]
    return found


def _answer_kind(rows: Intake, scratch: Scratch) -> I64:
    """int64[n]: equal for rows of equal settings whose answers are read alike."""
    kind = scratch.zeros(len(rows), np.int64)
    for part in scratch.windows(len(rows)):
        settings_id = rows.requests.settings_id[part].astype(np.int64)
        kind[part] = settings_id * len(rows.formats) + rows.format_id[part]
    return kind


def check_device(config: RunConfig) -> None:
    """Raises `OptionError` when the device asked for is not there, or has no use for an option."""
    from batchradix.engine.device import find_device

    device, _ = find_device(config.engine.device)
    check_host_memory(config.engine, device)


def check_disk(config: RunConfig) -> None:
    """Raises `OptionError` when keys and values may take more than the temporary folder's disk."""
    wanted = config.engine.kv_disk_bytes or 0
    folder = tempfile.gettempdir()
    whole = shutil.disk_usage(folder).total
    if wanted > whole:
        raise OptionError(
            f"`kv_disk_bytes` is {wanted / 2**30:,.1f} GiB, and the whole disk of {folder} has "
            f"{whole / 2**30:,.1f} GiB; give less, or set TMPDIR to a folder on a larger one"
        )


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
    from batchradix.engine.attention.registry import num_kv_copies
    from batchradix.engine.device import find_device

    options, model = parts.config.engine, parts.checkpoint.config
    device, free_device_memory_bytes = find_device(options.device)
    alone, tree, scratch = planned.alone, planned.tree, planned.scratch
    if not options.prefix_cache:
        tree = flat_tree(alone, planned.rows.lengths, scratch)
    batch_size = options.batch_size or DEFAULT_BATCH_SIZE
    most = max(
        demand(planned, tree, batch_size), _ask_demand(planned, batch_size, model.context_length)
    )
    here = machine(device, free_device_memory_bytes)
    return resolve_engine(
        options,
        here,
        num_kv_copies=num_kv_copies(model, options, here),
        num_kv_elements_per_token=model.num_kv_elements_per_token,
        weight_bytes_float32=4 * model.num_parameters,
        kept_weight_bytes=parts.checkpoint.kept_bytes if options.quantize == "keep" else None,
        demand_tokens=most,
    )


def demand(planned: Planned, tree: PlanTree, batch_size: int) -> int:
    """The most KV tokens that the planned rows can take at once, so many of them side by side."""
    requests, scratch = planned.rows.requests, planned.scratch
    tails = requests.max_tokens
    if requests.num_forced is not None:
        tails = scratch.zeros(len(planned.rows), np.int32)
        for part in scratch.windows(len(tails)):
            tails[part] = requests.max_tokens[part] - requests.num_forced[part]
    tokens = demand_tokens(planned.alone, tree, tails, batch_size)
    scratch.let_go()
    return tokens


def _ask_demand(planned: Planned, batch_size: int, context_length: int) -> int:
    """The most KV tokens that rows can take which are asked over the answers to parts: each at most
    the longest prompt, the answers of all parts and its own, numbered."""
    rows = planned.rows
    if rows.asks is None or rows.part_starts is None:
        return 0
    most_parts = int(np.diff(rows.part_starts).max())
    most = int(rows.requests.max_tokens.max()) + _NUMBER_TOKENS
    row = min(context_length, int(rows.lengths.max()) + (most_parts + 1) * most)
    return row * min(batch_size, len(rows.asks))


def shortages(parts: Parts, settings: EngineSettings) -> list[str]:
    """Warnings where an engine may take more than is free of memory or disk."""
    found = (_memory_shortage(parts, settings), _disk_shortage(settings))
    return [text for text in found if text is not None]


def _disk_shortage(settings: EngineSettings) -> str | None:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if settings.kv_disk_bytes <= free:
        return None
    return (
        f"--kv-disk may take {settings.kv_disk_bytes / 2**30:,.1f} GiB, and {free / 2**30:,.1f} "
        f"GiB of {folder} are free: what does not fit there is computed again; give less, or set "
        f"TMPDIR to another folder"
    )


def _memory_shortage(parts: Parts, settings: EngineSettings) -> str | None:
    """As far as it can be known: where ``kv_tokens`` or ``kv_memory_bytes`` says so. Host memory
    that is promised and then used ends a process without a word."""
    model = parts.checkpoint.config
    needed = settings.element_bytes * model.num_parameters
    needed += settings.pool_bytes(model.num_kv_elements_per_token)
    free = free_memory_bytes()
    if settings.device != "cpu" or needed <= free:
        return None
    return (
        f"the weights and room for {settings.kv_tokens:,} tokens of keys and values take "
        f"{needed / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB of memory are free here: the "
        f"kernel may kill this run; lower --kv-tokens or use a smaller model"
    )


def first_of_equals(planned: Planned, todo: I64) -> I64:
    """int64[n]: for each row of ``todo`` the first one in it that has the same answer; -1 for
    other rows."""
    scratch, leader = planned.scratch, planned.leaders
    runs_for: I64 = scratch.full(len(planned.rows), -1, np.int64)
    first = scratch.full(len(planned.rows), -1, np.int64)
    for part in reversed(list(windows(len(todo)))):
        # numpy keeps the last of repeated assignments, so the first row is assigned last
        rows = todo[part][::-1]
        first[leader[rows]] = rows
    for part in scratch.windows(len(todo)):
        runs_for[todo[part]] = first[leader[todo[part]]]
    return runs_for


def make_job(
    planned: Planned, todo: I64, *, prefix_cache: bool, retain: bool = False
) -> tuple[EngineJob, I64]:
    """What the engine gets, and int64[n]: for each row of ``todo`` the row that runs for it.

    Of several rows with one answer the first in ``todo`` runs, so that a run that was stopped
    between a row and its duplicates can go on. Of other rows the second array says nothing.
    """
    scratch = planned.scratch
    runs_for, plan = planned.leaders, planned.alone
    if len(todo) < len(planned.plan):
        runs_for = first_of_equals(planned, todo)
        plan = drop_followers(planned.plan, runs_for, scratch)
    if prefix_cache:
        plan = blend(plan, planned.rows.lengths, planned.rows.requests.max_tokens)
    if plan is planned.alone and prefix_cache:
        tree = planned.tree
    else:
        make_tree = build_tree if prefix_cache else flat_tree
        tree = make_tree(plan, planned.rows.lengths, scratch)
    job = EngineJob(
        tokens=planned.rows.tokens,
        plan=plan,
        tree=tree,
        requests=replace(planned.rows.requests, rng_key=planned.rng_key),
        retain=retain,
    )
    scratch.let_go()
    return job, runs_for
