"""Tensors that hold several layers side by side (Phi-3), as the layers they are made of."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from batchradix.checkpoint.model_config import ModelConfig
from batchradix.engine.models.source import TensorSource, groups_of
from batchradix.errors import ModelError
from batchradix_kernels.grouped_linear import Groups

_FUSED = re.compile(r"(.*\.)(qkv_proj|gate_up_proj)\.weight$")


class SplitSource:
    """Implements `TensorSource` over another: ``qkv_proj`` and ``gate_up_proj`` are read as the
    layers whose rows they hold, one below the other."""

    def __init__(self, source: TensorSource, config: ModelConfig) -> None:
        kv_size = config.num_kv_heads * config.head_dim
        heads = (config.num_heads * config.head_dim, kv_size, kv_size)
        sizes = {
            "qkv_proj": dict(zip(("q_proj", "k_proj", "v_proj"), heads, strict=True)),
            "gate_up_proj": dict.fromkeys(("gate_proj", "up_proj"), config.intermediate_size),
        }
        self._source = source
        self._files: dict[str, Path] = {}
        self._parts: dict[str, tuple[str, range]] = {}
        self._num_rows: dict[str, int] = {}  # of each tensor that holds several
        for name, path in source.files.items():
            match = _FUSED.match(name)
            if match is None:
                self._files[name] = path
                continue
            start = 0
            for part, size in sizes[match[2]].items():
                self._files[f"{match[1]}{part}.weight"] = path
                self._parts[f"{match[1]}{part}.weight"] = name, range(start, start + size)
                start += size
            self._num_rows[name] = start

    @property
    def files(self) -> Mapping[str, Path]:
        return self._files

    def read(self, name: str) -> torch.Tensor:
        if name not in self._parts:
            return self._source.read(name)
        whole, rows = self._parts[name]
        tensor = self._source.read(whole)
        if tensor.ndim != 2 or len(tensor) != self._num_rows[whole]:
            raise ModelError(
                f"{self.files[name]}: tensor {whole} has shape {list(tensor.shape)}, but the "
                f"config asks for {self._num_rows[whole]} rows"
            )
        return tensor[rows.start : rows.stop]

    def read_groups(self, name: str) -> Groups | None:
        if name not in self._parts:
            return groups_of(self._source, name)
        whole, rows = self._parts[name]
        groups = groups_of(self._source, whole)
        if groups is None or groups.shape[0] != self._num_rows[whole]:
            return None  # whoever reads it will say what is wrong
        return groups.take_rows(torch.arange(rows.start, rows.stop))

    def read_rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        if name not in self._parts:
            return self._source.read_rows(name, rows)
        whole, part = self._parts[name]
        return self._source.read_rows(whole, [part[row] for row in rows])
