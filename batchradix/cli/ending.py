"""What follows a run, however it ended: the ledger, the metrics file, a command of the user's."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from batchradix._version import VERSION
from batchradix.config import RunConfig
from batchradix.errors import OptionError

if TYPE_CHECKING:
    from batchradix.report.summary import Summary


def _is_same(path: Path, other: str | Path) -> bool:
    return os.path.realpath(path) == os.path.realpath(other)


@dataclass(slots=True, kw_only=True)
class Ending:
    """Takes note of a run when it begins; `close` does what is to be done at its end.

    ``metrics``: a Prometheus text file. ``command``: run by the shell with
    ``BATCHRADIX_EXIT_CODE``, ``BATCHRADIX_OUTPUT``, ``BATCHRADIX_ERROR`` (a sentence or empty)
    and ``BATCHRADIX_SUMMARY`` (the JSON object of ``--json``). Neither changes the exit code:
    what fails here is told to ``warn``.
    """

    config: RunConfig
    warn: Callable[[str], None]
    metrics: Path | None = None
    command: str | None = None
    history: Path | None = None
    _started: datetime = field(default_factory=lambda: datetime.now(UTC))
    _started_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        """Raises `OptionError` where the metrics would be written over something else."""
        if self.metrics is None:
            return
        output = self.config.output
        others = (self.config.input, output.path, output.failed_rows)
        if any(one is not None and _is_same(self.metrics, one) for one in others):
            raise OptionError(
                f"the metrics file {self.metrics} is the input or an output of the job; name "
                f"another"
            )
        if self.metrics.is_dir():
            raise OptionError(
                f"the metrics file {self.metrics} is a folder; give the name of a file in it"
            )

    def close(self, exit_code: int, summary: Summary | None, error: str = "") -> None:
        """``summary`` is None where the run did not get as far as one."""
        from batchradix.report.summary import Summary

        counted = summary or Summary(model=self.config.model, output=self.config.output.path)
        if self.history is not None:
            self._note(exit_code, counted, error)
        if self.metrics is not None:
            self._write_metrics(self.metrics, exit_code, counted)
        if self.command is not None:
            self._run_command(self.command, exit_code, counted, error)

    def _note(self, exit_code: int, summary: Summary, error: str) -> None:
        import pyarrow as pa

        from batchradix.report.history import add_run

        assert self.history is not None
        output = self.config.output.path
        figures = summary.to_json()
        predicted = figures["predicted"] or {}
        run = {
            **figures,
            **{f"predicted_{name}": value for name, value in predicted.items()},
            "run_s": summary.run_s,
            "started": self._started,
            "seconds": time.monotonic() - self._started_s,
            "exit_code": exit_code,
            "error": error or None,
            "input": _shown(self.config.input),
            "output": None if output is None else _shown(os.path.abspath(output)),
            "version": VERSION,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        try:
            add_run(self.history, run)
        except (OSError, pa.ArrowException) as failure:
            self.warn(f"the run cannot be noted in {self.history}: {failure}")

    def _write_metrics(self, path: Path, exit_code: int, summary: Summary) -> None:
        from batchradix.report.prometheus import metrics_text, write_metrics

        job = "" if self.config.output.path is None else _shown(self.config.output.path.name)
        try:
            write_metrics(path, metrics_text(summary, exit_code, time.time(), job))
        except OSError as failure:
            self.warn(f"the metrics cannot be written to {path}: {failure.strerror or failure}")

    def _run_command(self, command: str, exit_code: int, summary: Summary, error: str) -> None:
        output = self.config.output.path
        environment = {
            **os.environ,
            "BATCHRADIX_EXIT_CODE": str(exit_code),
            "BATCHRADIX_OUTPUT": "" if output is None else os.path.abspath(output),
            "BATCHRADIX_ERROR": _shown(error),
            "BATCHRADIX_SUMMARY": json.dumps(summary.to_json()),
        }
        try:
            done = subprocess.run(
                command, shell=True, env=environment, stdin=subprocess.DEVNULL, check=False
            )
        except (OSError, ValueError) as failure:
            self.warn(f"--on-finish cannot be run: {failure}")
            return
        if done.returncode < 0:
            number = -done.returncode
            self.warn(f"--on-finish was ended by signal {number} ({signal.strsignal(number)})")
        elif done.returncode:
            self.warn(f"--on-finish ended with code {done.returncode}")


def _shown(text: object) -> str:
    """Text that any file format takes: names of files may hold bytes that are no UTF-8."""
    return str(text).encode(errors="backslashreplace").decode().replace("\0", "\\0")
