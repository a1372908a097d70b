"""A model's tensors with a LoRA adapter merged in, as they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from batchradix.checkpoint.adapter import Adapter
from batchradix.checkpoint.model_config import ModelConfig
from batchradix.engine.models.safetensors_source import SafetensorsSource
from batchradix.engine.models.source import GroupedSource, TensorSource
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
        for name in (*(f"{layer}.weight" for layer in adapter.scales), *adapter.replaced):
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
        return name in self._adapter.replaced or self._layer(name) in self._adapter.scales

    def read(self, name: str) -> torch.Tensor:
        if name in self._adapter.replaced:
            return self._tensors.read(self._adapter.replacement_name(name))
        tensor = self._source.read(name)
        return self._merged(name, tensor) if self.changes(name) else tensor

    def read_rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        if name in self._adapter.replaced:
            return self._tensors.read_rows(self._adapter.replacement_name(name), rows)
        tensor = self._source.read_rows(name, rows)
        return self._merged(name, tensor, rows) if self.changes(name) else tensor

    def read_groups(self, name: str) -> Groups | None:
        """None for what the adapter changes: a sum has no such scales."""
        if self.changes(name) or not isinstance(self._source, GroupedSource):
            return None
        return self._source.read_groups(name)

    def _merged(
        self, name: str, tensor: torch.Tensor, rows: Sequence[int] | None = None
    ) -> torch.Tensor:
        layer = self._layer(name)
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
