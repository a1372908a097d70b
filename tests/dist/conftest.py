"""Runs of the command line on a Ray of their own, and the processes they leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MARK = "BATCHRADIX_TEST_RUN"  # in the environment of all processes of a run


class Run:
    """A started command line; `left` are the processes that came of it and are still there."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self.mark = f"{MARK}={folder.name}-{time.monotonic_ns()}"
        name, value = self.mark.split("=")
        path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
        self.output = folder / f"{value}.out"
        with self.output.open("w") as out, self.output.with_suffix(".err").open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "batchradix", "run", *arguments],
                env=os.environ | {"PYTHONPATH": path, name: value},
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def end(self) -> tuple[int, str, str]:
        """Its exit code, and what it printed."""
        code = self.process.wait(timeout=240)
        return code, self.output.read_text(), self.output.with_suffix(".err").read_text()

    def summary(self) -> dict[str, Any]:
        """What ``--json`` printed, and nothing else."""
        code, out, err = self.end()
        assert code == 0, err
        found: dict[str, Any] = json.loads(out)
        return found

    def left(self, title: str = "") -> list[int]:
        """Processes of this run, those with ``title`` in their command."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes()
                command = (folder / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if self.mark.encode() in environment and title in command:
                found.append(int(folder.name))
        return found

    def left_in_words(self) -> str:
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes()[:200] for pid in self.left()]
        states = [Path(f"/proc/{pid}/status").read_text()[:200] for pid in self.left()]
        return f"{commands} {states}"

    def workers(self) -> list[int]:
        """Processes that hold an engine."""
        return self.left("ray::WorkerActor")


def wait_for(
    condition: Callable[[], Any], seconds: float = 120, words: Callable[[], str] = str
) -> Any:
    """What ``condition`` returns once it is true; else ``words`` say what is the matter."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"it did not come to it {words()}")


@pytest.fixture
def start(tmp_path: Path) -> Any:
    """Starts ``batchradix run`` with some arguments; what is left at the end is ended."""
    runs: list[Run] = []

    def begin(*arguments: Any) -> Run:
        runs.append(Run([str(one) for one in arguments], tmp_path))
        return runs[-1]

    yield begin
    for run in runs:
        for pid in run.left():
            os.kill(pid, signal.SIGKILL)
        run.process.wait()


@pytest.fixture
def until() -> Callable[..., Any]:
    return wait_for
