"""The package's surface: what it exports, and that naming it loads nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import batchradix

HEAVY = ["torch", "xgrammar", "transformers", "polars", "pyarrow", "datasets", "numpy"]


def loaded_after(statement: str) -> list[str]:
    """Which of the heavy modules a fresh interpreter has loaded after the statement."""
    found = f"[m for m in {HEAVY} if m in sys.modules]"
    code = f"import sys, json\n{statement}\nprint(json.dumps({found}))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    loaded: list[str] = json.loads(output)
    return loaded


def test_every_exported_name_is_there() -> None:
    for name in batchradix.__all__:
        assert getattr(batchradix, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        batchradix.nonsense  # noqa: B018


def test_the_version_is_that_of_the_distribution() -> None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        installed = version("batchradix")
    except PackageNotFoundError:
        pytest.skip("batchradix runs from its folder and is not installed")
    assert batchradix.__version__ == installed


def test_importing_the_package_or_its_command_line_loads_nothing_heavy() -> None:
    assert loaded_after("import batchradix") == []
    assert loaded_after("import batchradix.cli.main") == []


@pytest.mark.parametrize(
    "module",
    [
        "batchradix.jobs.detect",
        "batchradix.prompts.build",
        "batchradix.plan.order",
        "batchradix.schema.load",
        "batchradix.checkpoint.checkpoint",
        "batchradix.sink.finalise",
        "batchradix.report.summary",
    ],
)
def test_rooms_that_need_no_tensor_load_no_torch(module: str) -> None:
    assert not {"torch", "xgrammar"} & set(loaded_after(f"import {module}"))


def test_every_error_has_the_exit_code_of_its_kind() -> None:
    from batchradix import errors

    def below(kind: type[Exception]) -> list[type[Exception]]:
        return [kind, *(deeper for child in kind.__subclasses__() for deeper in below(child))]

    for kind in below(errors.UsageError):
        assert kind.exit_code == 2  # type: ignore[attr-defined]
    for kind in below(errors.RunError):
        assert kind.exit_code == 3  # type: ignore[attr-defined]
    assert errors.OutputHeldError.exit_code == 4
