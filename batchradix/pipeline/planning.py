"""A job planned and nothing computed: what it shares, what that takes, and how it looks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from batchradix.config import RunConfig
from batchradix.pipeline.advice import find_lint, memory_summary
from batchradix.pipeline.job import RadixEngines
from batchradix.pipeline.parts import Parts, open_parts
from batchradix.pipeline.planned import Planned, plan_rows
from batchradix.pipeline.sharding import shard_summaries
from batchradix.pipeline.tree_picture import tree_picture
from batchradix.plan.cached import PlanSummary
from batchradix.report.progress import Progress, Silent
from batchradix.report.trace import TracedPlan
from batchradix.scratch import Scratch


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnPlan:
    """``name``: the input's. ``template``: the job's, as it was given. ``picture``: what can be
    drawn of the tree."""

    name: str
    template: str | None
    summary: PlanSummary
    picture: TracedPlan


def plan(
    config: RunConfig, *, num_shards: int | None = None, progress: Progress | None = None
) -> PlanSummary:
    """What a job shares, and with ``num_shards`` how it parts for so many workers; tokenises every
    row, loads no weights."""
    with _planned(config, progress or Silent()) as (parts, planned):
        return _summary(parts, planned, num_shards)


def draw_plan(
    config: RunConfig, *, num_shards: int | None = None, progress: Progress | None = None
) -> DrawnPlan:
    """As `plan`, with what a picture of it can show."""
    with _planned(config, progress or Silent()) as (parts, planned):
        return DrawnPlan(
            name=parts.source.name,
            template=config.prompt.template,
            summary=_summary(parts, planned, num_shards),
            picture=tree_picture(
                planned.rows.tokens,
                planned.alone,
                planned.tree,
                token_bytes=parts.checkpoint.tokenizer.token_bytes,
                scratch=planned.scratch,
            ),
        )


@contextmanager
def _planned(config: RunConfig, progress: Progress) -> Iterator[tuple[Parts, Planned]]:
    parts = open_parts(config, progress=progress)
    try:
        has_formats = parts.schema is not None or parts.row_formats is not None
        opening = None
        if has_formats:
            opening = RadixEngines(parts.checkpoint, options=config.engine).opening
        with TemporaryDirectory(prefix="batchradix-") as folder:
            yield (
                parts,
                plan_rows(
                    parts,
                    folder=Path(folder),
                    progress=progress,
                    opening=opening,
                    scratch=Scratch(),
                ),
            )
    finally:
        parts.source.close()


def _summary(parts: Parts, planned: Planned, num_shards: int | None) -> PlanSummary:
    shards = () if num_shards is None else shard_summaries(planned, num_shards)
    memory = memory_summary(parts, planned)
    return replace(planned.summary, shards=shards, memory=memory, lint=find_lint(parts))
