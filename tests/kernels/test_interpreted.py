"""Runs the tests of `tests/interpreted`, and those of the attention backends for the one in
Triton, each file in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TESTS = Path(__file__).parents[1]
FILES = sorted((TESTS / "interpreted").glob("test_*.py"))
FILES += [TESTS / "unit" / "engine_models" / f"test_{kind}.py" for kind in ("attention", "mla")]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_under_the_interpreter(file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
