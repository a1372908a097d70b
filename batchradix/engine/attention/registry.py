"""Which attention backend bears which name, and which one ``auto`` means."""

from __future__ import annotations

from collections.abc import Callable

from batchradix.engine.attention.base import AttentionBackend, AttentionShape
from batchradix.engine.attention.cpu_backend import CpuAttention
from batchradix.engine.attention.torch_backend import TorchAttention
from batchradix.engine.attention.triton_backend import TritonAttention
from batchradix.errors import OptionError
from batchradix_kernels.native import library

BACKENDS: dict[str, Callable[[AttentionShape], AttentionBackend]] = {
    "torch": TorchAttention,
    "cpu": CpuAttention,
    "triton": TritonAttention,
}


def make_backend(name: str, shape: AttentionShape) -> AttentionBackend:
    """``auto``: the C kernels where they serve the shape, else torch operations.

    Raises `OptionError` for a name that is not in `BACKENDS`, or one that cannot serve.
    """
    serves = CpuAttention.serves(shape)
    if shape.batch_invariant and not (serves and name in ("auto", "cpu")):
        why = f"`attention` is {name}" if serves else CpuAttention.missing(shape)
        raise OptionError(
            f"`deterministic` needs the attention kernels in C, and {why}; change that, or leave "
            f"`deterministic` out"
        )
    if name == "auto":
        name = "cpu" if serves else "torch"
    if name not in BACKENDS:
        raise OptionError(f"`attention` must be auto, {', '.join(BACKENDS)}, not {name!r}")
    if name == "cpu" and not serves:
        raise OptionError(
            f"`attention` cpu, the kernels in C, cannot be used here: "
            f"{CpuAttention.missing(shape)}; use torch"
        )
    missing = TritonAttention.missing(shape) if name == "triton" else None
    if missing is not None:
        raise OptionError(
            f"`attention` triton, the kernels for GPUs, cannot be used here: {missing}"
        )
    return BACKENDS[name](shape)


def missing_kernels(name: str, device: str) -> str | None:
    """What to tell a user whose attention is slow since the C kernels were not built."""
    if device != "cpu" or name != "auto" or library() is not None:
        return None
    return (
        "the C kernels were not built, so attention runs several times slower, in torch "
        "operations; install a C compiler and then batchradix again"
    )
