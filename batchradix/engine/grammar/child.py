"""Compiling in a process of its own, so that time and memory can be taken back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from batchradix.engine.grammar.child_main import MEMORY_EXIT
from batchradix.engine.grammar.frames import read_frame, write_frame
from batchradix.errors import SchemaError
from batchradix.types import GrammarSpec

_MODULE = "batchradix.engine.grammar.child_main"
_SMALLER = "make the schema smaller (large enums, patterns and length bounds take most)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Serialised:
    """A compiled grammar as xgrammar serialises it, and what `CompiledGrammar` says of it."""

    native: bytes
    always_ends: bool
    notices: tuple[str, ...]


class Rejected(SchemaError):
    """The compiler answered that there is no such grammar, and is ready for the next."""


class CompilerChild:
    """A process that compiles one grammar after the other; not safe between threads, but
    `close` may be called from any.

    ``memory_bytes``: what one grammar may take there beyond the vocabulary.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        vocab_size: int,
        stop_ids: Sequence[int],
        *,
        num_threads: int,
        memory_bytes: int,
    ) -> None:
        self._memory_bytes = memory_bytes
        self._setup = {
            "tokens": [token.decode("latin-1") for token in token_bytes[:vocab_size]],
            "vocab_size": vocab_size,
            "stop_ids": list(stop_ids),
            "num_threads": num_threads,
            "memory_bytes": memory_bytes,
            "parent_pid": os.getpid(),
        }
        # Its standard error: shown to nobody, read when it crashes.
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed by _end
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=_environment(),
            )
        except OSError as error:
            self._errors.close()
            raise SchemaError(
                f"the grammar compiler cannot be started as {sys.executable!r}: "
                f"{error.strerror or error}"
            ) from error
        self._end = weakref.finalize(self, _end, self._process, self._errors, os.getpid())

    def greet(self) -> None:
        """Hands the vocabulary over; returns when the process is ready (some seconds)."""
        try:
            self._send(self._setup)
            read_frame(self._output)
        except (OSError, EOFError):
            raise SchemaError(
                f"the grammar compiler does not start: {self._last_words()}"
            ) from None
        finally:
            self._setup = {}

    def compile(self, spec: GrammarSpec, *, timeout_s: float) -> Serialised:
        """Waits for as long as it takes: the caller closes this child after ``timeout_s``.

        Raises `SchemaError` for a grammar that is rejected, takes too much memory or crashes
        the compiler.
        """
        try:
            self._send({"kind": spec.kind, "source": spec.source, "timeout_s": timeout_s})
            head: dict[str, Any] = json.loads(read_frame(self._output))
            payload = read_frame(self._output)
        except (OSError, EOFError):
            raise self._why_it_ended() from None
        if "error" in head:
            raise Rejected(f"the output schema cannot be made into a grammar: {head['error']}")
        return Serialised(
            native=payload,
            always_ends=head["always_ends"],
            notices=tuple(head["notices"]),
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._end.alive and self._process.poll() is None

    def close(self) -> None:
        """Ends the process at once; idempotent."""
        self._end()

    @property
    def _output(self) -> Any:
        return self._process.stdout

    def _send(self, request: dict[str, Any]) -> None:
        pipe: Any = self._process.stdin
        write_frame(pipe, json.dumps(request).encode())

    def _why_it_ended(self) -> SchemaError:
        code = self._process.wait()
        words = self._last_words()
        if code == -signal.SIGKILL:  # nobody but the kernel has a reason to
            return SchemaError(
                f"the process that compiles the grammar of the output schema was killed, most "
                f"likely because the machine ran out of memory; free memory, lower "
                f"--grammar-memory or {_SMALLER}"
            )
        if code == MEMORY_EXIT or "bad_alloc" in words:
            return SchemaError(
                f"the grammar of the output schema takes more than "
                f"{self._memory_bytes / 2**20:.0f} MiB of memory to compile; {_SMALLER} or raise "
                f"--grammar-memory"
            )
        if code == -signal.SIGXCPU:
            return SchemaError(
                f"the grammar of the output schema takes too long to compile; {_SMALLER} or raise "
                f"--grammar-timeout"
            )
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return SchemaError(
            f"the grammar compiler crashed ({cause}) on the output schema; {_SMALLER}"
        )

    def _last_words(self) -> str:
        if self._errors.closed:
            return "it was stopped"
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def _end(process: subprocess.Popen[bytes], errors: IO[bytes], owner_pid: int) -> None:
    if os.getpid() != owner_pid:  # a fork of the process that started it
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, errors):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was not written yet is of no use
                pipe.close()


def _environment() -> dict[str, str]:
    """That of this process, with its own import path; the current folder is not added to it."""
    path = [entry or os.getcwd() for entry in sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "CUDA_VISIBLE_DEVICES": ""}
