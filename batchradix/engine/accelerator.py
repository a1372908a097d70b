"""What the engine asks of the device beside arithmetic: copies, a graph of a step, free memory.

A device works through what it is given in order, while the host goes on; the host waits for it
only where it reads a `Download`. On the CPU everything is done when the call returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Replay = Callable[[], torch.Tensor]
"""Does captured work once more, on what its inputs hold now; its result, in the same memory."""


class Download(Protocol):
    """A copy of a tensor on its way to the host."""

    def get(self) -> NDArray[Any]:
        """Waits for it; any number of calls."""
        ...


class Accelerator(Protocol):
    """A device as the host drives it."""

    @property
    def device(self) -> torch.device: ...

    @property
    def is_asynchronous(self) -> bool:
        """Whether it may still work when a call returns."""
        ...

    def upload(self, array: NDArray[Any]) -> torch.Tensor:
        """The array on the device. Nobody may change it after."""
        ...

    def download(self, tensor: torch.Tensor) -> Download:
        """What the tensor holds at this place in the order of work."""
        ...

    def capture(self, work: Callable[[], torch.Tensor]) -> Replay:
        """Records ``work``, which must read and write the same tensors whenever it is called and
        wait for nothing. It may run meanwhile, or not."""
        ...

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """The most memory that ``work`` has beside what is taken already; runs it."""
        ...

    def free_bytes(self) -> int:
        """Memory of the device that can still be taken."""
        ...


class HostAccelerator:
    """The CPU, which does everything at once."""

    device = torch.device("cpu")
    is_asynchronous = False

    def upload(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array))

    def download(self, tensor: torch.Tensor) -> Download:
        return _Held(tensor.clone().numpy())

    def capture(self, work: Callable[[], torch.Tensor]) -> Replay:
        out = work()
        return lambda: out.copy_(work())

    def peak_bytes(self, work: Callable[[], object]) -> int:
        raise RuntimeError("the pool on the CPU is given its size")

    def free_bytes(self) -> int:
        raise RuntimeError("the pool on the CPU is given its size")


class CudaAccelerator:
    """A GPU of CUDA (or ROCm), on the current stream.

    Copies go through page-locked memory that torch keeps and gives out again once the copies that
    used it are done.
    """

    is_asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._graph_memory: Any = None  # of all graphs: they run one after the other

    def upload(self, array: NDArray[Any]) -> torch.Tensor:
        pinned = torch.from_numpy(np.ascontiguousarray(array)).pin_memory()
        return pinned.to(self.device, non_blocking=True)

    def download(self, tensor: torch.Tensor) -> Download:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        pinned.copy_(tensor, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return _OnItsWay(pinned, arrived)

    def capture(self, work: Callable[[], torch.Tensor]) -> Replay:
        if self._graph_memory is None:
            self._graph_memory = torch.cuda.graph_pool_handle()
        work()  # compiles kernels and opens libraries, which no graph can hold
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may go on using the device meanwhile.
        with torch.cuda.graph(graph, pool=self._graph_memory, capture_error_mode="thread_local"):
            out = work()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay

    def peak_bytes(self, work: Callable[[], object]) -> int:
        torch.cuda.empty_cache()
        taken = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        torch.cuda.synchronize(self.device)
        return int(torch.cuda.max_memory_reserved(self.device)) - taken

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        return int(free)


class _Held:
    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array

    def get(self) -> NDArray[Any]:
        return self._array


class _OnItsWay:
    def __init__(self, pinned: torch.Tensor, arrived: torch.cuda.Event) -> None:
        self._pinned = pinned
        self._arrived = arrived

    def get(self) -> NDArray[Any]:
        self._arrived.synchronize()
        return self._pinned.numpy()


def open_accelerator(device: torch.device) -> Accelerator:
    return CudaAccelerator(device) if device.type == "cuda" else HostAccelerator()
