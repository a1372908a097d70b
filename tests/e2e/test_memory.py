"""A job costs disk a row, not memory: what is held of each row, and what a process grows by."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchradix import pipeline
from batchradix.config import EngineOptions, OutputOptions, RunConfig
from batchradix.report.progress import Silent
from batchradix.scratch import Scratch
from batchradix.types import TokenTable

NUM_ROWS = 20_000
MOST_BYTES_A_ROW = 64
MakeTinyModel = Callable[..., Path]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def echo() -> ModuleType:
    return load(Path(__file__).with_name("echo.py"))


@pytest.fixture(scope="module")
def model(tiny_model_folder: MakeTinyModel) -> str:
    return str(tiny_model_folder("const", prefer="a"))


def write_rows(path: Path, *, every_error: int | None = None) -> Path:
    """Prompts in no order that share their beginnings; every so many rows one is null."""
    rows = range(NUM_ROWS)
    prompts = [f"Is {row * 7919 % 97:02d} like {row}?" for row in rows]
    if every_error is not None:
        prompts = [None if row % every_error else text for row, text in enumerate(prompts)]
    pq.write_table(pa.table({"id": [f"r{row}" for row in rows], "prompt": prompts}), path)
    return path


def in_memory_bytes(held: Any) -> int:
    """Bytes of the arrays below an object that lie in memory and not in a file."""
    if isinstance(held, np.ndarray):
        base: Any = held
        while base is not None and type(base).__name__ != "mmap":
            if isinstance(base, np.ndarray) and base.base is None:
                return base.nbytes  # what a view keeps alive
            base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
        return 0
    if isinstance(held, dict):
        return sys.getsizeof(held) + sum(in_memory_bytes(one) for one in held.values())
    if is_dataclass(held) and not isinstance(held, type):
        return sum(in_memory_bytes(getattr(held, field.name)) for field in fields(held))
    return sum(in_memory_bytes(one) for one in getattr(held, "__dict__", {}).values())


@pytest.mark.parametrize("every_error", [None, 2])
def test_what_a_plan_holds_of_each_row_lies_in_files(
    model: str, tmp_path: Path, every_error: int | None
) -> None:
    given = write_rows(tmp_path / "rows.parquet", every_error=every_error)
    parts = pipeline.open_parts(
        RunConfig(input=given, model=model, engine=EngineOptions(plan_memory_bytes=1 << 20)),
        progress=Silent(),
    )
    planned = pipeline.plan_rows(
        parts,
        folder=tmp_path / "tokens",
        progress=Silent(),
        scratch=Scratch(tmp_path, least_bytes=1 << 12),
    )
    assert len(planned.plan) == (NUM_ROWS if every_error is None else NUM_ROWS // every_error)
    assert isinstance(planned.rows.tokens, TokenTable)
    held = planned.rows, planned.plan, planned.alone, planned.tree, planned.leaders, planned.cached
    assert sum(map(in_memory_bytes, held)) + in_memory_bytes(planned.rng_key) < NUM_ROWS // 8
    job, runs_for = pipeline.make_job(planned, np.sort(planned.plan.order)[1:], prefix_cache=True)
    assert in_memory_bytes(job) + in_memory_bytes(runs_for) < NUM_ROWS // 8


def test_a_job_that_is_sorted_in_parts_ends_in_the_same_file(
    model: str, echo: ModuleType, tmp_path: Path
) -> None:
    given = write_rows(tmp_path / "rows.parquet", every_error=3)
    made = []
    for plan_memory_bytes in (1 << 30, 1 << 19):
        path = tmp_path / f"{plan_memory_bytes}.arrow"
        pipeline.run(
            RunConfig(
                input=given,
                model=model,
                engine=EngineOptions(
                    dtype="float32", batch_size=256, plan_memory_bytes=plan_memory_bytes
                ),
                output=OutputOptions(path=path),
            ),
            engines=echo.EchoEngines,
        )
        made.append(path.read_bytes())
    assert made[0] == made[1]


def test_the_echo_engine_answers_each_row_once(
    model: str, echo: ModuleType, tmp_path: Path
) -> None:
    given = [{"prompt": f"row {row % 40}"} for row in range(100)]
    outcome = pipeline.run(
        RunConfig(input=given, model=model, engine=EngineOptions(dtype="float32", batch_size=7)),
        engines=echo.EchoEngines,
    )
    assert outcome.table is not None
    assert outcome.table["row"].to_pylist() == list(range(100))
    assert set(outcome.table["text"].to_pylist()) == {echo.TEXT}
    assert outcome.summary.usage.forward_steps == 6  # of 7 rows, for 40 that differ


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_resident_memory_grows_by_at_most_64_bytes_a_row_from_one_to_three_million(
    model: str, tmp_path: Path
) -> None:
    memory = load(Path(__file__).parents[2] / "benchmarks" / "memory.py")
    peaks = {}
    for num_rows in (1_000_000, 3_000_000):
        folder = tmp_path / str(num_rows)
        folder.mkdir()
        # So little that both are sorted in ranges.
        peaks[num_rows] = memory.measure(Path(model), folder, num_rows, 64 << 20)["peak_bytes"]
    growth = peaks[3_000_000]["all"] - peaks[1_000_000]["all"]
    assert growth <= MOST_BYTES_A_ROW * 2_000_000
