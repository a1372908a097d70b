"""The compile report tells of matrix instructions, spills and shared memory as they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

from batchradix_kernels.aot import SHARED_LIMIT_BYTES, CompileCase, compile_reports

SOURCE = """
import triton
import triton.language as tl

@triton.jit
def product(x, y, width, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    block = tl.load(x + at[:, None] * width + at[None, :])
    tl.store(y + at[:, None] * width + at[None, :], tl.dot(block, tl.trans(block)))
"""


@pytest.fixture
def case(tmp_path, monkeypatch) -> CompileCase:
    (tmp_path / "kernel_of_the_test.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return CompileCase(
        name="product",
        kernel="kernel_of_the_test:product",
        signature={"x": "*bf16", "y": "*fp32", "width": "i32"},
        constexprs={"SIZE": 64},
        aligned=("width",),
    )


def test_the_report_tells_good_kernels_from_bad_ones(case: CompileCase) -> None:
    good, small, spilling, amd = compile_reports(
        [
            case,
            replace(case, constexprs={"SIZE": 16}),
            replace(case, constexprs={"SIZE": 128}, num_warps=1),
            replace(case, target="gfx942"),
        ]
    )
    assert good.wgmma > 0
    assert good.shared_bytes >= 64 * 64 * 2
    good.check()
    assert small.mma > 0
    assert small.wgmma == 0
    assert spilling.spills > 0
    with pytest.raises(AssertionError, match="spills"):
        spilling.check()
    with pytest.raises(AssertionError, match="B shared"):
        replace(good, shared_bytes=SHARED_LIMIT_BYTES["sm_90"] + 1).check()
    assert amd.mma > 0
    amd.check()


def test_a_case_that_names_other_arguments_than_the_kernel_is_refused(case: CompileCase) -> None:
    with pytest.raises(RuntimeError, match="takes"):
        compile_reports([replace(case, constexprs={})])


def test_interpreting_here_does_not_hinder_compiling(case: CompileCase, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (report,) = compile_reports([case])
    assert report.wgmma > 0
