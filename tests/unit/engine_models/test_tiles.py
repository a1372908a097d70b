"""Which tiles are taken for the Triton kernels: the fastest of those measured on this very GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from batchradix.cli import bench_attention
from batchradix.engine.attention import bench, measured, registry
from batchradix.engine.attention.base import AttentionShape
from batchradix.engine.attention.bench import tune, typical_steps
from batchradix.engine.attention.measured import read_tiles, write_tiles
from batchradix.engine.attention.registry import make_backend
from batchradix.engine.attention.triton_backend import TritonAttention
from batchradix.report.progress import choose_progress
from batchradix_kernels.float8 import FLOAT8
from batchradix_kernels.tree_attention.tiles import Tile, choose_tiles, tile_choices

triton = pytest.importorskip("triton")

SHAPE = AttentionShape(
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=128,
    scale=0.25,
    dtype=torch.bfloat16,
    device=torch.device("cpu"),
)
LOWS, HIGHS = tile_choices(128, 4, torch.bfloat16)
BUILT_IN = (LOWS[0], HIGHS[0])


class Clock:
    """Times of sets of tiles, as somebody might have measured them: 10 ms, but for those named."""

    def __init__(self, taken_ms: Mapping[Tile, tuple[float, float]]) -> None:
        self.taken_ms = taken_ms
        self.asked: list[list[tuple[Tile, ...]]] = []

    def __call__(self, makers: Mapping[str, Any]) -> measured.Times:
        sets = {name: make.keywords["tiles"] for name, make in makers.items()}
        self.asked.append(list(sets.values()))
        times = {}
        for name, tiles in sets.items():
            total = [10.0, 10.0]
            for tile in tiles:
                for step, factor in enumerate(self.taken_ms.get(tile, (1.0, 1.0))):
                    total[step] *= factor
            times[name] = dict(zip(("shared", "prefill"), total, strict=True))
        return times


def test_the_low_tile_is_chosen_first_and_the_high_one_beside_it():
    clock = Clock({LOWS[2]: (0.5, 1.0), HIGHS[1]: (1.0, 0.8), HIGHS[2]: (1.0, 0.9)})
    assert tune(SHAPE, (), clock) == (LOWS[2], HIGHS[1])
    assert clock.asked == [
        [(low, HIGHS[0]) for low in LOWS],
        [(LOWS[2], high) for high in HIGHS],
    ]


def test_what_is_hardly_faster_or_faster_in_one_step_alone_is_not_taken():
    assert tune(SHAPE, (), Clock({LOWS[1]: (0.98, 0.98)})) == BUILT_IN
    assert tune(SHAPE, (), Clock({LOWS[1]: (0.5, 2.1)})) == BUILT_IN
    assert tune(SHAPE, (), Clock({LOWS[1]: (0.96, 0.97)})) == (LOWS[1], HIGHS[0])


def test_where_there_is_nothing_to_choose_nothing_is_measured():
    clock = Clock({})
    assert tune(replace(SHAPE, dtype=torch.float32), (), clock) == choose_tiles(
        128, 4, torch.float32
    )
    assert clock.asked == []


@pytest.fixture
def serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend can be made here, though not run."""
    monkeypatch.setattr(TritonAttention, "missing", lambda shape: None)


def tiles_of(shape: AttentionShape, folder: Path | None) -> tuple[Tile, ...]:
    backend = make_backend("triton", shape, folder)
    assert isinstance(backend, TritonAttention)
    return backend._kernel._tiles


@pytest.mark.usefixtures("serves")
def test_a_backend_takes_the_tiles_that_were_kept_for_its_shape(tmp_path):
    assert tiles_of(SHAPE, tmp_path) == BUILT_IN
    write_tiles(tmp_path, SHAPE, (LOWS[1], HIGHS[2]))
    assert tiles_of(SHAPE, tmp_path) == (LOWS[1], HIGHS[2])
    assert tiles_of(replace(SHAPE, num_layers=40), tmp_path) == (LOWS[1], HIGHS[2])
    assert tiles_of(SHAPE, None) == BUILT_IN
    for other in ({"kv_dtype": FLOAT8}, {"num_heads": 6}, {"dtype": torch.float16}):
        assert tiles_of(replace(SHAPE, **other), tmp_path) == BUILT_IN


@pytest.mark.usefixtures("serves")
def test_another_gpu_or_version_begins_with_the_built_in_ones(tmp_path, monkeypatch):
    write_tiles(tmp_path, SHAPE, (LOWS[1], HIGHS[2]))
    for name, other in (
        (f"{measured.__name__}.processor_name", lambda device: "another"),
        (f"{measured.__name__}.VERSION", "0"),
        ("triton.__version__", "0"),
        ("torch.__version__", "0"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(name, other)
            assert tiles_of(SHAPE, tmp_path) == BUILT_IN, name
    assert tiles_of(SHAPE, tmp_path) == (LOWS[1], HIGHS[2])


KEPT = [asdict(LOWS[1]), asdict(HIGHS[2])]


@pytest.mark.parametrize(
    "fastest",
    [
        None,
        [],
        KEPT[:1],
        KEPT[::-1],
        [*KEPT, KEPT[1]],
        [KEPT[0] | {"num_stages": 99}, KEPT[1]],
        [KEPT[0] | {"other": 1}, KEPT[1]],
        ["16", "128"],
    ],
)
@pytest.mark.usefixtures("serves")
def test_tiles_that_are_no_choice_here_are_not_taken(tmp_path, fastest):
    path = write_tiles(tmp_path, SHAPE, (LOWS[1], HIGHS[2]))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fastest": fastest}))
    assert read_tiles(tmp_path, SHAPE) is None
    assert tiles_of(SHAPE, tmp_path) == BUILT_IN


@pytest.mark.usefixtures("serves")
def test_tiles_that_others_may_write_are_not_trusted(tmp_path):
    os.chmod(write_tiles(tmp_path, SHAPE, (LOWS[1], HIGHS[2])), 0o666)
    assert tiles_of(SHAPE, tmp_path) == BUILT_IN


@pytest.mark.usefixtures("serves")
def test_the_command_measures_and_keeps_them_and_a_run_never_measures(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHRADIX_CACHE", str(tmp_path))
    monkeypatch.setattr(registry, "interprets", lambda: False)
    progress = choose_progress(quiet=True)
    asked: list[Any] = []
    clock = Clock({HIGHS[2]: (0.5, 0.5)})

    def compare(makers: Any, shape: AttentionShape, steps: Any) -> Any:
        asked.append((shape, steps))
        return clock(makers)

    monkeypatch.setattr(bench, "compare", compare)
    assert tiles_of(SHAPE, tmp_path) == BUILT_IN
    assert asked == []
    steps = typical_steps()
    assert bench_attention._tune(SHAPE, steps, progress) == (LOWS[0], HIGHS[2])
    assert asked == [(SHAPE, steps)] * 2
    assert tiles_of(SHAPE, tmp_path) == (LOWS[0], HIGHS[2])
    assert len(asked) == 2
    monkeypatch.setattr(registry, "interprets", lambda: True)
    assert bench_attention._tune(SHAPE, steps, progress) is None
