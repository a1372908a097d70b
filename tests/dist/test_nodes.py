"""Workers on several nodes: a poisoned row, a worker that sleeps, and a node that is lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brittle_engine import POISON, SLEEP, BrittleEngines

from batchradix.config import EngineOptions
from batchradix.errors import RowErrorCode
from batchradix.fleet import FleetEngine
from batchradix.fleet.ray_crew import RayCrew
from batchradix.fleet.ray_session import RaySession
from batchradix.fleet_options import FleetOptions
from batchradix.plan.order import make_plan
from batchradix.plan.tree import build_tree
from batchradix.types import Completion, EngineJob, RequestTable, RowSettings, TokenTable

pytestmark = [
    pytest.mark.dist,
    pytest.mark.filterwarnings("ignore"),  # what Ray's own test cluster warns of
]
pytest.importorskip("ray")

OPTIONS = FleetOptions(workers="auto", worker_timeout_s=5.0)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three Ray nodes on this machine, two of which have a core to work with."""
    import ray
    from ray.cluster_utils import Cluster

    root = Path(__file__).parents[2]
    paths = [root, root / "kernels", root / "tests" / "doubles"]
    environment = pytest.MonkeyPatch()
    environment.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
    environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes.add_node(num_cpus=1)
    nodes.add_node(num_cpus=1)
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    yield nodes
    ray.shutdown()
    nodes.shutdown()
    environment.undo()


def job_of(rows: list[list[int]]) -> EngineJob:
    tokens = TokenTable.from_rows(rows)
    plan = make_plan(tokens)
    return EngineJob(
        tokens=tokens,
        plan=plan,
        tree=build_tree(plan, tokens.lengths),
        requests=RequestTable(
            settings=(RowSettings(),),
            settings_id=np.zeros(len(rows), dtype=np.int32),
            max_tokens=np.full(len(rows), 4, dtype=np.int32),
            rng_key=np.zeros(len(rows), dtype=np.uint64),
        ),
    )


def run(rows: list[list[int]], folder: Path) -> tuple[FleetEngine, dict[int, Completion]]:
    """The completions of a fleet of one worker a node, by row."""
    session = RaySession(OPTIONS, EngineOptions(device="cpu"))
    count, place = session.places(OPTIONS, EngineOptions(device="cpu"))
    assert count == 2
    crew = RayCrew(BrittleEngines(folder), count, place, session.close)
    engine = FleetEngine(
        crew, context_length=99, batch_size=4, prefix_cache=True, timeout_s=OPTIONS.worker_timeout_s
    )
    done: dict[int, Completion] = {}
    try:
        engine.submit(job_of(rows))
        while engine.has_work:
            for one in engine.step():
                assert one.row not in done
                done[one.row] = one
    finally:
        engine.close()
    return engine, done


def rows_of(count: int) -> list[list[int]]:
    return [[1, 2, number % 7, number, 5] for number in range(count)]


@pytest.mark.usefixtures("cluster")
def test_workers_are_on_the_nodes_with_room_and_answer_every_row(tmp_path: Path) -> None:
    rows = rows_of(300)
    engine, done = run(rows, tmp_path)
    assert {row: list(one.token_ids) for row, one in done.items()} == dict(enumerate(rows))
    engines = list(tmp_path.glob("engine-*"))
    assert len({path.read_text() for path in engines}) == len(engines) == 2
    assert engine.usage.forward_steps == len(rows)
    assert engine.notices == ["it is brittle"]


@pytest.mark.usefixtures("cluster")
def test_a_row_that_ends_processes_becomes_an_error_row_and_one_that_sleeps_runs_again(
    tmp_path: Path,
) -> None:
    rows = rows_of(24)
    rows[7][-1], rows[18][-1] = POISON, SLEEP
    engine, done = run(rows, tmp_path)
    assert done.keys() == set(range(len(rows)))
    failed = {row: one.error for row, one in done.items() if one.error is not None}
    assert [error.code for error in failed.values()] == [RowErrorCode.WORKER_LOST]
    assert failed.keys() == {7}
    assert list(done[18].token_ids) == rows[18]
    assert any("it took no step for 5 s" in text for text in engine.notices)
    assert any("its process ended" in text for text in engine.notices)
