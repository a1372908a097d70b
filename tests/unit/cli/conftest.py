"""The command as a test calls it."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from batchradix.cli.main import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def batchradix(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command in this process: exit code, standard output, standard error."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["batchradix", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
        assert isinstance(stop.value.code, int)
        output, error = capfd.readouterr()
        return stop.value.code, output, error

    return run
