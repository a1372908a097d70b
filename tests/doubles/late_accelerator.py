"""A device that is late: what the host may rely on of one that works while the host goes on.

Arithmetic is done by the CPU at once, as a device would do it in order. But copies are copies, a
graph does what it was recorded for on the memory it was recorded with and may neither copy to nor
from the host, and every wait is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from batchradix.engine.accelerator import Download, Replay


class LateAccelerator:
    """Implements `Accelerator`. ``events``: "upload", "download", "wait", "capture", "replay" in
    order, and what others add. ``peak`` and ``free`` are the memory it says it has."""

    is_asynchronous = True
    device = torch.device("cpu")

    def __init__(self, *, peak: int = 0, free: int = 0, most_graphs: int | None = None) -> None:
        self.events: list[str] = []
        self._peak = peak
        self._free = free
        self._graphs_left = most_graphs
        self._is_capturing = False

    def upload(self, array: NDArray[Any]) -> torch.Tensor:
        assert not self._is_capturing, "a graph holds no copy from the host"
        self.events.append("upload")
        return torch.from_numpy(np.array(array, copy=True))

    def download(self, tensor: torch.Tensor) -> Download:
        assert not self._is_capturing, "a graph holds no copy to the host"
        self.events.append("download")
        return _Late(tensor.clone().numpy(), self.events)

    def capture(self, work: Callable[[], torch.Tensor]) -> Replay:
        if self._graphs_left is not None:
            self._graphs_left -= 1
            if self._graphs_left < 0:
                raise torch.OutOfMemoryError("CUDA out of memory")
        self.events.append("capture")
        out = self._work(work)
        # Recording computes nothing: what is read before a replay is found out.
        out.fill_(float("nan"))

        def replay() -> torch.Tensor:
            self.events.append("replay")
            return out.copy_(self._work(work))

        return replay

    def peak_bytes(self, work: Callable[[], object]) -> int:
        work()
        return self._peak

    def free_bytes(self) -> int:
        return self._free

    def _work(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        self._is_capturing = True
        try:
            return work()
        finally:
            self._is_capturing = False


class _Late:
    def __init__(self, array: NDArray[Any], events: list[str]) -> None:
        self._array = array
        self._events: list[str] | None = events

    def get(self) -> NDArray[Any]:
        if self._events is not None:
            self._events.append("wait")
            self._events = None
        return self._array
