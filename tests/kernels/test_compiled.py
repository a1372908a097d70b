"""The Triton kernels compiled ahead of time for GPUs that are not here."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from batchradix_kernels.aot import CompileCase, CompileReport, compile_reports
from batchradix_kernels.float8 import FLOAT8
from batchradix_kernels.tree_attention.tiles import (
    Tile,
    compile_cases,
    fit,
    fit_choices,
    roofline_table,
    table_cases,
    tile_choices,
)

triton = pytest.importorskip("triton")

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
MERGE = CompileCase(
    name="merge",
    kernel="batchradix_kernels.lse_merge.triton:merge_parts_kernel",
    signature={
        **dict.fromkeys(("outputs", "lses", "out_lse", "sinks"), "*fp32"),
        **dict.fromkeys(("offsets", "parts"), "*i32"),
        "out": "*bf16",
        "num_heads": "i32",
    },
    constexprs={
        "HEAD_DIM": 128,
        "BLOCK_H": 16,
        "BLOCK_E": 128,
        "WITH_LSE": True,
        "WITH_SINKS": True,
    },
)
STRIDES = ("k_token_stride", "k_head_stride", "v_token_stride", "v_head_stride")
STORE = CompileCase(
    name="store",
    kernel="batchradix_kernels.kv_store.triton:kv_store_kernel",
    signature={
        **dict.fromkeys(("k", "v", "pool"), "*bf16"),
        "slots": "*i32",
        "num_tokens": "i32",
        **dict.fromkeys(STRIDES, "i32"),
        "num_slots": "i32",
    },
    constexprs={"HEAD_DIM": 128, "BLOCK_T": 32, "BLOCK_E": 128},
    aligned=STRIDES,
)
COPY = CompileCase(
    name="copy",
    kernel="batchradix_kernels.kv_move.triton:kv_copy_kernel",
    signature={
        **dict.fromkeys(("source", "target"), "*bf16"),
        **dict.fromkeys(("source_slots", "target_slots"), "*i32"),
        "num_moves": "i32",
        **dict.fromkeys(("source_plane_stride", "target_plane_stride"), "i64"),
    },
    constexprs={"GATHER": True, "HEAD_DIM": 128, "BLOCK_N": 32, "BLOCK_E": 128},
)


@pytest.fixture(scope="module")
def on_hopper() -> tuple[list[CompileCase], list[CompileReport]]:
    cases = table_cases()
    return cases, compile_reports(cases)


def test_attention_on_hopper_uses_its_tensor_cores_without_spilling(on_hopper):
    for case, report in zip(*on_hopper, strict=True):
        report.check()
        high = case.constexprs["BLOCK_M"] == 128
        assert (report.wgmma > 0) == high
        assert (report.mma > 0) != high


def test_the_table_of_kernels_is_what_the_compiler_says(on_hopper):
    page = PAGE.read_text(encoding="utf-8")
    if f"(Triton {triton.__version__})" not in page:
        pytest.skip("the table was made with another Triton")
    table = roofline_table(*on_hopper)
    assert table in page, f"docs/kernels.md should say\n\n{table}"


def test_small_kernels_and_other_forms_of_attention_compile_without_spilling():
    amd = compile_cases(128, 4, torch.bfloat16, architecture="gfx942")
    cases = [MERGE, STORE, COPY, *compile_cases(64, 3, torch.float32), *amd]
    reports = compile_reports(cases)
    assert not [report for report in reports if report.spills or report.stack_bytes]
    for report in reports:
        report.check()
        assert (report.mma > 0) == (report.target == "gfx942")


@pytest.mark.parametrize(
    ("head_dim", "group", "capped"),
    [
        (128, 4, False),
        (256, 2, True),
        *(
            pytest.param(*shape, marks=pytest.mark.slow)
            for shape in [(64, 8, True), (256, 8, True)]
        ),
    ],
)
def test_layers_with_windows_and_capped_scores_keep_tensor_cores(head_dim, group, capped):
    cases = compile_cases(head_dim, group, torch.bfloat16, windowed=True, capped=capped)
    for case, report in zip(cases, compile_reports(cases), strict=True):
        report.check()
        assert (report.wgmma > 0) == (case.constexprs["BLOCK_M"] == 128)


def test_keys_and_values_in_8_bits_keep_tensor_cores_and_take_less_shared_memory(on_hopper):
    """gfx942 has another format of 8 bits, so the engine refuses it there."""
    in_8_bits = dataclasses.replace(
        STORE, name="store in 8 bits", signature={**STORE.signature, "pool": "*fp8e4nv"}
    )
    cases = compile_cases(128, 4, torch.bfloat16, kv_dtype=FLOAT8)
    *reports, store = compile_reports([*cases, in_8_bits])
    for report in (*reports, store):
        report.check()
    plain = on_hopper[1][:2]
    assert [(r.wgmma, r.mma) for r in reports] == [(r.wgmma, r.mma) for r in plain]
    for report, usual in zip(reports, plain, strict=True):
        assert report.shared_bytes < usual.shared_bytes


def test_tiles_give_up_stages_where_shared_memory_is_small():
    (_, case) = compile_cases(128, 4, torch.bfloat16)
    high = Tile(128, 64, case.num_warps, case.num_stages)
    assert fit(high, 128, 2, 232_448).num_stages == 3
    assert fit(high, 128, 2, 101_376).num_stages == 2
    assert fit(high, 128, 2, 65_536).num_stages == 1


def test_choices_that_do_not_fit_a_device_are_none_there():
    for head_dim, group in [(128, 4), (64, 3), (256, 2)]:
        for choices in tile_choices(head_dim, group, torch.bfloat16):
            assert fit_choices(choices, head_dim, 2, 232_448) == choices
            here = fit_choices(choices, head_dim, 2, 65_536)
            assert here[0] == fit(choices[0], head_dim, 2, 65_536)
            assert len(set(here)) == len(here)
            for tile in here[1:]:
                needed = 2 * head_dim * (tile.rows + 2 * tile.slots * tile.num_stages)
                assert needed <= 65_536
    _, highs = tile_choices(128, 4, torch.bfloat16)
    assert [tile.rows for tile in fit_choices(highs, 128, 2, 65_536)] == [128, 64]


def test_heads_of_a_large_group_leave_only_tiles_that_hold_them():
    lows, highs = tile_choices(128, 64, torch.bfloat16)
    assert {tile.rows for tile in lows} == {64}
    assert {tile.rows for tile in highs} == {128}
    assert len(tile_choices(128, 128, torch.bfloat16)) == 1


@pytest.mark.parametrize(
    ("head_dim", "group", "kv_dtype"),
    [
        (128, 4, None),
        *(
            pytest.param(*shape, kv_dtype, marks=pytest.mark.slow)
            for shape in [(128, 8), (64, 3), (128, 1)]
            for kv_dtype in (None, FLOAT8)
        ),
    ],
)
def test_every_choice_of_tiles_fits_hopper_and_spills_nothing(head_dim, group, kv_dtype):
    choices = tile_choices(head_dim, group, torch.bfloat16)
    tiles = [tile for each in choices for tile in each]
    cases = compile_cases(head_dim, group, torch.bfloat16, kv_dtype=kv_dtype, tiles=tiles)
    for tile, report in zip(tiles, compile_reports(cases), strict=True):
        report.check()
        assert (report.wgmma > 0) == (tile.rows >= 64)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["sm_90", "gfx942"])
def test_every_shape_of_head_compiles_without_spilling(dtype, architecture):
    cases = [
        case
        for head_dim, group in [(64, 1), (64, 8), (80, 1), (96, 4), (128, 1), (128, 16), (256, 4)]
        for page_size, query_dtype in ((0, dtype), (16, torch.float32))
        for kv_dtype in ((None, FLOAT8) if architecture == "sm_90" and not page_size else (None,))
        for case in compile_cases(
            head_dim,
            group,
            dtype,
            architecture=architecture,
            page_size=page_size,
            query_dtype=query_dtype,
            kv_dtype=kv_dtype,
        )
    ]
    reports = compile_reports(cases)
    assert not [report for report in reports if report.spills or report.stack_bytes]
    for report in reports:
        report.check()
