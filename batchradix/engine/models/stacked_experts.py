"""Experts that files hold in one tensor a layer (gpt-oss), as layers of each.

Plain tensors are ``gate_up_proj`` [N, D, 2F] and ``down_proj`` [N, F, D], transposed as layers go.
In MXFP4 (Open Compute Project 2023) they are not: ``…_blocks`` uint8[N, rows, columns / 32, 16]
holds two numbers of 4 bits a byte, the even one in the lower half, and ``…_scales``
uint8[N, rows, columns / 32] the exponent, plus 127, of what 32 of them are multiplied by. In both
gates and what they gate take turns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from batchradix.checkpoint.model_config import ModelConfig
from batchradix.engine.models.safetensors_source import SafetensorsSource
from batchradix.errors import ModelError

_STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(|_bias|_blocks|_scales)$")
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_FP4, *(-value for value in _FP4)])
_PARTS = {
    "gate_up_proj": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)},
    "down_proj": {"down_proj": slice(None)},
}


@dataclass(frozen=True, slots=True)
class _Part:
    """``stem``: of the stacked tensor's name; ``rows``: those of an expert's layer in it."""

    stem: str
    expert: int
    rows: slice
    is_bias: bool


class StackedExperts:
    """Implements `TensorSource` over safetensors: ``experts.gate_up_proj`` and
    ``experts.down_proj`` are read as ``experts.0.gate_proj.weight`` and so on."""

    def __init__(self, source: SafetensorsSource, config: ModelConfig) -> None:
        assert config.moe is not None
        self._source = source
        self._num_experts = config.moe.num_experts
        self._files: dict[str, Path] = {}
        self._parts: dict[str, _Part] = {}
        for name, path in source.files.items():
            match = _STACKED.match(name)
            if match is None:
                self._files[name] = path
            elif match[3] != "_scales":
                is_bias = match[3] == "_bias"
                stem = f"{match[1]}.{match[2]}"
                for part, rows in _PARTS[match[2]].items():
                    for i in range(config.moe.num_experts):
                        ours = f"{match[1]}.{i}.{part}.{'bias' if is_bias else 'weight'}"
                        self._files[ours] = path
                        self._parts[ours] = _Part(stem, i, rows, is_bias)

    @property
    def files(self) -> Mapping[str, Path]:
        return self._files

    def read(self, name: str) -> torch.Tensor:
        if name not in self._parts:
            return self._source.read(name)
        part = self._parts[name]
        if part.is_bias:
            return self._expert(f"{part.stem}_bias", part)[part.rows]
        if part.stem in self._source.files:
            return self._expert(part.stem, part).T[part.rows]
        return self._unpacked(part)

    def read_rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        if name not in self._parts:
            return self._source.read_rows(name, rows)
        return self.read(name)[list(rows)]

    def _expert(self, name: str, part: _Part) -> torch.Tensor:
        path = self._source.files.get(name)
        if path is None:
            raise ModelError(f"the model has no tensor {name}; fetch it again")
        shape = self._source.stored_shape(name)
        if len(shape) < 2 or shape[0] != self._num_experts:
            raise ModelError(
                f"{path}: tensor {name} has shape {shape}, but the config asks for "
                f"{self._num_experts} experts; fetch the model again"
            )
        return self._source.read_rows(name, [part.expert])[0]

    def _unpacked(self, part: _Part) -> torch.Tensor:
        blocks = self._expert(f"{part.stem}_blocks", part)[part.rows]
        scales = self._expert(f"{part.stem}_scales", part)[part.rows]
        if blocks.dim() != 3 or blocks.shape[2] != 16 or blocks.shape[:2] != scales.shape:
            raise ModelError(
                f"{self._source.files[f'{part.stem}_blocks']}: {part.stem} has blocks of shape "
                f"{list(blocks.shape)} with scales of {list(scales.shape)}; fetch the model again"
            )
        halves = torch.stack((blocks & 15, blocks >> 4), dim=-1)
        values = _VALUES[halves.int()].flatten(2)
        values = torch.ldexp(values, (scales.int() - 127)[..., None])
        return values.flatten(1)
