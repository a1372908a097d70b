"""The metadata of a GGUF file's architecture, read one by one and checked."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchradix.checkpoint.gguf_header import GgufHeader
from batchradix.errors import ModelError


class GgufFields:
    """``prefix``: the name of the architecture, with which its keys begin."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], prefix: str) -> None:
        self.path = path
        self.metadata = metadata
        self.prefix = prefix

    def number(self, name: str, default: float | None = None) -> float:
        key = f"{self.prefix}.{name}"
        value = self.metadata.get(key, default)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]  # written once a layer
        if isinstance(value, list):
            raise ModelError(f"{self.path}: {key} differs between layers, which is not supported")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelError(f"{self.path} is damaged: {key} is {value!r}, not a number")
        if not math.isfinite(value) or value < 0:
            raise ModelError(f"{self.path} is damaged: {key} is {value!r}")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if value != int(value) or (value < 1 and default is None):
            raise ModelError(f"{self.path} is damaged: {self.prefix}.{name} is {value!r}")
        return int(value)


def read_floats(path: Path, header: GgufHeader, name: str, length: int) -> tuple[float, ...]:
    """A tensor of ``length`` numbers in float32. Raises `ModelError` where it is something else."""
    tensor = header.tensors.get(name)
    if tensor is None or tensor.ggml_type != 0 or tensor.shape != (length,):
        raise ModelError(f"{path}: {name} is not float32[{length}]")
    with path.open("rb") as file:
        file.seek(tensor.offset_bytes)
        return struct.unpack(f"<{length}f", file.read(tensor.num_bytes))
