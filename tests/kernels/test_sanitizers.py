"""The kernel tests again, against C kernels built with sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from batchradix_kernels import native

ROOT = Path(__file__).parents[2]
KERNELS = Path(native.__file__).parents[1]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        sys.platform != "linux" or shutil.which("gcc") is None, reason="needs Linux and gcc"
    ),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("sanitized") / "native.so"
    sources = sorted(map(str, KERNELS.glob("*/*.c")))
    flags = ["-std=gnu11", "-O1", "-g", "-shared", "-fPIC", "-fno-omit-frame-pointer"]
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    include = f"-I{KERNELS / 'native'}"
    command = ["gcc", *flags, *checks, include, *sources, "-lm", "-o", str(file)]
    subprocess.run(command, check=True, timeout=600)
    return file


def run(library: Path, *command: str) -> subprocess.CompletedProcess[str]:
    # torch throws C++ exceptions, which the sanitizer must see how to throw.
    runtimes = [
        subprocess.run(
            ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    environment = os.environ | {
        "BATCHRADIX_NATIVE": str(library),
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(KERNELS.parent)]),
    }
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, cwd=ROOT
    )


def test_the_kernel_tests_pass_under_address_and_undefined_behaviour_sanitizers(
    library: Path,
) -> None:
    tests = str(ROOT / "tests" / "kernels")
    of_triton = [f"--ignore-glob=*/test_{name}*" for name in ("aot", "compiled", "interpreted")]
    command = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *of_triton, tests)
    done = run(library, *command)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]


OUT_OF_BOUNDS = """
import numpy as np, torch
from batchradix_kernels.tree_attention.cpu import CpuTreeAttention
kernel = CpuTreeAttention(
    num_heads=1, num_kv_heads=1, head_dim=32, scale=1.0, dtype=torch.float32
)
pool = kernel.allocate(1, 32)
nothing = np.zeros((0, 4), dtype=np.int64)
piece = np.array([[40, 1, 0, 1]])
plan = kernel.plan(np.array([40]), piece, nothing, 32)
kernel.run(plan, pool, 0, *torch.zeros(3, 1, 1, 32))
"""


def test_the_sanitizers_do_see_a_slot_outside_of_the_pool(library: Path) -> None:
    done = run(library, "-c", OUT_OF_BOUNDS)
    assert done.returncode != 0
    assert "AddressSanitizer" in done.stderr
