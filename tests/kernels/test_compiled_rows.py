"""The row-wise Triton kernels compiled ahead of time for GPUs that are not here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("triton")

from batchradix_kernels.aot import CompileCase, compile_reports

REGISTERS_OF_A_PROCESSOR = 65_536  # of sm_90
PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
TRITON_OF_THE_PAGE = "3.7.1"


def case(
    name: str,
    op: str,
    kernel: str,
    types: Mapping[str, str],
    constexprs: Mapping[str, int],
    aligned: Sequence[str] = (),
    num_warps: int = 4,
) -> CompileCase:
    """``types``: a type to the arguments that have it, with spaces between them."""
    return CompileCase(
        name=name,
        kernel=f"batchradix_kernels.{op}.triton:{kernel}",
        signature={name: kind for kind, names in types.items() for name in names.split()},
        constexprs=constexprs,
        aligned=aligned,
        num_warps=num_warps,
    )


NORM = {"*bf16": "x residual weight out", "i32": "width", "fp32": "epsilon"}
SAMPLE = {
    "*fp32": "logits temperatures peaks",
    "*fp64": "top_ps min_ps uniforms",
    "*i32": "bitmask top_ks",
    "*i1": "masked",
    "*i64": "tokens",
    "i32": "width logits_stride bitmask_stride",
}
# The widths of Llama 8B, and the widest row that a norm takes.
CASES = [
    case(
        "norm, 4,096 wide",
        "rms_norm",
        "rms_norm_kernel",
        NORM,
        {"BLOCK": 4096, "HAS_RESIDUAL": 1},
        ("width",),
        8,
    ),
    case(
        "norm, 32,768 wide",
        "rms_norm",
        "rms_norm_kernel",
        NORM,
        {"BLOCK": 32768, "HAS_RESIDUAL": 1},
        ("width",),
        16,
    ),
    case(
        "gate",
        "swiglu",
        "swiglu_kernel",
        {"*bf16": "gate_up out", "i32": "width"},
        {"BLOCK": 1024},
        ("width",),
    ),
    case(
        "rope of heads of 128, with norms",
        "rope",
        "rope_kernel",
        {
            "*bf16": "heads q_weight k_weight",
            "*fp32": "cosines sines",
            "i32": "num_heads num_q num_qk",
            "fp32": "epsilon",
        },
        {"HALF": 64, "BLOCK_E": 64, "BLOCK_H": 16, "NORMALISED": 1},
    ),
    case(
        "moving keys of 128",
        "rope_delta",
        "rope_delta_kernel",
        {
            "*bf16": "keys",
            "*i32": "slots",
            "*fp32": "cosines sines",
            "i32": "num_slots num_heads",
            "i64": "layer_stride head_stride slot_stride angle_stride",
        },
        {"HALF": 64, "BLOCK_N": 16, "BLOCK_E": 64},
        ("layer_stride", "head_stride", "slot_stride", "angle_stride"),
    ),
    case(
        "bitmask",
        "masked_sampling",
        "apply_bitmask_kernel",
        {
            "*fp32": "x",
            "*i32": "bitmask",
            "*i64": "rows",
            "i32": "width logits_stride bitmask_stride",
        },
        {"BLOCK": 1024},
    ),
    *(
        case(
            name,
            "masked_sampling",
            "masked_sample_kernel",
            SAMPLE,
            {"HAS_MASK": 1, "GREEDY": greedy, "BLOCK": 1024},
            (),
            8,
        )
        for name, greedy in (("largest logit, masked", 1), ("draw with cuts, masked", 0))
    ),
]


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_no_row_wise_kernel_spills_or_keeps_its_processor_to_itself(target):
    page = PAGE.read_text(encoding="utf-8")
    for report in compile_reports([replace(one, target=target) for one in CASES]):
        report.check()
        assert report.mma == report.wgmma == 0
        if target == "sm_90" and report.num_warps <= 8:
            registers = report.registers * report.num_warps * 32
            assert 2 * registers <= REGISTERS_OF_A_PROCESSOR, report
        if target == "sm_90" and version("triton") == TRITON_OF_THE_PAGE:
            numbers = f"{report.num_warps} | {report.registers} | {report.shared_bytes}"
            assert f"| {report.name} | {numbers} |" in page
