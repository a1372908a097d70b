"""Latent attention compiled ahead of time for GPUs that are not here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from batchradix_kernels.aot import CompileCase, compile_reports
from batchradix_kernels.mla_attention.tiles import (
    choose_tiles,
    compile_cases,
    mla_table,
    table_cases,
)

triton = pytest.importorskip("triton")

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
STORE = CompileCase(
    name="latent store",
    kernel="batchradix_kernels.latent_store.triton:latent_store_kernel",
    signature={
        **dict.fromkeys(("latents", "ropes", "pool"), "*bf16"),
        "slots": "*i32",
        **dict.fromkeys(("num_tokens", "latent_stride", "rope_stride"), "i32"),
    },
    constexprs={
        "LATENT_DIM": 512,
        "ROPE_DIM": 64,
        "BLOCK_T": 8,
        "BLOCK_C": 512,
        "BLOCK_R": 64,
    },
    aligned=("latent_stride", "rope_stride"),
)
LATENT, HEAD = (512, 64, 512), (128, 64, 128)  # of DeepSeek-V2 and V3, absorbed and expanded


def test_tiles_of_hopper_use_its_tensor_cores_without_spilling_and_are_those_of_the_page():
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
    table = mla_table(cases, reports)
    assert table in page, f"docs/kernels.md should say\n\n{table}"


def test_pages_float32_gfx942_and_the_store_compile_without_spilling():
    cases = [
        *compile_cases(128, LATENT, torch.bfloat16, absorbed=True, page_size=16),
        *compile_cases(16, LATENT, torch.float32, absorbed=True),
        *compile_cases(16, HEAD, torch.float32, absorbed=False),
    ]
    for absorbed, dims in ((True, LATENT), (False, HEAD)):
        cases += compile_cases(128, dims, torch.bfloat16, absorbed=absorbed, architecture="gfx942")
    for report in compile_reports([STORE, *cases]):
        report.check()
        if report.target == "gfx942":
            assert report.mma > 0


@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("shared_bytes", [232_448, 166_912, 101_376, 65_536])
def test_tiles_are_lower_where_shared_memory_is_small(num_heads, shared_bytes):
    tiles = choose_tiles(
        absorbed=True,
        width=576,
        num_heads=num_heads,
        dtype=torch.bfloat16,
        shared_bytes=shared_bytes,
    )
    for tile in tiles:
        assert (tile.rows + tile.num_stages * tile.slots) * 576 * 2 <= shared_bytes
    assert tiles[-1].rows == (64 if shared_bytes > 160_000 else 16)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["sm_90", "gfx942"])
def test_every_number_of_heads_compiles_without_spilling(dtype, architecture):
    cases = [
        case
        for num_heads in (8, 20, 32, 128)
        for page_size in (0, 64)
        for absorbed, dims in ((True, LATENT), (False, HEAD))
        if absorbed or page_size == 0
        for case in compile_cases(
            num_heads,
            dims,
            dtype,
            absorbed=absorbed,
            architecture=architecture,
            page_size=page_size,
        )
    ]
    reports = compile_reports(cases)
    assert not [report for report in reports if report.spills or report.stack_bytes]
    for report in reports:
        report.check()
