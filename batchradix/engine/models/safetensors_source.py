"""Tensors of safetensors files, single or sharded, mapped into memory and read on demand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from batchradix.errors import ModelError


class SafetensorsSource:
    """Implements `TensorSource`. Raises `ModelError` for a file that is no safetensors file."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.files: dict[str, Path] = {}
        self._handles: dict[Path, Any] = {}
        for path in paths:
            try:
                handle: Any = safe_open(path, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path} cannot be read as safetensors: {error}") from error
            self._handles[path] = handle
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                if name in self.files:
                    raise ModelError(
                        f"the tensor {name} is in {self.files[name]} and again in {path}; "
                        f"keep one of the two sets of weights"
                    )
                self.files[name] = path

    def read(self, name: str) -> torch.Tensor:
        tensor = self.read_stored(name)
        path = self.files[name]
        if not tensor.dtype.is_floating_point or tensor.element_size() < 2:
            raise ModelError(
                f"{path}: tensor {name} is stored as {str(tensor.dtype).removeprefix('torch.')}, "
                f"which is not supported; use weights in float32, float16 or bfloat16, or GGUF"
            )
        return tensor

    def read_stored(self, name: str) -> torch.Tensor:
        """The tensor in whatever dtype it is stored."""
        path = self.files[name]
        try:
            tensor: torch.Tensor = self._handles[path].get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{path}: tensor {name} cannot be read: {error}") from error
        return tensor

    def stored_dtype(self, name: str) -> str:
        """The format's name of it, such as ``BF16``."""
        return str(self._handles[self.files[name]].get_slice(name).get_dtype())

    def stored_shape(self, name: str) -> list[int]:
        return list(self._handles[self.files[name]].get_slice(name).get_shape())

    def read_rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        stored = self._handles[self.files[name]].get_slice(name)
        return torch.cat([stored[row : row + 1] for row in rows])
