"""The process that compiles what could take too long or too much memory.

Started by `child.CompilerChild`. It reads the vocabulary once and then one grammar after the
other from standard input, and answers on standard output (see `frames`). It ends with its
parent, at the end of its input, and with `MEMORY_EXIT` when a grammar takes too much memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO

import xgrammar

from batchradix.engine.grammar.build import build, native_compiler, tokenizer_info
from batchradix.engine.grammar.frames import read_frame, write_frame
from batchradix.engine.grammar.notices import NativeNotices, plain_message
from batchradix.types import GrammarSpec

MEMORY_EXIT = 87
_LOOK_EVERY_S = 0.02
# Address space is taken in large pieces of which little is used.
_ADDRESS_SLACK_BYTES = 1 << 30


def main() -> None:
    """Serves until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to act upon
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not end up among the answers
    requests = sys.stdin.buffer
    with contextlib.suppress(EOFError, BrokenPipeError):
        setup = json.loads(read_frame(requests))
        watch = _Watch(setup["parent_pid"], setup["memory_bytes"])
        threading.Thread(target=watch.run, daemon=True).start()
        tokens = [text.encode("latin-1") for text in setup["tokens"]]
        info = tokenizer_info(tokens, setup["vocab_size"], setup["stop_ids"])
        compiler = native_compiler(info, setup["num_threads"])
        write_frame(answers, b"{}")
        while True:
            request = json.loads(read_frame(requests))
            watch.begin(cpu_s=request["timeout_s"] * (setup["num_threads"] + 1))
            spec = GrammarSpec(kind=request["kind"], source=request["source"])
            _answer(answers, compiler, spec)


def _answer(answers: BinaryIO, compiler: xgrammar.GrammarCompiler, spec: GrammarSpec) -> None:
    payload = b""
    try:
        with NativeNotices() as notices:
            built = build(compiler, spec)
        payload = built.native.serialize_json().encode()
        head: dict[str, object] = {
            "always_ends": built.always_ends,
            "notices": notices.messages,
        }
    except Exception as error:  # whatever the native code throws: its text is the cause
        if isinstance(error, MemoryError) or "bad_alloc" in str(error):
            os._exit(MEMORY_EXIT)
        head = {"error": plain_message(str(error))}
    write_frame(answers, json.dumps(head).encode())
    write_frame(answers, payload)


class _Watch:
    """Ends this process when it takes too much memory or its parent is gone.

    The resident size is looked at in a thread (xgrammar lets go of the GIL); where the system
    knows limits of address space and CPU time they stand behind it.
    """

    def __init__(self, parent_pid: int, memory_bytes: int) -> None:
        self._parent_pid = parent_pid
        self._memory_bytes = memory_bytes
        self._most_bytes = _resident_bytes() + memory_bytes + _ADDRESS_SLACK_BYTES

    def begin(self, cpu_s: float) -> None:
        """Limits for one grammar: so much more than what is taken now."""
        self._most_bytes = _resident_bytes() + self._memory_bytes
        usage = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime + cpu_s) + 1)
        if (taken := _statm(0)) is not None:
            _limit(resource.RLIMIT_AS, taken + self._memory_bytes + _ADDRESS_SLACK_BYTES)

    def run(self) -> None:
        while True:
            if os.getppid() != self._parent_pid:
                os._exit(0)
            if _resident_bytes() > self._most_bytes:
                os._exit(MEMORY_EXIT)
            time.sleep(_LOOK_EVERY_S)


def _limit(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    if hard == resource.RLIM_INFINITY or value <= hard:
        with contextlib.suppress(OSError, ValueError):  # a system that does not know it
            resource.setrlimit(which, (value, hard))


def _statm(field: int) -> int | None:
    """Bytes of /proc/self/statm: 0 address space, 1 resident. None where there is no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[field])
    except OSError:
        return None
    return pages * resource.getpagesize()


def _resident_bytes() -> int:
    now = _statm(1)
    if now is not None:
        return now
    # The most so far, in bytes on macOS, which has no /proc.
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


if __name__ == "__main__":
    main()
