"""What happens while a job runs, as JSON lines for a log collector."""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from batchradix.types import Usage

_PAUSE_S = 10.0


class JsonLog:
    """One JSON object a line: ``time`` (ISO 8601, UTC), ``level``, ``event``, and its fields.

    Events: ``message`` and ``warning`` (``text``), ``started`` (``rows``, ``rows_done``),
    ``progress`` every ten seconds (``rows``, ``rows_done``, and the engine's counters).
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream: TextIO | None = stream or sys.stderr
        self._num_rows = 0
        self._last_s = 0.0

    def event(self, name: str, level: str = "info", **fields: Any) -> None:
        """Writes one line."""
        if self._stream is None:
            return
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = {"time": stamp, "level": level, "event": name, **fields}
        try:
            print(json.dumps(line, ensure_ascii=False), file=self._stream, flush=True)
        except (OSError, ValueError):  # nobody reads it any more, or its disk is full
            self._stream = None

    def message(self, text: str) -> None:
        self.event("message", text=text)

    def warn(self, text: str) -> None:
        self.event("warning", "warning", text=text)

    def start(self, num_rows: int, num_done: int) -> None:
        self._num_rows, self._last_s = num_rows, time.monotonic()
        self.event("started", rows=num_rows, rows_done=num_done)

    def update(self, num_done: int, usage: Usage) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s < _PAUSE_S:
            return
        self._last_s = now_s
        self.event(
            "progress",
            rows=self._num_rows,
            rows_done=num_done,
            computed_tokens=usage.computed_tokens,
            loaded_tokens=usage.loaded_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            forward_steps=usage.forward_steps,
        )

    def stop(self) -> None:
        return
