"""What a Triton kernel becomes on a GPU that is not here: compiled ahead of time and read back.

Neither a driver nor a GPU is needed; the Triton wheel ships the assembler and disassembler. What
decorated kernels become is settled when their module is imported, so a process with
``TRITON_INTERPRET=1`` cannot compile them: `compile_reports` starts one of its own.

    python -m batchradix_kernels.aot < cases.json > reports.json
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "SHARED_LIMIT_BYTES",
    "CompileCase",
    "CompileReport",
    "compile_report",
    "compile_reports",
]

TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm_90": ("cuda", 90, 32),
    "gfx942": ("hip", "gfx942", 64),
}
SHARED_LIMIT_BYTES = {"sm_90": 232_448, "gfx942": 65_536}
"""Shared memory that one program can have; a kernel over it compiles without complaint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileCase:
    """One kernel with all that decides its code.

    ``kernel``: ``"module:function"``. ``signature``: the type of every argument that is no
    constexpr, ``"*bf16"``, ``"*fp32"``, ``"*i32"``, ``"i32"``, ``"i64"``, ``"fp32"`` …, in any
    order. ``aligned``: integer arguments known to be multiples of 16; pointers always are to 16
    bytes, but for those in ``unaligned``. ``target``: one of `TARGETS`.
    """

    name: str
    kernel: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, int | float | bool | str | None] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    aligned: Sequence[str] = ()
    unaligned: Sequence[str] = ()
    target: str = "sm_90"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileReport:
    """``registers`` of a thread (vector registers on AMD), ``shared_bytes`` of a program;
    ``spills``: loads and stores of spilled registers (spilled registers on AMD);
    ``stack_bytes`` of a thread. ``wgmma``, ``mma``: matrix instructions of a warp group and of a
    warp (all that AMD has) in the machine code, unrolled ones each."""

    name: str
    target: str
    num_warps: int
    shared_bytes: int
    registers: int
    stack_bytes: int
    spills: int
    wgmma: int
    mma: int

    def check(self) -> None:
        """Raises AssertionError when it would not launch, or spills."""
        limit = SHARED_LIMIT_BYTES[self.target]
        assert self.shared_bytes <= limit, f"{self.name}: {self.shared_bytes} B shared > {limit}"
        assert self.spills == 0, f"{self.name}: {self.spills} spills"
        assert self.stack_bytes == 0, f"{self.name}: {self.stack_bytes} B of stack"


def compile_report(case: CompileCase) -> CompileReport:
    """Compiles in this process, which must not have ``TRITON_INTERPRET`` set. 1 to 3 s."""
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, function = case.kernel.partition(":")
    kernel = getattr(importlib.import_module(module), function)
    assert hasattr(kernel, "arg_names"), "Triton kernels cannot be compiled where they interpret"
    known = set(case.signature) | set(case.constexprs)
    assert known == set(kernel.arg_names), f"{case.kernel} takes {kernel.arg_names}, not {known}"
    signature = {name: case.signature.get(name, "constexpr") for name in kernel.arg_names}
    attrs = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(signature.items())
        if (kind.startswith("*") and name not in case.unaligned) or name in case.aligned
    }
    compiled = triton_compile(
        ASTSource(kernel, signature, dict(case.constexprs), attrs),
        target=GPUTarget(*TARGETS[case.target]),
        options={"num_warps": case.num_warps, "num_stages": case.num_stages},
    )
    read = _read_sass if TARGETS[case.target][0] == "cuda" else _read_amdgcn
    return CompileReport(
        name=case.name,
        target=case.target,
        num_warps=case.num_warps,
        shared_bytes=compiled.metadata.shared,
        **read(compiled.asm),
    )


def compile_reports(cases: Sequence[CompileCase]) -> list[CompileReport]:
    """`compile_report` of each, in a process of their own. Raises RuntimeError with what that
    process said when one does not compile."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps([asdict(case) for case in cases]),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"a kernel does not compile: {done.stderr}")
    return [CompileReport(**report) for report in json.loads(done.stdout)]


def _read_sass(asm: Mapping[str, Any]) -> dict[str, int]:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        usage = _output_of(tools / "cuobjdump", "-res-usage", file.name)
        sass = _output_of(tools / "cuobjdump", "-sass", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, f"cuobjdump says nothing of registers: {usage}"
    return {
        "registers": int(found[1]),
        "stack_bytes": int(found[2]),
        "spills": len(re.findall(r"\b(?:STL|LDL)\b", sass)),
        "wgmma": len(re.findall(r"\b[HIQ]GMMA\b", sass)),
        "mma": len(re.findall(r"\b[HIQ]MMA\b", sass)),
    }


def _read_amdgcn(asm: Mapping[str, Any]) -> dict[str, int]:
    text = asm["amdgcn"]

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        assert found is not None, f"the assembly says nothing of {name}"
        return int(found[1])

    return {
        "registers": number("vgpr_count"),
        "stack_bytes": number("private_segment_fixed_size"),
        "spills": number("vgpr_spill_count"),
        "wgmma": 0,
        "mma": len(re.findall(r"\bv_mfma_", text)),
    }


def _output_of(tool: Path, *arguments: str) -> str:
    return subprocess.run(
        [str(tool), *arguments], capture_output=True, text=True, check=True
    ).stdout


if __name__ == "__main__":
    given = [CompileCase(**case) for case in json.load(sys.stdin)]
    json.dump([asdict(compile_report(case)) for case in given], sys.stdout)
