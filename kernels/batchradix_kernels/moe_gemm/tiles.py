"""Tiles of the products of experts, and what the compiler makes of them.

    python -m batchradix_kernels.moe_gemm.tiles      prints the table of docs/kernels.md

Chosen without a GPU, by registers, spills and shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from batchradix_kernels.aot import CompileCase, CompileReport, compile_reports
from batchradix_kernels.tree_attention.tiles import NAMES, programs_per_processor

__all__ = ["ExpertTiles", "ProductTile", "choose_tiles", "compile_cases", "moe_table"]


@dataclass(frozen=True, slots=True)
class ProductTile:
    """``outputs`` of a program, and ``depth`` numbers multiplied at a time."""

    outputs: int
    depth: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """``block_rows``: rows of a program in both products."""

    block_rows: int
    gate_up: ProductTile
    down: ProductTile

    def fitting(self, element_bytes: int, shared_bytes: int) -> ExpertTiles:
        """With as many stages as a device's shared memory holds."""

        def fit(tile: ProductTile, strips: int) -> ProductTile:
            stage = (self.block_rows + strips * tile.outputs) * tile.depth * element_bytes
            return replace(tile, num_stages=max(1, min(tile.num_stages, shared_bytes // stage)))

        return replace(self, gate_up=fit(self.gate_up, 2), down=fit(self.down, 1))


HOPPER = (
    ExpertTiles(16, ProductTile(64, 128, 4, 3), ProductTile(128, 128, 4, 3)),
    ExpertTiles(64, ProductTile(64, 64, 4, 4), ProductTile(128, 64, 4, 4)),
    ExpertTiles(128, ProductTile(128, 64, 8, 3), ProductTile(256, 64, 8, 3)),
)
GFX942 = (
    ExpertTiles(16, ProductTile(32, 128, 4, 2), ProductTile(64, 128, 4, 2)),
    ExpertTiles(64, ProductTile(32, 64, 4, 2), ProductTile(128, 64, 4, 2)),
    ExpertTiles(128, ProductTile(64, 64, 8, 2), ProductTile(128, 64, 8, 2)),
)
FLOAT32 = ExpertTiles(32, ProductTile(32, 32, 4, 2), ProductTile(32, 32, 4, 2))


def choose_tiles(
    rows_an_expert: float, dtype: torch.dtype, architecture: str = "sm_90"
) -> ExpertTiles:
    """Blocks about as high as an expert has rows on average: lower ones read an expert's weights
    several times, higher ones multiply nothing."""
    if dtype == torch.float32:
        return FLOAT32
    heights = GFX942 if architecture == "gfx942" else HOPPER
    high = [tiles for tiles in heights if tiles.block_rows >= rows_an_expert]
    return high[0] if high else heights[-1]


def compile_cases(
    hidden: int,
    width: int,
    dtype: torch.dtype,
    tiles: ExpertTiles,
    *,
    num_chosen: int = 8,
    architecture: str = "sm_90",
) -> list[CompileCase]:
    """Both products; ``hidden``: D, ``width``: F."""
    kind = NAMES[dtype]
    signature = {
        **dict.fromkeys(("x", "weights", "out"), f"*{kind}"),
        **dict.fromkeys(("rows", "experts", "num_blocks"), "*i32"),
        "num_rows": "i32",
    }
    sides: tuple[tuple[str, ProductTile, int, int, dict[str, str], dict[str, int]], ...] = (
        ("gate_up", tiles.gate_up, hidden, width, {"x_stride": "i32"}, {"NUM_CHOSEN": num_chosen}),
        ("down", tiles.down, width, hidden, {"chosen_weights": "*fp32"}, {}),
    )
    return [
        CompileCase(
            name=f"{kind} {side}: {tiles.block_rows} × {tile.outputs} × {tile.depth}",
            kernel=f"batchradix_kernels.moe_gemm.triton:expert_{side}_kernel",
            signature=signature | own,
            constexprs={
                **constexprs,
                "IN_DIM": in_dim,
                "OUT_DIM": out_dim,
                "BLOCK_M": tiles.block_rows,
                "BLOCK_N": tile.outputs,
                "BLOCK_K": tile.depth,
                "PRECISION": "ieee",
            },
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            aligned=("x_stride",) if "x_stride" in own else (),
            target=architecture,
        )
        for side, tile, in_dim, out_dim, own, constexprs in sides
    ]


def table_cases() -> list[CompileCase]:
    """The kernels of the table in docs/kernels.md, with the sizes of DeepSeek-V3."""
    return [case for tiles in HOPPER for case in compile_cases(7168, 2048, torch.bfloat16, tiles)]


def moe_table(cases: Sequence[CompileCase], reports: Sequence[CompileReport]) -> str:
    """Markdown: what the compiler said, and the FLOP of a program for each byte that it reads."""
    lines = [
        "| kernel | warps × stages | shared KiB | registers | wgmma, mma | programs a processor "
        "| FLOP a byte |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, report in zip(cases, reports, strict=True):
        rows, outputs = (int(case.constexprs[name] or 0) for name in ("BLOCK_M", "BLOCK_N"))
        outputs *= 2 if "NUM_CHOSEN" in case.constexprs else 1
        cells = (
            *(case.name, f"{case.num_warps} × {case.num_stages}"),
            *(f"{report.shared_bytes / 1024:.1f}", str(report.registers)),
            *(f"{report.wgmma}, {report.mma}", str(programs_per_processor(report))),
            f"{2 * rows * outputs / (2 * (rows + outputs)):.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    cases = table_cases()
    print(moe_table(cases, compile_reports(cases)))  # noqa: T201
