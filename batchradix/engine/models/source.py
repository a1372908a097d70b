"""Where a model's tensors come from, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch


class TensorSource(Protocol):
    """The tensors of a checkpoint by their Hugging Face names."""

    @property
    def files(self) -> Mapping[str, Path]:
        """The file of every tensor that the checkpoint holds."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """On the CPU, in a floating dtype. Raises `ModelError` when it cannot be had."""
        ...

    def read_rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        """Those rows of a matrix, [len(rows), ...]; nothing else is read."""
        ...
