"""Signals and a deadline that stop a run: after its step, at once, or out of a step that hangs."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

GRACE_S = 5.0
"""From a second signal on, for what is done to be committed; without it the process ends."""


class Interrupted(Exception):
    """A signal ended the run in the middle of something; ``number`` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def stop_signals(deadline_s: float | None) -> Iterator[Callable[[], int | None]]:
    """SIGINT, SIGTERM and SIGHUP end the run after the step; a second one ends it at once.

    The first one ends it at once too while rows are still being read and weights loaded: until
    what it yields has been asked, no answer could be lost. Ends with code 130, 143 or 129. After
    ``deadline_s`` seconds it is as if SIGTERM had come. What nohup ignores stays ignored.
    """
    received: list[int] = []
    is_asked = False
    started_s = time.monotonic()

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        received.append(number)
        if not is_asked or len(received) > 1:
            raise KeyboardInterrupt

    def stop_requested() -> int | None:
        nonlocal is_asked
        is_asked = True
        if deadline_s is not None and time.monotonic() - started_s >= deadline_s:
            return signal.SIGTERM
        return received[0] if received else None

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        with _no_hanging(numbers):
            yield stop_requested
    except KeyboardInterrupt:
        raise Interrupted(received[0] if received else signal.SIGINT) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _no_hanging(numbers: Sequence[int]) -> Iterator[None]:
    """Ends the process, `GRACE_S` after a second signal, if what is done here still goes on.

    Python runs handlers between two of its own instructions, which a call into C that hangs
    never comes to. The numbers of signals are written to a pipe all the same, and a thread that
    reads them needs no more than that the call has let go of the interpreter.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    is_done = threading.Event()

    def watch() -> None:
        received = b""
        while len(received) < 2:
            read = os.read(reading, 64)
            if not read:
                return
            received += bytes(number for number in read if number in numbers)
        if not is_done.wait(GRACE_S):
            with suppress(OSError):
                os.write(2, b"stopped in the middle of a step that does not end\n")
            os._exit(128 + received[0])

    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    watcher = threading.Thread(target=watch, name="signals", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_done.set()
        signal.set_wakeup_fd(before)
        os.close(writing)  # ends the thread
        watcher.join()
        os.close(reading)
