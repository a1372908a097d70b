"""How the cores and GPUs of machines are divided among workers, and what options may say."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest

from batchradix.config import EngineOptions, OutputOptions, RunConfig
from batchradix.errors import OptionError
from batchradix.fleet import engines_for
from batchradix.fleet.ray_crew import Place
from batchradix.fleet.ray_session import divide
from batchradix.fleet_options import DEFAULT_WORKER_TIMEOUT_S, FleetOptions

CPU = EngineOptions(device="cpu")
AUTO = EngineOptions()


@pytest.mark.parametrize(
    ("nodes", "workers", "engine", "count", "place"),
    [
        ([{"CPU": 8.0}], "auto", AUTO, 1, (8, 0, 1)),
        ([{"CPU": 8.0}], 2, AUTO, 2, (4, 0, 2)),
        ([{"CPU": 9.0}], 2, AUTO, 2, (4, 0, 2)),
        ([{"CPU": 2.0}], 2, replace(AUTO, num_threads=1), 2, (1, 0, 2)),
        ([{"CPU": 8.0, "GPU": 2.0}], "auto", AUTO, 2, (4, 1, 2)),
        ([{"CPU": 8.0, "GPU": 4.0}], 2, AUTO, 2, (4, 1, 2)),
        ([{"CPU": 8.0, "GPU": 4.0}], "auto", CPU, 1, (8, 0, 1)),
        ([{"CPU": 4.0}, {"CPU": 6.0}], "auto", AUTO, 2, (4, 0, 1)),
        ([{"CPU": 4.0}, {"CPU": 4.0}], 3, AUTO, 3, (2, 0, 2)),
        ([{"CPU": 4.0}, {"CPU": 16.0, "GPU": 2.0}], "auto", AUTO, 2, (8, 1, 2)),
        ([{"CPU": 0.0, "node": 1.0}, {"CPU": 6.0}], None, AUTO, 1, (6, 0, 1)),
    ],
)
def test_machines_are_divided_evenly(
    nodes: list[dict[str, float]],
    workers: Any,
    engine: EngineOptions,
    count: int,
    place: tuple[int, int, int],
) -> None:
    expected = Place(num_threads=place[0], num_gpus=place[1], num_sharing=place[2])
    assert divide(nodes, workers, engine) == (count, expected)


@pytest.mark.parametrize(
    ("nodes", "workers", "engine", "said"),
    [
        ([{"CPU": 8.0, "GPU": 1.0}], 2, AUTO, "there are 1 GPUs for 2 workers"),
        ([{"CPU": 2.0}], 3, AUTO, "2 cores on 1 machines for 3 workers of 1 threads"),
        ([{"CPU": 4.0}], 2, replace(AUTO, num_threads=3), "2 workers of 3 threads"),
        ([], "auto", AUTO, "0 cores on 0 machines"),
    ],
)
def test_more_workers_than_there_is_room_for_are_refused(
    nodes: list[dict[str, float]], workers: Any, engine: EngineOptions, said: str
) -> None:
    with pytest.raises(OptionError, match=said):
        divide(nodes, workers, engine)


@pytest.mark.parametrize(
    "options",
    [
        {"workers": 0},
        {"workers": True},
        {"workers": "all"},
        {"workers": 10**9},
        {"ray_address": ""},
        {"ray_address": 6379},
        {"worker_timeout_s": 0},
        {"worker_timeout_s": float("nan")},
        {"worker_timeout_s": "1"},
    ],
)
def test_options_without_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        FleetOptions(**options)


def test_options_come_from_the_texts_of_a_command_line() -> None:
    assert FleetOptions.parse(None, None, None) == FleetOptions()
    assert not FleetOptions().is_wanted
    assert FleetOptions.parse("2", None, 60.0) == FleetOptions(workers=2, worker_timeout_s=60.0)
    joined = FleetOptions.parse("auto", "auto", None)
    assert joined == FleetOptions(workers="auto", ray_address="auto")
    assert joined.worker_timeout_s == DEFAULT_WORKER_TIMEOUT_S
    with pytest.raises(OptionError, match="workers"):
        FleetOptions.parse("-1", None, None)


def test_without_ray_the_job_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else found(name)
    )
    with pytest.raises(OptionError, match=r"pip install 'batchradix\[ray\]'"):
        engines_for(RunConfig(input="x.jsonl", fleet=FleetOptions(workers=2)))
    assert engines_for(RunConfig(input="x.jsonl")) is None


def test_a_trace_is_of_one_engine(tmp_path: Any) -> None:
    output = OutputOptions(path=tmp_path / "out.arrow", trace=True)
    with pytest.raises(OptionError, match="workers and trace exclude each other"):
        RunConfig(input="x.jsonl", output=output, fleet=FleetOptions(workers=1))
