"""Tiles of the Triton kernel by architecture, and what they are made of on a roofline.

    python -m batchradix_kernels.tree_attention.tiles      prints the table of docs/kernels.md

Nothing here was measured on a GPU: tiles are chosen by what ahead-of-time compilation says of
registers, spills and shared memory. `tile_choices` names those that are worth timing on one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from batchradix_kernels.aot import (
    SHARED_LIMIT_BYTES,
    CompileCase,
    CompileReport,
    compile_reports,
)
from batchradix_kernels.float8 import FLOAT8

__all__ = ["Tile", "choose_tiles", "compile_cases", "roofline_table", "tile_choices"]

NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", FLOAT8: "fp8e4nv"}
# One H200 (vendor's figures): dense bfloat16 on tensor cores, memory, processors and what each has.
PEAK_FLOPS_PER_S = 989e12
PEAK_BYTES_PER_S = 4.8e12
NUM_PROCESSORS = 132
REGISTERS = 65_536
MAX_WARPS = 64
RESERVED_SHARED_BYTES = 1024  # of every resident program
LATENCY_S = 700e-9  # of a load from memory, an assumption


@dataclass(frozen=True, slots=True)
class Tile:
    """``rows`` and ``slots`` that a program multiplies at a time."""

    rows: int
    slots: int
    num_warps: int
    num_stages: int

    def __str__(self) -> str:
        return f"{self.rows} × {self.slots}, {self.num_warps} × {self.num_stages}"


def choose_tiles(
    head_dim: int,
    group: int,
    dtype: torch.dtype,
    architecture: str = "sm_90",
    kv_dtype: torch.dtype | None = None,
) -> tuple[Tile, ...]:
    """A low tile, for the tails of single rows, and a high one, for shared nodes and prefill.

    ``architecture``: ``sm_90`` (which serves all of NVIDIA's with the memory for it) or
    ``gfx942``; ``kv_dtype``: of the pool, where it is `FLOAT8`. Both tiles hold the ``group`` query
    heads of a key head; one serves for both where the low one is as high.
    """
    return tuple(
        choices[0] for choices in tile_choices(head_dim, group, dtype, architecture, kv_dtype)
    )


def tile_choices(
    head_dim: int,
    group: int,
    dtype: torch.dtype,
    architecture: str = "sm_90",
    kv_dtype: torch.dtype | None = None,
) -> tuple[tuple[Tile, ...], ...]:
    """For each of `choose_tiles` what could stand in its place, itself first.

    Low ones wait for memory: more in flight, more slots at a time, or more programs on a processor
    may serve them better; high ones more slots at a time or two programs on a processor. In
    float32 and on gfx942 there is nothing to choose.
    """
    low = max(16, _power_of_two(group))
    lows: tuple[Tile, ...]
    highs: tuple[Tile, ...]
    if dtype == torch.float32:  # without tensor cores; more than this spills
        num_stages = 1 if kv_dtype == FLOAT8 else 2  # what is widened ahead spills
        lows, highs = (Tile(low, 16, 4, num_stages),), (Tile(32, 16, 8, num_stages),)
    elif architecture == "gfx942":
        lows, highs = (Tile(low, 64, 4, 2),), (Tile(64, 64, 4, 1),)
    else:
        n = 64 if head_dim <= 128 else 32
        lows = (Tile(low, n, 4, 3), Tile(low, n, 4, 4), Tile(low, 2 * n, 4, 2))
        if low == 16:
            lows += (Tile(low, n // 2, 2, 4),)
        highs = (Tile(128, n, 8, 3), Tile(128, 2 * n, 8, 2), Tile(64, n, 4, 3))
    if low < highs[0].rows:
        return lows, tuple(tile for tile in highs if tile.rows > low)
    return ((replace(highs[0], rows=low),),)


def fit_choices(
    choices: tuple[Tile, ...], head_dim: int, element_bytes: int, shared_limit_bytes: int
) -> tuple[Tile, ...]:
    """What becomes of choices by `fit`, each once; but for the first only those that do fit."""
    first, *others = (fit(tile, head_dim, element_bytes, shared_limit_bytes) for tile in choices)
    width = max(16, _power_of_two(head_dim)) * element_bytes
    found = {first: None}
    for tile in others:
        if width * (tile.rows + 2 * tile.slots * tile.num_stages) <= shared_limit_bytes:
            found[tile] = None
    return tuple(found)


def fit(tile: Tile, head_dim: int, element_bytes: int, shared_limit_bytes: int) -> Tile:
    """The tile with as many stages as a device's shared memory holds."""
    width = max(16, _power_of_two(head_dim)) * element_bytes
    stages = (shared_limit_bytes // width - tile.rows) // (2 * tile.slots)
    return replace(tile, num_stages=max(1, min(tile.num_stages, stages)))


def compile_cases(
    head_dim: int,
    group: int,
    dtype: torch.dtype,
    *,
    architecture: str = "sm_90",
    page_size: int = 0,
    query_dtype: torch.dtype | None = None,
    kv_dtype: torch.dtype | None = None,
    tiles: Sequence[Tile] | None = None,
    windowed: bool = False,
    capped: bool = False,
) -> list[CompileCase]:
    """The kernel with each of the tiles that a model of this shape gets, or with ``tiles``; for
    layers with windows, for models with capped scores."""
    kind, stored = NAMES[dtype], NAMES[kv_dtype or dtype]
    types = {
        "q": f"*{NAMES[query_dtype or dtype]}",
        "keys": f"*{stored}",
        "values": f"*{stored}",
        "items": "*i32",
        "pages": "*i32",
        "first_seen": "*i32",
        "partial": "*fp32",
        "partial_lse": "*fp32",
        "q_token_stride": "i32",
        "q_head_stride": "i32",
        "kv_head_stride": "i64",
        "scale_log2": "fp32",
        "cap_log2": "fp32",
    }
    pages = f", pages of {page_size}" if page_size else ""
    name = kind if stored == kind else f"{kind} over {stored}"
    return [
        CompileCase(
            name=f"{name} {head_dim}, {group} heads{pages}: {tile.rows} × {tile.slots}",
            kernel="batchradix_kernels.tree_attention.triton:attend_items_kernel",
            signature=types,
            constexprs={
                "GROUP": group,
                "HEAD_DIM": head_dim,
                "PAGE_SIZE": page_size,
                "BLOCK_M": tile.rows,
                "BLOCK_N": tile.slots,
                "BLOCK_E": max(16, _power_of_two(head_dim)),
                "DTYPE": kind,
                "PRECISION": "ieee",
                "WINDOWED": windowed,
                "CAPPED": capped,
            },
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            aligned=("q_token_stride", "q_head_stride", "kv_head_stride"),
            target=architecture,
        )
        for tile in tiles or choose_tiles(head_dim, group, dtype, architecture, kv_dtype)
    ]


def roofline_table(cases: Sequence[CompileCase], reports: Sequence[CompileReport]) -> str:
    """A Markdown table of bfloat16 kernels for sm_90, a line each."""
    lines = [
        "| kernel | warps × stages | shared KiB | registers | wgmma, mma | programs a processor "
        "| KiB a tile | MFLOP a tile | FLOP a byte | bound | KiB in flight a processor |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case, report in zip(cases, reports, strict=True):
        made = case.constexprs
        rows, slots, width = (int(made[key] or 0) for key in ("BLOCK_M", "BLOCK_N", "HEAD_DIM"))
        tile_bytes = 2 * slots * width * 2
        flops = 4 * rows * slots * width
        resident = programs_per_processor(report)
        in_flight = resident * max(case.num_stages - 1, 1) * tile_bytes
        bound = "memory" if flops / tile_bytes < PEAK_FLOPS_PER_S / PEAK_BYTES_PER_S else "compute"
        cells = (
            *(case.name, f"{case.num_warps} × {case.num_stages}"),
            *(f"{report.shared_bytes / 1024:.1f}", str(report.registers)),
            *(f"{report.wgmma}, {report.mma}", str(resident)),
            *(f"{tile_bytes / 1024:.0f}", f"{flops / 1e6:.2f}", f"{flops / tile_bytes:.0f}"),
            *(bound, f"{in_flight / 1024:.0f}"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def programs_per_processor(report: CompileReport) -> int:
    """How many programs fit a processor of an H200 at once."""
    by_shared = SHARED_LIMIT_BYTES["sm_90"] + RESERVED_SHARED_BYTES
    by_shared //= report.shared_bytes + RESERVED_SHARED_BYTES
    registers = -(-report.registers // 8) * 8 * 32 * report.num_warps
    return min(by_shared, REGISTERS // registers, MAX_WARPS // report.num_warps)


TABLE_SHAPES = ((128, 4), (128, 8), (64, 3))  # head dimension, query heads a key head


def table_cases() -> list[CompileCase]:
    """The kernels of the table in docs/kernels.md."""
    return [
        case
        for head_dim, group in TABLE_SHAPES
        for case in compile_cases(head_dim, group, torch.bfloat16)
    ]


def _power_of_two(count: int) -> int:
    """The first one that is not below ``count``."""
    return 1 << (count - 1).bit_length()


if __name__ == "__main__":
    cases = table_cases()
    print(roofline_table(cases, compile_reports(cases)))  # noqa: T201
