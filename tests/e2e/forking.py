"""Starts commands by fork, so that one start of Python and torch serves many runs.

Reads one JSON object a line from standard input. ``{"wait": pid}`` prints the exit code of a child;
any other starts one and prints its process id:

- ``argv``: the command's words; ``out``, ``err``: files for what it prints;
- ``cwd``, ``env`` (replaces the environment), ``uid``, ``file_size_bytes`` (a limit for each
  file), ``close`` (file descriptors that are closed beforehand): its surroundings;
- ``log``: where the rows that its engine answers are noted; ``commit_rows``: rows of a shard;
  ``pause_s``: before each step of the engine;
- ``die_at``: ``[what, n]``, it kills itself in the middle of the nth ``write`` of a commit, before
  its nth ``replace`` or after it (``replaced``), or before the nth ``step`` of the engine.
"""

from __future__ import annotations

import encodings.utf_8_sig  # noqa: F401  # an order's `uid` may not be able to read Python's files
import json
import os
import resource
import signal
import sys
import time
from typing import Any

import pyarrow.parquet  # noqa: F401
import torch  # noqa: F401
import transformers  # noqa: F401
import xgrammar  # noqa: F401

import batchradix.cli.main
import batchradix.pipeline
import batchradix.sink.finalise
from batchradix.engine.core import RadixEngine
from batchradix.sink import durable, shards


class DyingOs:
    """The module ``os`` for the sink, which dies in the middle of one call."""

    def __init__(self, name: str, number: int) -> None:
        self._name = name
        self._left = number

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, fd: int, data: memoryview) -> int:
        if self._is_last("write"):
            os.write(fd, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return os.write(fd, data)

    def replace(self, source: Any, target: Any) -> None:
        if self._is_last("replace"):
            os.kill(os.getpid(), signal.SIGKILL)
        os.replace(source, target)
        if self._is_last("replaced"):
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_last(self, name: str) -> bool:
        self._left -= name == self._name
        return name == self._name and self._left < 0


def watch_engine(log: str | None, num_steps: int | None, pause_s: float) -> None:
    """Notes every row the engine answers, and dies before the step of that number."""
    step = RadixEngine.step
    left = [num_steps]

    def watched(engine: RadixEngine) -> Any:
        if left[0] is not None:
            if left[0] <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
        time.sleep(pause_s)
        done = step(engine)
        if log is not None and done:
            with open(log, "a", encoding="utf-8") as file:
                file.writelines(f"{completion.row}\n" for completion in done)
        return done

    RadixEngine.step = watched  # type: ignore[method-assign]


def run(order: dict[str, Any]) -> None:
    """In the child: takes the order's surroundings and becomes the command."""
    os.setsid()
    for number, name in ((1, "out"), (2, "err")):
        fd = os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(fd, number)
        os.close(fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(order["cwd"])
    if "env" in order:
        os.environ.clear()
        os.environ.update(order["env"])
    kind, number = order.get("die_at") or ("", 0)
    if kind in ("write", "replace", "replaced"):
        durable.os = DyingOs(kind, number)  # type: ignore[attr-defined]
    watch_engine(order.get("log"), number if kind == "step" else None, order.get("pause_s", 0))
    shards.COMMIT_ROWS = order.get("commit_rows", shards.COMMIT_ROWS)
    if "file_size_bytes" in order:
        size = order["file_size_bytes"]
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    if "uid" in order:
        os.setgroups([])
        os.setgid(order["uid"])
        os.setuid(order["uid"])
    for fd in order.get("close", []):
        os.close(fd)
    sys.argv = ["batchradix", *order["argv"]]
    batchradix.cli.main.main()


def serve() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            print(os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1]), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            run(order)
        print(pid, flush=True)


if __name__ == "__main__":
    serve()
