"""Tiles of latent attention by architecture, and what the compiler makes of them.

    python -m batchradix_kernels.mla_attention.tiles      prints the table of docs/kernels.md

Chosen as those of `batchradix_kernels.tree_attention.tiles` are: without a GPU, by registers,
spills and shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from batchradix_kernels.aot import CompileCase, CompileReport, compile_reports
from batchradix_kernels.tree_attention.tiles import NAMES, Tile, programs_per_processor

__all__ = ["choose_tiles", "compile_cases", "heads_of_block", "mla_table", "table_cases"]

STRIDES = (
    *("q_token_stride", "q_head_stride", "q_rope_token_stride", "q_rope_head_stride"),
    *("key_stride", "key_head_stride", "rope_stride", "value_stride", "value_head_stride"),
)


def choose_tiles(
    *,
    absorbed: bool,
    width: int,
    num_heads: int,
    dtype: torch.dtype,
    architecture: str = "sm_90",
    shared_bytes: int = 232_448,
) -> tuple[Tile, ...]:
    """A low tile and a high one, or one that is both.

    ``width``: numbers of a key and, where expanded, a value, padded to powers of two;
    ``shared_bytes``: what a program may have on an NVIDIA device.
    """
    if dtype == torch.float32:  # without tensor cores on NVIDIA
        if absorbed:
            return (Tile(16, 16, 4, 1) if architecture == "gfx942" else Tile(16, 16, 8, 2),)
        return (Tile(16, 16, 4, 2), Tile(32, 16, 8, 2))
    if architecture == "gfx942":
        if absorbed:
            low, high = Tile(16, 32, 4, 2), Tile(32, 32, 4, 1)
        else:
            low, high = Tile(16, 64, 4, 2), Tile(64, 64, 4, 1)
        return (high,) if absorbed and num_heads > 16 else (low, high)
    candidates: list[tuple[Tile, ...]]
    if not absorbed:
        candidates = [(Tile(16, 64, 4, 3), Tile(128, 64, 8, stages)) for stages in (3, 2, 1)]
    elif num_heads > 32:
        candidates = [(Tile(64, 64, 8, stages),) for stages in (2, 1)]
    else:
        low = Tile(32, 64, 8, 2) if num_heads > 16 else Tile(16, 64, 4, 2)
        # With 64 slots it spills where queries share a tile, but for some numbers of heads.
        candidates = [(low, Tile(64, 32, 8, stages)) for stages in (4, 2, 1)]
    candidates.append((Tile(16, 32, 4, 2),))

    def needs(tile: Tile) -> int:
        return (tile.rows + tile.num_stages * tile.slots) * width * dtype.itemsize

    fitting = [tiles for tiles in candidates if max(map(needs, tiles)) <= shared_bytes]
    return fitting[0] if fitting else (Tile(16, 16, 4, 1),)


def heads_of_block(num_heads: int, tiles: Sequence[Tile]) -> int:
    """How many heads, padded to a power of two, share the slots that a program reads when they
    are absorbed: all of them, or as many as the lowest tile has rows."""
    return min(tiles[0].rows, _power_of_two(num_heads))


def padded(size: int) -> int:
    """Width of a tile of rows ``size`` wide."""
    return max(16, _power_of_two(size))


def compile_cases(
    num_heads: int,
    dims: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    absorbed: bool,
    architecture: str = "sm_90",
    page_size: int = 0,
) -> list[CompileCase]:
    """The kernel with each of its tiles; ``dims``: those of a key's parts and of a value."""
    kind = NAMES[dtype]
    widths = [padded(dim) for dim in dims]
    tiles = choose_tiles(
        absorbed=absorbed,
        width=sum(widths[:2] if absorbed else widths),
        num_heads=num_heads,
        dtype=dtype,
        architecture=architecture,
    )
    pages = f", pages of {page_size}" if page_size else ""
    form = "absorbed" if absorbed else "expanded"
    return [
        CompileCase(
            name=f"{kind} {form}, {num_heads} heads{pages}: {tile.rows} × {tile.slots}",
            kernel="batchradix_kernels.mla_attention.triton:attend_latent_items_kernel",
            signature={
                **dict.fromkeys(("q", "q_rope", "keys", "ropes", "values"), f"*{kind}"),
                **dict.fromkeys(("items", "pages"), "*i32"),
                **dict.fromkeys(("partial", "partial_lse"), "*fp32"),
                **dict.fromkeys(STRIDES, "i32"),
                "scale_log2": "fp32",
            },
            constexprs={
                "NUM_HEADS": num_heads,
                "GROUP": heads_of_block(num_heads, tiles) if absorbed else 1,
                "KEY_DIM": dims[0],
                "ROPE_DIM": dims[1],
                "VALUE_DIM": dims[2],
                "PAGE_SIZE": page_size,
                "BLOCK_M": tile.rows,
                "BLOCK_N": tile.slots,
                "BLOCK_A": widths[0],
                "BLOCK_R": widths[1],
                "BLOCK_V": widths[2],
                "ABSORBED": absorbed,
                "PRECISION": "ieee",
            },
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            aligned=STRIDES,
            target=architecture,
        )
        for tile in tiles
    ]


def table_cases() -> list[CompileCase]:
    """The kernels of the table in docs/kernels.md: DeepSeek-V2-Lite's 16 heads, V3's 128."""
    absorbed = [
        case
        for num_heads in (16, 128)
        for case in compile_cases(num_heads, (512, 64, 512), torch.bfloat16, absorbed=True)
    ]
    return absorbed + compile_cases(128, (128, 64, 128), torch.bfloat16, absorbed=False)


def mla_table(cases: Sequence[CompileCase], reports: Sequence[CompileReport]) -> str:
    """Markdown: what the compiler said, and the FLOP of a tile for each byte that it reads."""
    lines = [
        "| kernel | warps × stages | shared KiB | registers | wgmma, mma | programs a processor "
        "| KiB a tile | MFLOP a tile | FLOP a byte |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case, report in zip(cases, reports, strict=True):
        made = case.constexprs
        rows, slots, key, rope, value = (
            int(made[name] or 0)
            for name in ("BLOCK_M", "BLOCK_N", "KEY_DIM", "ROPE_DIM", "VALUE_DIM")
        )
        tile_bytes = 2 * slots * (key + rope + (0 if made["ABSORBED"] else value))
        flops = 2 * rows * slots * (key + rope + value)
        cells = (
            *(case.name, f"{case.num_warps} × {case.num_stages}"),
            *(f"{report.shared_bytes / 1024:.1f}", str(report.registers)),
            *(f"{report.wgmma}, {report.mma}", str(programs_per_processor(report))),
            *(f"{tile_bytes / 1024:.0f}", f"{flops / 1e6:.2f}", f"{flops / tile_bytes:.0f}"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _power_of_two(count: int) -> int:
    """The first one that is not below ``count``."""
    return 1 << (count - 1).bit_length()


if __name__ == "__main__":
    cases = table_cases()
    print(mla_table(cases, compile_reports(cases)))  # noqa: T201
