"""Data sets of Ray Data, answered by its actors in the order of the plan."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import batchradix
from batchradix.errors import InputError
from batchradix.integrations.ray_data import RayExtractor, ordered_by_plan

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore")]
ray = pytest.importorskip("ray")

PROMPTS = [f"Text {number % 4}: {'lamp tea ' * 5} Q{number}?" for number in range(40)]


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    root = Path(__file__).parents[2]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", os.pathsep.join([str(root), str(root / "kernels")]))
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        yield
        ray.shutdown()


def test_actors_answer_blocks_in_the_order_of_the_plan(tiny_model_folder: Any) -> None:
    import ray.data

    job = {
        "model": str(tiny_model_folder("random", family="llama", seed=7)),
        "dtype": "float32",
        "device": "cpu",
        "max_tokens": 12,
        "kv_tokens": 4000,
    }
    table = pa.table({"number": range(40), "prompt": PROMPTS})
    ordered = ordered_by_plan(ray.data.from_arrow(table), 2, **job)
    blocks = [block.to_pylist() for block in ray.get(ordered.to_arrow_refs())]
    assert sorted(row["number"] for block in blocks for row in block) == list(range(40))
    texts = [{row["prompt"].split(":")[0] for row in block} for block in blocks]
    assert [len(found) for found in texts] == [2, 2]
    assert not texts[0] & texts[1]
    answers = ordered.map_batches(
        RayExtractor,
        fn_constructor_kwargs={"result_columns": ["status", "text"], **job},
        concurrency=1,
        batch_size=None,
        batch_format="pyarrow",
    )
    found = {row["number"]: (row["status"], row["text"]) for row in answers.take_all()}
    names = ("max_tokens",)
    alone = batchradix.run(
        table,
        model=job["model"],
        sampling=batchradix.SamplingOptions(max_tokens=12),
        engine=batchradix.EngineOptions(
            **{name: job[name] for name in job if name not in ("model", *names)}
        ),
    ).to_arrow()
    assert found == {row["number"]: (row["status"], row["text"]) for row in alone.to_pylist()}


def test_a_batch_of_numpy_arrays_is_refused_with_what_to_say(tiny_model_folder: Any) -> None:
    extractor = RayExtractor(model=str(tiny_model_folder("const", prefer="ab")))
    with pytest.raises(InputError, match='batch_format="pyarrow"'):
        extractor({"prompt": PROMPTS})  # type: ignore[arg-type]
