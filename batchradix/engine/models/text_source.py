"""The text part of a model that sees, too, under the names of a text model (Gemma 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from batchradix.engine.models.source import TensorSource, groups_of
from batchradix_kernels.grouped_linear import Groups

# As files of different ages call it; what begins otherwise belongs to other parts.
_BEGINNINGS = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}
_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.")


def text_name(name: str) -> str | None:
    """A tensor's or a layer's name in a text model; None for what belongs to other parts."""
    for theirs, ours in _BEGINNINGS.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return None if name.removeprefix("model.").startswith(_OTHER_PARTS) else name


class TextSource:
    """Implements `TensorSource` over another."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._names = {
            ours + name.removeprefix(theirs): name
            for name in source.files
            for theirs, ours in _BEGINNINGS.items()
            if name.startswith(theirs)
        }
        self._files = {ours: source.files[name] for ours, name in self._names.items()}

    @property
    def files(self) -> Mapping[str, Path]:
        return self._files

    def read(self, name: str) -> torch.Tensor:
        return self._source.read(self._names[name])

    def read_groups(self, name: str) -> Groups | None:
        return groups_of(self._source, self._names[name])

    def read_rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        return self._source.read_rows(self._names[name], rows)
