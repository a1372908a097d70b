"""A model's tensors with a LoRA adapter merged in, as they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from batchradix.checkpoint.adapter import Adapter
from batchradix.checkpoint.model_config import ModelConfig
from batchradix.engine.models.safetensors_source import SafetensorsSource
from batchradix.engine.models.source import TensorSource, groups_of
from batchradix.engine.models.text_source import text_name
from batchradix.errors import ModelError
from batchradix_kernels.grouped_linear import Groups


class LoraSource:
    """Implements `TensorSource` over another with Hugging Face's names and order of rows: weight +
    scale · up · down, in float32.

    Raises `ModelError` where the adapter changes what the model has not.
    """

    def __init__(self, source: TensorSource, adapter: Adapter, config: ModelConfig) -> None:
        self._source = source
        self._adapter = adapter
        self._tensors = SafetensorsSource([adapter.weight_file])
        # As the model calls them, by what the adapter does.
        self._layers = {_name(layer, config): layer for layer in adapter.scales}
        self._replaced = {_name(name, config): name for name in adapter.replaced}
        layers = [f"{layer}.weight" for layer in self._layers if layer is not None]
        for name in (*layers, *(name for name in self._replaced if name is not None)):
            is_unused = name == "lm_head.weight" and config.tie_embeddings
            if name not in source.files or is_unused:
                why = ", whose output layer is its embeddings" if is_unused else ""
                raise ModelError(
                    f"{adapter.path} changes {name}, which the model has not{why}; give the base "
                    f"model that the adapter was made for"
                )

    @property
    def files(self) -> Mapping[str, Path]:
        return self._source.files

    def changes(self, name: str) -> bool:
        """Whether the adapter says anything of this tensor."""
        return name in self._replaced or self._layer(name) in self._layers

    def read(self, name: str) -> torch.Tensor:
        if name in self._replaced:
            return self._tensors.read(self._adapter.replacement_name(self._replaced[name]))
        tensor = self._source.read(name)
        return self._merged(name, tensor) if self.changes(name) else tensor

    def read_rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        if name in self._replaced:
            replacement = self._adapter.replacement_name(self._replaced[name])
            return self._tensors.read_rows(replacement, rows)
        tensor = self._source.read_rows(name, rows)
        return self._merged(name, tensor, rows) if self.changes(name) else tensor

    def read_groups(self, name: str) -> Groups | None:
        """None for what the adapter changes: a sum has no such scales."""
        return None if self.changes(name) else groups_of(self._source, name)

    def _merged(
        self, name: str, tensor: torch.Tensor, rows: Sequence[int] | None = None
    ) -> torch.Tensor:
        layer = self._layers[self._layer(name)]
        down = self._tensors.read(self._adapter.down_name(layer)).float()
        up = self._tensors.read(self._adapter.up_name(layer)).float()
        if rows is not None:
            up = up[list(rows)]
        if (up.shape[0], down.shape[1]) != tuple(tensor.shape):
            raise ModelError(
                f"{self._adapter.weight_file}: the adapter of {layer} is for a layer of "
                f"{up.shape[0]} outputs and {down.shape[1]} inputs, and the model's has "
                f"{' and '.join(map(str, tensor.shape))}; give the base model that it was made for"
            )
        return torch.addmm(tensor.float(), up, down, alpha=self._adapter.scales[layer])

    def _layer(self, name: str) -> str:
        return name.removesuffix(".weight") if name.endswith(".weight") else ""


def _name(name: str, config: ModelConfig) -> str | None:
    """What the model calls it; None for parts of it that are not run."""
    return text_name(name) if config.text_part else name
