"""What a person sees while a job runs: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Protocol, TextIO

from batchradix.report.json_log import JsonLog

if TYPE_CHECKING:
    from batchradix.types import Usage

_FIRST_LINE_AFTER_S = 5.0
_MOST_LINES = 24  # of plain progress in one run; the pause between them doubles


class Progress(Protocol):
    """Told by the pipeline what happens; never decides anything."""

    def message(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...

    def start(self, num_rows: int, num_done: int) -> None: ...

    def update(self, num_done: int, usage: Usage) -> None: ...

    def stop(self) -> None: ...


class Silent:
    """Says nothing; for the Python API and ``--quiet``."""

    def message(self, text: str) -> None:
        del text

    def warn(self, text: str) -> None:
        del text

    def start(self, num_rows: int, num_done: int) -> None:
        del num_rows, num_done

    def update(self, num_done: int, usage: Usage) -> None:
        del num_done, usage

    def stop(self) -> None:
        return


def describe(usage: Usage, elapsed_s: float, num_done: int, num_rows: int, num_before: int) -> str:
    """Tokens a second, hit share and time left, in words. ``num_before`` rows were done at
    the start."""
    prompt = usage.computed_tokens + usage.recomputed_tokens + usage.cached_tokens
    prompt += usage.loaded_tokens + usage.reloaded_tokens
    parts = []
    if elapsed_s > 0 and (prompt or usage.completion_tokens):
        parts.append(f"{(prompt + usage.completion_tokens) / elapsed_s:,.0f} tokens/s")
    if prompt:
        parts.append(f"{usage.cached_tokens / prompt:.0%} of prompts shared")
    ran = num_done - num_before
    if ran > 0 and num_done < num_rows:
        left_s = elapsed_s / ran * (num_rows - num_done)
        minutes, seconds = divmod(int(left_s), 60)
        hours, minutes = divmod(minutes, 60)
        clock = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
        parts.append(f"{clock} left")
    return ", ".join(parts)


class PlainProgress:
    """Whole lines without control codes, ever further apart, for logs and pipes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream: TextIO | None = stream or sys.stderr
        self._started_s = self._last_s = time.monotonic()
        self._pause_s = _FIRST_LINE_AFTER_S
        self._num_lines = self._num_rows = self._num_before = 0

    def _print(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            print(text, file=self._stream, flush=True)
        except (OSError, ValueError):  # nobody reads it any more, or its disk is full
            self._stream = None

    def message(self, text: str) -> None:
        self._print(text)

    def warn(self, text: str) -> None:
        self._print(f"warning: {text}")

    def start(self, num_rows: int, num_done: int) -> None:
        self._num_rows, self._num_before = num_rows, num_done
        self._started_s = self._last_s = time.monotonic()

    def update(self, num_done: int, usage: Usage) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s < self._pause_s or self._num_lines >= _MOST_LINES:
            return
        self._last_s = now_s
        self._num_lines += 1
        if self._num_lines % 4 == 0:
            self._pause_s *= 2
        text = describe(usage, now_s - self._started_s, num_done, self._num_rows, self._num_before)
        self._print(f"{num_done:,} of {self._num_rows:,} rows; {text}")

    def stop(self) -> None:
        return


class LiveProgress:
    """One Rich progress bar on a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        self._console = Console(stderr=True)
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}"),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("rows", total=None, detail="", visible=False)
        self._num_rows = self._num_before = 0
        self._started_s = 0.0

    def message(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, style="dim")

    def warn(self, text: str) -> None:
        self._console.print(f"warning: {text}", highlight=False, markup=False, style="yellow")

    def start(self, num_rows: int, num_done: int) -> None:
        self._num_rows, self._num_before = num_rows, num_done
        self._started_s = time.monotonic()
        self._bar.update(self._task, total=num_rows, completed=num_done, visible=True)
        self._bar.start()

    def update(self, num_done: int, usage: Usage) -> None:
        elapsed_s = time.monotonic() - self._started_s
        detail = describe(usage, elapsed_s, num_done, self._num_rows, self._num_before)
        self._bar.update(self._task, completed=num_done, detail=detail)

    def stop(self) -> None:
        self._bar.stop()


def choose_progress(*, quiet: bool, as_json: bool = False) -> Progress:
    """Live on a terminal, plain elsewhere, JSON lines or silent when asked."""
    if quiet:
        return Silent()
    if as_json:
        return JsonLog()
    return LiveProgress() if sys.stderr.isatty() else PlainProgress()
