"""The part of a planned job that one of several workers runs, and the parts joined again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from batchradix.config import Shard
from batchradix.pipeline.planned import Planned, summed_up
from batchradix.plan.shards import PlanShards, ShardSummary, split_plan
from batchradix.plan.tree import build_tree
from batchradix.scratch import Scratch
from batchradix.sink.folder import acquire, check_output
from batchradix.sink.merge import find_parts, merge_parts, open_parts
from batchradix.types import Plan, Status


def split(planned: Planned, num_shards: int) -> PlanShards:
    """Splits what is to be computed of a job; every worker comes to the same split."""
    rows = planned.rows
    return split_plan(
        planned.alone, rows.lengths, rows.requests.max_tokens, num_shards, planned.scratch
    )


def of_shard(planned: Planned, shards: PlanShards, number: int) -> Planned:
    """What shard ``number`` (from 0) of a whole job has to do: its rows, and those that take
    their answers. Rows that cannot run are the first shard's. What prompts share, and all else
    that shows in the table, stays that of the whole job."""
    scratch, whole = planned.scratch, planned.alone
    begin, stop = int(shards.cuts[number]), int(shards.cuts[number + 1])
    lcp = scratch.kept(whole.lcp[begin:stop])
    lcp[:1] = 0
    alone = Plan(order=scratch.kept(whole.order[begin:stop]), lcp=lcp)
    leads = scratch.zeros(len(planned.rows), np.bool_)
    for part in scratch.windows(len(alone)):
        leads[alone.order[part]] = True
    members = scratch.zeros(len(planned.rows), np.bool_)
    for part in scratch.windows(len(planned.plan)):
        rows = planned.plan.order[part]
        members[rows] = leads[planned.leaders[rows]]
    if number == 0:
        members[planned.rows.errors.rows] = True
    tree = build_tree(alone, planned.rows.lengths, scratch)
    summary = summed_up(planned.rows, alone, tree, members, scratch)
    return replace(planned, alone=alone, tree=tree, summary=summary, members=members)


def shard_summaries(planned: Planned, num_shards: int) -> tuple[ShardSummary, ...]:
    """What each of so many workers would have to do."""
    shards = split(planned, num_shards)
    whole = max(1.0, float(shards.costs.sum()))
    found = []
    for number in range(num_shards):
        summary = of_shard(planned, shards, number).summary
        found.append(
            ShardSummary(
                rows=summary.rows,
                prompt_tokens=summary.prompt_tokens,
                distinct_tokens=summary.distinct_tokens,
                duplicated_tokens=int(shards.duplicated_tokens[number]),
                cost_share=float(shards.costs[number]) / whole,
            )
        )
        planned.scratch.let_go()
    return tuple(found)


def take_shard(planned: Planned, shard: Shard) -> tuple[Planned, str]:
    """The planned shard of a whole job, and a sentence about it."""
    shards = split(planned, shard.count)
    part = of_shard(planned, shards, shard.number - 1)
    duplicated = int(shards.duplicated_tokens[shard.number - 1])
    return part, (
        f"shard {shard} has {part.summary.rows:,} of {len(planned.rows):,} rows and "
        f"{part.summary.distinct_tokens:,} of {planned.summary.distinct_tokens:,} distinct tokens, "
        f"{duplicated:,} of them another shard's too"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """A table joined from ``num_parts`` parts: where it is, and how many rows have each status."""

    output: Path
    num_parts: int
    counts: Mapping[Status, int]

    @property
    def num_rows(self) -> int:
        return sum(self.counts.values())

    def to_json(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        return {
            "rows": self.num_rows,
            "ok": self.counts[Status.OK],
            "truncated": self.counts[Status.TRUNCATED],
            "errors": self.counts[Status.ERROR],
            "parts": self.num_parts,
            "output": str(self.output),
        }

    def exit_code(self, allow_failures: float = 0.0) -> int:
        """0, 1 or 3, as a run of the whole job returns it."""
        num_ok = self.counts[Status.OK]
        if self.num_rows and not num_ok:
            return 3
        return 0 if self.num_rows - num_ok <= allow_failures * self.num_rows else 1


def merge(output: Path, parts: Sequence[Path] = ()) -> Merged:
    """Joins the finished parts of a table, all that lie beside ``output`` when none are named.

    Raises `InputError` where parts are missing, or not of one job; else as `merge_parts` does.
    """
    check_output(output)
    opened = open_parts(parts or find_parts(output))
    with acquire(output) as folder:
        counts = merge_parts(folder, opened, Scratch())
    return Merged(output=output, num_parts=len(opened), counts=counts)
