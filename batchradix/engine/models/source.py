"""Where a model's tensors come from, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from batchradix_kernels.grouped_linear import Groups


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


@runtime_checkable
class GroupedSource(TensorSource, Protocol):
    """A source some of whose matrices are held in few bits with scales a group of inputs."""

    def read_groups(self, name: str) -> Groups | None:
        """What `read` would widen; None where that is not how the matrix is held."""
        ...


def groups_of(source: TensorSource, name: str) -> Groups | None:
    """`GroupedSource.read_groups`, None of a source that has none."""
    return source.read_groups(name) if isinstance(source, GroupedSource) else None
