"""When cache nodes are next used, against a search through all rows."""

from __future__ import annotations

from types import ModuleType

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix.engine.cache.radix import RadixNode
from batchradix.engine.queue import PlannedJob

rows_strategy = st.lists(
    st.lists(st.integers(0, 2), min_size=0, max_size=6), min_size=1, max_size=12
)


@settings(deadline=None)
@given(
    rows=rows_strategy,
    cursor=st.integers(0, 12),
    preempted=st.sets(st.integers(0, 11), max_size=3),
    prefix=st.lists(st.integers(0, 2), min_size=1, max_size=5),
    cut=st.integers(0, 4),
)
def test_planned_uses_are_found_for_nodes_that_other_jobs_made(
    sim: ModuleType,
    rows: list[list[int]],
    cursor: int,
    preempted: set[int],
    prefix: list[int],
    cut: int,
) -> None:
    job = PlannedJob(3, sim.make_job(rows, [1] * len(rows)), 0, shared=True, refused={})
    job.cursor = min(cursor, len(rows))
    job.preempted = sorted(p for p in preempted if p < job.cursor)
    cut = min(cut, len(prefix) - 1)
    root = RadixNode(np.zeros(0, np.uint32), 0, None, [], (-1, -1))
    node = root
    for part in (prefix[:cut], prefix[cut:]):
        if part:
            node = RadixNode(np.array(part, np.uint32), node.end, node, [], (-1, -1))
    ordered = sorted(rows)
    waiting = [*job.preempted, *range(job.cursor, len(rows))]
    using = [p for p in waiting if ordered[p][: len(prefix)] == prefix]
    assert job.next_use(node) == min(using, default=None)

    def common(row: list[int]) -> int:
        pairs = zip(row, prefix, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(row), len(prefix)))

    agreeing = [common(row) for row in ordered[job.cursor :]]
    assert job.shared_depth(node) == max([node.start, *agreeing])
