"""Room beside the pool for keys and values that are wanted again: a temporary file, or memory.

Slots are numbered as the pool's are; one holds a token's keys and values of all layers.
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

from batchradix.checkpoint.checkpoint import Checkpoint
from batchradix.config import MIN_SPILL_TOKENS
from batchradix.engine.cache.pool import Extent, ExtentPool
from batchradix.errors import RunError
from batchradix.settings import EngineSettings

MIN_TOKENS = MIN_SPILL_TOKENS
_RESERVE_BYTES = 1 << 26


def open_space(checkpoint: Checkpoint, settings: EngineSettings) -> SpillSpace | None:
    """The space of an engine, None where it has none."""
    num_bytes = settings.kv_host_memory_bytes or settings.kv_disk_bytes
    token_bytes = checkpoint.config.num_kv_elements_per_token * settings.kv_element_bytes
    if num_bytes < MIN_TOKENS * token_bytes:
        return None
    in_memory = settings.kv_host_memory_bytes > 0
    return SpillSpace(num_bytes // token_bytes, token_bytes, in_memory=in_memory)


class SpillSpace:
    """``num_slots`` slots of ``token_bytes`` each, in an unnamed file of the temporary folder
    that grows as it is used, or ``in_memory``.

    It knows what it takes to write and read them, and what the model takes to compute tokens,
    from what was measured; before that, neither is worth the other's place.
    """

    def __init__(self, num_slots: int, token_bytes: int, *, in_memory: bool = False) -> None:
        self._free = ExtentPool(num_slots)
        self._token_bytes = token_bytes
        self._memory = bytearray() if in_memory else None
        self._file: Any = None
        self._num_reserved = 0
        self._is_full = False
        self.notices: list[str] = []
        self._seconds = 0.0  # of moving tokens out and in
        self._moved = 0
        self._computed_per_s = 0.0

    @property
    def is_measured(self) -> bool:
        """Whether tokens have been computed and moved, so that one can be held to the other."""
        return self._computed_per_s > 0 and self._moved > 0

    def pays(self, num_tokens: int) -> bool:
        """Whether so many tokens are sooner written and read than computed again.

        The first time nothing has been written yet, and trying is what tells.
        """
        if num_tokens < MIN_TOKENS or self._is_full:
            return False
        if not self.is_measured:
            return True
        return 2 * self._seconds / self._moved < 1 / self._computed_per_s

    def note_computed(self, num_tokens: int, seconds: float) -> None:
        """A forward pass took so long; the fastest one counts, in which a token cost least."""
        if num_tokens >= MIN_TOKENS and seconds > 0:
            self._computed_per_s = max(self._computed_per_s, num_tokens / seconds)

    def allocate(self, num_slots: int) -> list[Extent] | None:
        """Takes slots, with their room on the disk; None where there are not as many."""
        extents = self._free.allocate(num_slots)
        if extents is not None and not self._reserve(max(start + n for start, n in extents)):
            self._free.free(extents)
            return None
        return extents

    def free(self, extents: list[Extent]) -> None:
        """Gives slots back."""
        self._free.free(extents)

    @property
    def num_used(self) -> int:
        return self._free.num_used

    def write(self, extents: list[Extent], data: memoryview) -> None:
        """Fills slots with the bytes of their tokens, in order. Raises `RunError`."""
        started_s, done = time.perf_counter(), 0
        for start, num_slots in extents:
            part = data[done : done + num_slots * self._token_bytes]
            done += len(part)
            place = start * self._token_bytes
            if self._memory is not None:
                self._memory[place : place + len(part)] = part
                continue
            try:
                while part:
                    written = os.pwrite(self._file.fileno(), part, place)
                    part, place = part[written:], place + written
            except OSError as error:
                raise self._broken(error) from error
        self._note(extents, started_s)

    def read(self, extents: list[Extent]) -> bytearray:
        """The bytes of slots, in order. Raises `RunError`."""
        started_s = time.perf_counter()
        data = bytearray(sum(n for _, n in extents) * self._token_bytes)
        rest = memoryview(data)
        for start, num_slots in extents:
            part, rest = (
                rest[: num_slots * self._token_bytes],
                rest[num_slots * self._token_bytes :],
            )
            place = start * self._token_bytes
            if self._memory is not None:
                part[:] = self._memory[place : place + len(part)]
                continue
            try:
                while part:
                    num_read = os.preadv(self._file.fileno(), [part], place)
                    if num_read == 0:
                        raise OSError(0, "it is shorter than what was written")
                    part, place = part[num_read:], place + num_read
            except OSError as error:
                raise self._broken(error) from error
        self._note(extents, started_s)
        return data

    def close(self) -> None:
        """Gives the room back; idempotent."""
        self._memory = None
        self._is_full = True
        if self._file is not None:
            self._file.close()

    def _note(self, extents: list[Extent], started_s: float) -> None:
        self._moved += sum(n for _, n in extents)
        self._seconds += time.perf_counter() - started_s

    def _reserve(self, end: int) -> bool:
        """Makes sure of room for the slots before ``end``, so that no write finds a full disk."""
        if end <= self._num_reserved:
            return True
        step = max(1, _RESERVE_BYTES // self._token_bytes)
        end = min(self._free.num_slots, -(-end // step) * step)
        first, num_bytes = self._num_reserved * self._token_bytes, end * self._token_bytes
        if self._memory is not None:
            self._memory.extend(bytes(num_bytes - first))
            self._num_reserved = end
            return True
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="batchradix-")  # noqa: SIM115
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file.fileno(), first, num_bytes - first)
        except OSError as error:
            self._is_full = True
            self.notices.append(
                f"--kv-disk takes no more than {first:,} bytes in {tempfile.gettempdir()} "
                f"({error.strerror or error}); what does not fit is computed again, free some "
                f"space or set TMPDIR to another folder"
            )
            return False
        self._num_reserved = end
        return True

    def _broken(self, error: OSError) -> RunError:
        return RunError(
            f"keys and values in a temporary file in {tempfile.gettempdir()} cannot be written "
            f"or read ({error.strerror or error}); leave --kv-disk out or set TMPDIR to another "
            f"folder"
        )
