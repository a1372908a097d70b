"""Weights in FP8 with a scale a block (DeepSeek-V3), dequantised as they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from batchradix.engine.models.safetensors_source import SafetensorsSource
from batchradix.errors import ModelError

_SCALE = "_scale_inv"
_FP8 = "F8_E4M3"


class Fp8Source:
    """Implements `TensorSource` over files some of whose matrices are float8_e4m3fn, each with
    ``…weight_scale_inv`` beside it: float32, what every ``block`` of rows and columns is to be
    multiplied by, blocks at the edges being smaller."""

    def __init__(self, source: SafetensorsSource, block: tuple[int, int]) -> None:
        self._source = source
        self._block = block
        self._files = {
            name: path for name, path in source.files.items() if not name.endswith(_SCALE)
        }

    @property
    def files(self) -> Mapping[str, Path]:
        return self._files

    def read(self, name: str) -> torch.Tensor:
        if self._source.stored_dtype(name) != _FP8:
            return self._source.read(name)
        stored = self._source.read_stored(name)
        scales = self._scales(name, stored)
        rows, columns = self._block
        values = stored.float()
        for row, of_rows in enumerate(scales):
            part = values[row * rows : (row + 1) * rows]
            part.mul_(of_rows.repeat_interleave(columns)[: values.shape[1]])
        return values

    def read_rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        if self._source.stored_dtype(name) != _FP8:
            return self._source.read_rows(name, rows)
        return self.read(name)[list(rows)]

    def _scales(self, name: str, stored: torch.Tensor) -> torch.Tensor:
        path = self.files[name]
        if name + _SCALE not in self._source.files:
            raise ModelError(
                f"{path}: tensor {name} is in FP8, but there is no {name}{_SCALE}; fetch the model "
                f"again"
            )
        scales = self._source.read(name + _SCALE)
        blocks = [-(-size // block) for size, block in zip(stored.shape, self._block, strict=True)]
        if list(scales.shape) != blocks:
            raise ModelError(
                f"{path}: {name}{_SCALE} has shape {list(scales.shape)}, but a tensor of "
                f"{list(stored.shape)} has {blocks} blocks"
            )
        return scales.float()
