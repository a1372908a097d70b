"""Measures what attention takes here, in steps that are typical of a run, on random numbers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from batchradix.engine.attention.base import AttentionShape
from batchradix.engine.attention.measured import TILE_MARGIN, Times, fastest
from batchradix.engine.attention.mla_base import AnyShape, MlaShape, UpProjection
from batchradix.engine.attention.registry import make_any_backend, measurable
from batchradix.engine.attention.triton_backend import TritonAttention
from batchradix.engine.memory import enough_memory
from batchradix.engine.step import Step, i64_table
from batchradix.types import I64
from batchradix_kernels.float8 import stored
from batchradix_kernels.tree_attention.window import piece_table, positions_of

if TYPE_CHECKING:
    from batchradix_kernels.tree_attention.tiles import Tile

Maker = Callable[[Any], Any]
"""Of a shape, a backend for it: `AttentionBackend` or, of a `MlaShape`, `MlaBackend`."""

ROUNDS = 11
_WARM_UP_ROUNDS = 2
_MAX_BYTES = 256 * 2**20  # about what a backend's pool and `UpProjection`s may take
_MAX_LAYERS = 8
_FILLED_AT_ONCE = 4096  # slots


@dataclass(frozen=True, slots=True)
class BenchStep:
    """A step over slots [0, num_slots) of a pool; ``what`` describes it for people."""

    name: str
    what: str
    step: Step
    num_slots: int


def typical_steps() -> tuple[BenchStep, ...]:
    """What `batchradix bench-attention` measures."""
    return (
        shared_decode(num_rows=64, num_prefix=300, num_documents=8, num_document=400, num_tail=50),
        prefill(num_tokens=512, num_prefix=700),
        separate_decode(num_rows=64, num_tokens=500),
    )


def shared_decode(
    *, num_rows: int, num_prefix: int, num_documents: int, num_document: int, num_tail: int
) -> BenchStep:
    """Rows that decode below one prefix and, ``num_rows / num_documents`` each, below documents."""
    each = num_rows // num_documents
    context, at = [(0, num_prefix, 0, num_rows)], num_prefix
    for first in range(0, num_rows, each):
        context.append((at, num_document, first, first + each))
        at += num_document
    context += [(at + num_tail * row, num_tail, row, row + 1) for row in range(num_rows)]
    ends = at + num_tail * np.arange(1, num_rows + 1)
    what = (
        f"{num_rows} rows decode below {num_prefix} shared tokens, {num_documents} documents of "
        f"{num_document} and tails of {num_tail}"
    )
    return BenchStep("shared", what, _step(ends - 1, context, []), int(ends[-1]))


def prefill(*, num_tokens: int, num_prefix: int) -> BenchStep:
    """A chunk of a prompt behind what is cached of it."""
    end = num_prefix + num_tokens
    context = [(0, num_prefix, 0, num_tokens)]
    causal = [(num_prefix, num_tokens, 0, num_tokens)]
    what = f"a chunk of {num_tokens} prompt tokens behind {num_prefix} cached ones"
    return BenchStep("prefill", what, _step(np.arange(num_prefix, end), context, causal), end)


def separate_decode(*, num_rows: int, num_tokens: int) -> BenchStep:
    """Rows that decode and have nothing in common."""
    context = [(num_tokens * row, num_tokens, row, row + 1) for row in range(num_rows)]
    ends = num_tokens * np.arange(1, num_rows + 1)
    what = f"{num_rows} rows decode behind {num_tokens} tokens each, nothing shared"
    return BenchStep("separate", what, _step(ends - 1, context, []), int(ends[-1]))


def measure(
    shape: AnyShape,
    steps: Sequence[BenchStep],
    *,
    folder: Path | None = None,
    num_rounds: int = ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """What a layer takes in each step, of every backend that can serve, as `compare` says.

    ``folder``: the cache folder, where `tune` left the tiles that a run will take.
    """
    makers = {name: partial(make_any_backend, name, folder=folder) for name in measurable(shape)}
    return compare(makers, shape, steps, num_rounds=num_rounds, clock=clock)


def tune(
    shape: AttentionShape,
    steps: Sequence[BenchStep],
    timed: Callable[[Mapping[str, Maker]], Times] | None = None,
) -> tuple[Tile, ...]:
    """The tiles with which Triton's kernels are fastest on the shape's GPU, all steps counting the
    same: first the low ones, then the high ones beside them.

    The built-in ones stay where no other takes less than `TILE_MARGIN` of their times. ``timed``
    stands in for `compare`.
    """
    from batchradix_kernels.tree_attention.triton import device_tiles

    timed = timed or partial(compare, shape=shape, steps=steps)
    group = shape.num_heads // shape.num_kv_heads
    choices = device_tiles(shape.head_dim, group, shape.dtype, shape.device, shape.kv_dtype)
    tiles = tuple(each[0] for each in choices)
    for place, each in enumerate(choices):
        sets = {str(tile): (*tiles[:place], tile, *tiles[place + 1 :]) for tile in each}
        if len(sets) > 1:
            makers = {name: partial(TritonAttention, tiles=found) for name, found in sets.items()}
            tiles = sets[fastest(timed(makers), str(tiles[place]), TILE_MARGIN)]
    return tiles


def compare(
    makers: Mapping[str, Maker],
    shape: AnyShape,
    steps: Sequence[BenchStep],
    *,
    num_rounds: int = ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """What a layer takes in each step with each of the backends; medians of ``num_rounds``.

    The backends take turns, behind rounds that only warm up. The plan, which is made once a step,
    counts with its share of a layer. ``clock`` says seconds. Raises `OutOfMemoryError`.
    """
    times: dict[str, dict[str, float]] = {name: {} for name in makers}
    remedy = "use a smaller model, or a `dtype` of 16 bits"
    with enough_memory("while attention was measured", remedy), torch.inference_mode():
        for bench in steps:
            for name, taken_s in _measure_step(makers, shape, bench, num_rounds, clock).items():
                times[name][bench.name] = 1e3 * taken_s
    return times


def _measure_step(
    makers: Mapping[str, Maker],
    shape: AnyShape,
    bench: BenchStep,
    num_rounds: int,
    clock: Callable[[], float],
) -> dict[str, float]:
    names = list(makers)
    runs = {name: _prepare(make, shape, bench, clock) for name, make in makers.items()}
    taken_s: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(_WARM_UP_ROUNDS + num_rounds):
        for name in names[:: 1 if turn % 2 else -1]:
            taken_s[name].append(runs[name]())
    return {name: statistics.median(taken_s[name][_WARM_UP_ROUNDS:]) for name in names}


def _prepare(
    make: Maker, shape: AnyShape, bench: BenchStep, clock: Callable[[], float]
) -> Callable[[], float]:
    """A function that runs the step on some layers and says how many seconds one took."""
    num_heads, *widths = shape.kv_shape
    layer_bytes = num_heads * sum(widths) * shape.pool_dtype.itemsize * bench.num_slots
    layer_bytes += _up_elements(shape) * shape.dtype.itemsize
    num_layers = max(1, min(shape.num_layers, _MAX_LAYERS, _MAX_BYTES // layer_bytes))
    backend = make(replace(shape, num_layers=num_layers))
    random = torch.Generator(shape.device).manual_seed(0)

    def numbers(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=random, device=shape.device, dtype=shape.dtype)

    pool = backend.allocate(bench.num_slots)
    for start in range(0, bench.num_slots, _FILLED_AT_ONCE):
        num_slots = min(_FILLED_AT_ONCE, bench.num_slots - start)
        sizes = [(num_layers, num_heads, num_slots, width) for width in widths]
        k, v = (stored(numbers(*size), shape.pool_dtype) for size in sizes)
        backend.load(pool, start, k, v)
    inputs = _inputs(shape, bench.step.num_tokens, num_layers, numbers)

    def run() -> float:
        started_s = clock()
        plan = backend.plan(bench.step)
        _wait(shape.device)
        planned_s = clock()
        for layer, given in enumerate(inputs):
            backend.run(layer, *given, pool, plan)
        _wait(shape.device)
        ended_s = clock()
        return (planned_s - started_s) / shape.num_layers + (ended_s - planned_s) / num_layers

    return run


def _inputs(
    shape: AnyShape, num_tokens: int, num_layers: int, numbers: Callable[..., torch.Tensor]
) -> list[tuple[Any, ...]]:
    """What ``run`` gets in each layer between the layer's number and the pool."""
    if not isinstance(shape, MlaShape):
        heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        qkv = numbers(num_tokens, sum(heads), shape.head_dim)
        return [torch.split(qkv, heads, dim=1)] * num_layers
    q = numbers(num_tokens, shape.num_heads, shape.nope_dim + shape.rope_dim)
    rows = numbers(num_tokens, shape.width)
    given = (
        *torch.split(q, [shape.nope_dim, shape.rope_dim], dim=-1),
        *torch.split(rows, [shape.kv_lora_rank, shape.rope_dim], dim=-1),
    )
    heads_HPV = (shape.num_heads, shape.nope_dim, shape.v_dim)
    kv_b = (shape.num_heads * (shape.nope_dim + shape.v_dim), shape.kv_lora_rank)
    # Each layer has its own, so that none finds it in a cache.
    return [(*given, UpProjection.split(numbers(*kv_b), heads_HPV)) for _ in range(num_layers)]


def _up_elements(shape: AnyShape) -> int:
    """Elements of a layer's `UpProjection`."""
    if not isinstance(shape, MlaShape):
        return 0
    return shape.num_heads * (shape.nope_dim + shape.v_dim) * shape.kv_lora_rank


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _step(
    slots: I64, context: Sequence[tuple[int, ...]], causal: Sequence[tuple[int, ...]]
) -> Step:
    pieces = i64_table(context, 4), i64_table(causal, 4)
    _, positions = positions_of(piece_table(*pieces), len(slots))
    return Step(
        token_ids=np.zeros_like(slots),
        positions=positions,
        slots=slots,
        context=pieces[0],
        causal=pieces[1],
    )
