"""Which attention backend bears which name."""

from __future__ import annotations

from collections.abc import Callable

from batchradix.engine.attention.base import AttentionBackend, AttentionShape
from batchradix.engine.attention.torch_backend import TorchAttention
from batchradix.errors import OptionError

BACKENDS: dict[str, Callable[[AttentionShape], AttentionBackend]] = {
    "torch": TorchAttention,
}


def make_backend(name: str, shape: AttentionShape) -> AttentionBackend:
    """Raises `OptionError` for a name that is not in `BACKENDS`."""
    if name not in BACKENDS:
        raise OptionError(f"attention must be one of {', '.join(BACKENDS)}, not {name!r}")
    return BACKENDS[name](shape)
