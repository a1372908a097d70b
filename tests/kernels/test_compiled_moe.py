"""Routing and products of experts compiled ahead of time for GPUs that are not here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from batchradix_kernels.aot import CompileCase, compile_reports
from batchradix_kernels.moe_gemm.tiles import (
    FLOAT32,
    GFX942,
    HOPPER,
    choose_tiles,
    compile_cases,
    moe_table,
    table_cases,
)

triton = pytest.importorskip("triton")

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
ROUTING = "batchradix_kernels.moe_routing.triton"
GROUPED = {"NUM_GROUPS": 8, "NUM_GROUPS_KEPT": 4, "BLOCK_G": 8, "BLOCK_E": 32}
ONE_GROUP = {"NUM_GROUPS": 1, "NUM_GROUPS_KEPT": 1, "BLOCK_G": 1, "BLOCK_E": 512}


def small_cases(target: str) -> list[CompileCase]:
    """The kernels without products, for DeepSeek-V3 and Kimi-K2."""
    ids = dict.fromkeys(("expert_ids",), "*i64")
    route = [
        CompileCase(
            name=f"route among {num_experts}",
            kernel=f"{ROUTING}:moe_routing_kernel",
            signature={
                **ids,
                **dict.fromkeys(("logits", "bias", "weights"), "*fp32"),
                "logits_stride": "i32",
                **dict.fromkeys(("scaling", "floor"), "fp32"),
            },
            constexprs={
                **groups,
                **dict.fromkeys(("SIGMOID", "BEST_TWO", "NORMALISE", "HAS_BIAS"), True),
                "NUM_EXPERTS": num_experts,
                "NUM_CHOSEN": 8,
                "BLOCK_K": 8,
            },
            num_warps=1,
            target=target,
        )
        for num_experts, groups in ((256, GROUPED), (384, ONE_GROUP))
    ]
    count = CompileCase(
        name="count",
        kernel=f"{ROUTING}:count_rows_kernel",
        signature={**ids, "counts": "*i32", "num_rows": "i32"},
        constexprs={"BLOCK": 1024},
        target=target,
    )
    place = CompileCase(
        name="place",
        kernel=f"{ROUTING}:place_rows_kernel",
        signature={
            **ids,
            **dict.fromkeys(("counts", "rows", "experts", "num_blocks"), "*i32"),
            "num_rows": "i32",
        },
        constexprs={"NUM_EXPERTS": 256, "BLOCK_ROWS": 128, "BLOCK_E": 256, "BLOCK": 1024},
        target=target,
    )
    add = CompileCase(
        name="sum",
        kernel="batchradix_kernels.moe_gemm.triton:sum_choices_kernel",
        signature={"choices": "*bf16", "out": "*bf16", "width": "i32"},
        constexprs={"NUM_CHOSEN": 8, "BLOCK": 1024},
        aligned=("width",),
        target=target,
    )
    return [*route, count, place, add]


def test_products_on_hopper_do_not_spill_and_are_those_of_the_page():
    cases = table_cases()
    reports = compile_reports(cases)
    for case, report in zip(cases, reports, strict=True):
        report.check()
        high = int(case.constexprs["BLOCK_M"] or 0) >= 64
        assert (report.wgmma > 0) == high
        assert (report.mma > 0) != high
    page = PAGE.read_text(encoding="utf-8")
    if f"(Triton {triton.__version__})" not in page:
        pytest.skip("the table was made with another Triton")
    table = moe_table(cases, reports)
    assert table in page, f"docs/kernels.md should say\n\n{table}"


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_routing_and_float32_compile_without_spilling(target):
    cases = compile_cases(2048, 1408, torch.float32, FLOAT32, architecture=target)
    for report in compile_reports([*small_cases(target), *cases]):
        report.check()


def test_products_on_gfx942_use_its_matrix_instructions_without_spilling():
    cases = [
        case
        for tiles in GFX942
        for case in compile_cases(7168, 2048, torch.bfloat16, tiles, architecture="gfx942")
    ]
    for report in compile_reports(cases):
        report.check()
        assert report.mma > 0


def test_blocks_are_as_high_as_experts_have_rows():
    heights = [choose_tiles(rows, torch.bfloat16).block_rows for rows in (0.4, 16, 17, 65, 4000)]
    assert heights == [16, 16, 64, 128, 128]


@pytest.mark.parametrize("shared_bytes", [232_448, 166_912, 101_376])
def test_tiles_give_up_stages_where_shared_memory_is_small(shared_bytes):
    for tiles in (one.fitting(2, shared_bytes) for one in HOPPER):
        for tile, strips in ((tiles.gate_up, 2), (tiles.down, 1)):
            stage = (tiles.block_rows + strips * tile.outputs) * tile.depth * 2
            assert tile.num_stages * stage <= shared_bytes
            assert tile.num_stages >= 2
