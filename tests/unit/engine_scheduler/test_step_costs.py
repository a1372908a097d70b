from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchradix.engine.step_costs import (
    MIN_STEPS,
    CostMeter,
    StepCosts,
    costs_key,
    read_costs,
    write_costs,
)
from batchradix.settings import EngineSettings
from batchradix.types import StepStats, Usage

COSTS = StepCosts(step_s=0.004, token_s=2e-4, row_s=1e-5, kv_token_s=3e-7)


def step(num_tokens: int, num_rows: int, num_kv_tokens: int, seconds: float) -> StepStats:
    return StepStats(
        started_s=0.0,
        schedule_s=0.1 * seconds,
        forward_s=0.6 * seconds,
        mask_s=0.1 * seconds,
        sample_s=0.1 * seconds,
        collect_s=0.1 * seconds,
        model_tokens=num_tokens,
        running_rows=num_rows,
        waiting_rows=0,
        finished_rows=0,
        kv_tokens=num_kv_tokens,
        usage=Usage(),
    )


def measured(costs: StepCosts, num_steps: int, noise: float = 0.0) -> CostMeter:
    random = np.random.default_rng(0)
    meter = CostMeter()
    for _ in range(num_steps):
        sizes = [int(random.integers(1, most)) for most in (512, 64, 50_000)]
        seconds = costs.seconds(*sizes) * (1 + noise * random.standard_normal())
        meter(step(*sizes, seconds))
    return meter


def test_what_steps_are_made_of_is_found_again() -> None:
    found = measured(COSTS, 200).costs
    assert found is not None
    for name in ("step_s", "token_s", "row_s", "kv_token_s"):
        assert getattr(found, name) == pytest.approx(getattr(COSTS, name), rel=1e-6)
    noisy = measured(COSTS, 2000, noise=0.1).costs
    assert noisy is not None
    assert noisy.seconds(300, 30, 20_000) == pytest.approx(COSTS.seconds(300, 30, 20_000), rel=0.05)


def test_no_part_is_below_zero() -> None:
    steps = [(1, 1, 100, 0.01), (64, 64, 200, 0.02), (512, 1, 300, 0.001), (500, 60, 100, 0.002)]
    meter = CostMeter()
    for sizes in steps * 10:
        meter(step(*sizes))
    found = meter.costs
    assert found is not None
    assert min(found.step_s, found.token_s, found.row_s, found.kv_token_s) >= 0


def test_few_steps_say_nothing() -> None:
    assert measured(COSTS, MIN_STEPS - 1).costs is None
    idle = CostMeter()
    for _ in range(100):
        idle(step(0, 0, 0, 1.0))
    assert idle.costs is None


def settings(**changes: Any) -> EngineSettings:
    values: dict[str, Any] = {
        "dtype": "float32", "device": "cpu", "attention": "auto", "batch_size": 8,
        "prefill_tokens": 64, "kv_tokens": 100, "prefix_cache": True, "num_threads": 1,
    }  # fmt: skip
    return EngineSettings(**(values | changes))


def test_costs_are_kept_for_the_settings_they_were_measured_with(tmp_path: Path) -> None:
    key = costs_key("abc", settings())
    assert read_costs(tmp_path, key) is None
    write_costs(tmp_path, key, COSTS)
    assert read_costs(tmp_path, key) == COSTS
    write_costs(tmp_path, key, replace(COSTS, row_s=0.0))
    assert read_costs(tmp_path, key) == replace(COSTS, row_s=0.0)
    assert costs_key("abc", settings(batch_size=9)) == key  # a step says how many rows it has
    for other in (costs_key("abd", settings()), costs_key("abc", settings(num_threads=2))):
        assert read_costs(tmp_path, other) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found | {"key": {}},
        lambda found: {"key": found["key"]},
        lambda found: found | {"costs": found["costs"] | {"token_s": -1.0}},
        lambda found: found | {"costs": found["costs"] | {"token_s": "x"}},
        lambda found: [],
    ],
)
def test_what_is_not_to_be_trusted_is_as_good_as_absent(tmp_path: Path, change: Any) -> None:
    key = costs_key("abc", settings())
    write_costs(tmp_path, key, COSTS)
    [file] = (tmp_path / "costs").iterdir()
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    assert read_costs(tmp_path, key) is None
    file.write_text("{")
    assert read_costs(tmp_path, key) is None
