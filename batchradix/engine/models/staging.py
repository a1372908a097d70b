"""Weights on their way from a file to a device, through two buffers in host memory.

While one buffer is copied to the device, the other is filled, which is when a mapped file is read
from disk. So reading overlaps the copy, and host memory beside the model stays two buffers whatever
the size of a tensor. What is to have another dtype is converted on the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["BUFFER_BYTES", "Staging"]

BUFFER_BYTES = 1 << 26

Wait = Callable[[], None]
Start = Callable[[torch.Tensor, torch.Tensor], Wait]
"""Begins to copy a buffer's numbers to a tensor of any dtype on the device; what it returns waits
until the buffer may be overwritten."""


class Staging:
    """Copies tensors to ``device`` through two buffers of ``num_bytes`` each, pinned for CUDA.

    ``start`` begins a copy; unless it is given, that is CUDA's own, or a plain one.
    """

    def __init__(
        self, device: torch.device, num_bytes: int = BUFFER_BYTES, start: Start | None = None
    ) -> None:
        assert num_bytes >= 8, "a buffer holds at least one number"
        on_cuda = device.type == "cuda"
        self._start = start or (_start_on_cuda if on_cuda else _copy_now)
        self._buffers = [
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_cuda) for _ in range(2)
        ]
        self._waits: list[Wait | None] = [None, None]
        self._turn = 0

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies ``source``, on the CPU, to ``target`` of the same shape, contiguous on the device,
        and of any float dtype. The last two buffers' worth may still be under way afterwards."""
        assert source.shape == target.shape
        from_, to = source.reshape(-1), target.view(-1)
        step = len(self._buffers[0]) // source.itemsize
        for first in range(0, len(from_), step):
            part = from_[first : first + step]
            buffer = self._free_buffer()[: part.nbytes].view(source.dtype)
            buffer.copy_(part)
            self._waits[self._turn] = self._start(buffer, to[first : first + step])

    def finish(self) -> None:
        """Waits until all copies are done."""
        for turn, wait in enumerate(self._waits):
            if wait is not None:
                wait()
                self._waits[turn] = None

    def _free_buffer(self) -> torch.Tensor:
        """The buffer that was not filled last, once its copy is done."""
        self._turn = 1 - self._turn
        wait = self._waits[self._turn]
        if wait is not None:
            wait()
        return self._buffers[self._turn]


def _copy_now(buffer: torch.Tensor, target: torch.Tensor) -> Wait:
    target.copy_(buffer)
    return lambda: None


def _start_on_cuda(buffer: torch.Tensor, target: torch.Tensor) -> Wait:
    """Across dtypes ``copy_`` alone would convert on the CPU."""
    if buffer.dtype == target.dtype:
        target.copy_(buffer, non_blocking=True)
    else:
        target.copy_(buffer.to(target.device, non_blocking=True))
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    return done.synchronize
