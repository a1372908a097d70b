"""What attention takes on this machine, as it was measured, kept in the cache folder for ``auto``,
and the tiles that were fastest for the Triton kernels.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from batchradix._version import VERSION
from batchradix.engine.attention.base import AttentionShape
from batchradix.engine.attention.mla_base import AnyShape
from batchradix.engine.device import processor_name
from batchradix.engine.kept_table import NO_TABLE, read_table, write_table

if TYPE_CHECKING:
    from batchradix_kernels.tree_attention.tiles import Tile

Times = Mapping[str, Mapping[str, float]]
"""Milliseconds a layer: by backend, then by step."""

MARGIN = 0.9
TILE_MARGIN = 0.97
_FORMAT = 1  # another one for other steps to measure
_KIND = "attention"


def table_key(
    shape: AnyShape, backends: Sequence[str], num_threads: int | None = None
) -> dict[str, Any]:
    """All that times depend on, as a JSON object; ``backends`` are those that can serve.

    ``num_threads``: those a run will have on the CPU, where it has not set them yet.
    """
    threads = num_threads or torch.get_num_threads()
    return {
        "format": _FORMAT,
        "version": VERSION,
        "torch": torch.__version__,
        "processor": processor_name(shape.device),
        "num_threads": threads if shape.device.type == "cpu" else 0,
        "backends": sorted(backends),
        "dtype": str(shape.dtype).removeprefix("torch."),
        "kv_dtype": str(shape.pool_dtype).removeprefix("torch."),
        **shape.sizes,
        **(shape.peculiarities if isinstance(shape, AttentionShape) else {}),
    }


def fastest(times: Times, usual: str, margin: float = MARGIN) -> str:
    """The backend whose times are least, each step counting the same.

    ``usual`` where none takes less than ``margin`` of its times: measured twice they differ by a
    few percent, and that a whole step may be one call of the C kernels is not among them.
    """
    means = {name: statistics.geometric_mean(steps.values()) for name, steps in times.items()}
    best = min(means, key=means.__getitem__)
    return best if means[best] < margin * means[usual] else usual


def write_times(folder: Path, key: Mapping[str, Any], times: Times) -> Path:
    """Keeps a table in the cache folder, in the place of an older one, and returns its file.

    Raises `ModelError` or `OSError` when the folder cannot be written.
    """
    return write_table(folder, _KIND, key, milliseconds=times)


def read_times(folder: Path, key: Mapping[str, Any]) -> Times | None:
    """The table of a key, None where there is none to be trusted."""
    try:
        times = {
            name: {step: float(taken_ms) for step, taken_ms in steps.items()}
            for name, steps in read_table(folder, _KIND, key, "milliseconds").items()
        }
    except NO_TABLE:
        return None
    numbers = [taken_ms for steps in times.values() for taken_ms in steps.values()]
    same_steps = len({frozenset(steps) for steps in times.values()}) == 1
    if not (sorted(times) == key["backends"] and same_steps and numbers):
        return None
    return times if all(0 < taken_ms < math.inf for taken_ms in numbers) else None


def tiles_key(shape: AttentionShape) -> dict[str, Any]:
    """All that the fastest tiles of the Triton kernels depend on, as a JSON object."""
    import triton

    key = table_key(shape, ["triton"]) | {"tiles": _FORMAT, "triton": triton.__version__}
    return {name: value for name, value in key.items() if name != "num_layers"}


def write_tiles(folder: Path, shape: AttentionShape, tiles: Sequence[Tile]) -> Path:
    """Keeps what `read_tiles` gives, and returns its file. Raises as `write_times`."""
    return write_table(folder, _KIND, tiles_key(shape), fastest=[asdict(tile) for tile in tiles])


def read_tiles(folder: Path, shape: AttentionShape) -> tuple[Tile, ...] | None:
    """The tiles that were fastest for this shape on this very GPU, with this Triton.

    None where there are none to be trusted, or one is not among `device_tiles`.
    """
    from batchradix_kernels.tree_attention.tiles import Tile
    from batchradix_kernels.tree_attention.triton import device_tiles

    group = shape.num_heads // shape.num_kv_heads
    choices = device_tiles(shape.head_dim, group, shape.dtype, shape.device, shape.kv_dtype)
    try:
        found = [Tile(**each) for each in read_table(folder, _KIND, tiles_key(shape), "fastest")]
        return tuple(
            each[each.index(tile)] for each, tile in zip(choices, found, strict=True)
        )  # ValueError where one is no choice
    except NO_TABLE:
        return None
