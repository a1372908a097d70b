"""Catches what xgrammar's native code writes to standard error while it compiles."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from typing import IO

_LINE = re.compile(r"^\[\d\d:\d\d:\d\d\] \S+:\d+: (.*)$")


def plain_message(text: str) -> str:
    """A message of xgrammar without its clock, file and line: one sentence without full stop."""
    match = _LINE.match(text.strip().split("\n")[0])
    message = match[1] if match else text.strip()
    return message.removeprefix("Warning: ").strip().rstrip(".")


class NativeNotices:
    """Holds back standard error (the file descriptor) from `__enter__` until `release`.

    What another thread writes meanwhile is passed on at `release`; lines of xgrammar stay in
    ``messages``, each once. Where there is no standard error nothing happens.
    """

    def __init__(self) -> None:
        self.messages: list[str] = []
        self._saved: int | None = None
        self._file: IO[bytes] | None = None

    def __enter__(self) -> NativeNotices:
        try:
            self._saved = os.dup(2)
        except OSError:
            return self
        self._file = tempfile.TemporaryFile()
        _flush_stderr()
        os.dup2(self._file.fileno(), 2)
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Gives standard error back; idempotent."""
        if self._saved is None or self._file is None:
            return
        _flush_stderr()
        os.dup2(self._saved, 2)
        self._file.seek(0)
        written = self._file.read()
        self._file.close()
        for line in written.splitlines(keepends=True):
            text = line.decode("utf-8", "replace")
            if _LINE.match(text.rstrip("\n")):
                message = plain_message(text)
                if message not in self.messages:
                    self.messages.append(message)
            else:
                os.write(self._saved, line)
        os.close(self._saved)
        self._saved = self._file = None


def _flush_stderr() -> None:
    if sys.stderr is not None and not sys.stderr.closed:
        sys.stderr.flush()
