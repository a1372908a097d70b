"""Heads whose elements are put in the order of the `rope` kernel, whose pairs stand half a head
apart: those that are rotated by adjacent pairs (DeepSeek), or of which only a part is (Phi-3)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from batchradix.checkpoint.model_config import ModelConfig
from batchradix.engine.models.source import TensorSource, groups_of
from batchradix_kernels.grouped_linear import Groups

_ROTATED = re.compile(r"\.self_attn\.(q_proj|q_b_proj|kv_a_proj_with_mqa)\.(weight|bias)$")


class HalvedRope:
    """Implements `TensorSource` over another: where rows give rotated elements, the even ones of a
    head come first and then the odd ones, so that pairs stand half a head apart. Queries and keys
    alike, so scores stay as they are."""

    def __init__(self, source: TensorSource, config: ModelConfig) -> None:
        assert config.mla is not None
        self._source = source
        self._rope_dim = config.mla.rope_dim
        self._q_dim = config.mla.nope_dim + config.mla.rope_dim
        self._latent_dim = config.mla.kv_lora_rank + config.mla.rope_dim

    @property
    def files(self) -> Mapping[str, Path]:
        return self._source.files

    def read(self, name: str) -> torch.Tensor:
        tensor = self._source.read(name)
        match = _ROTATED.search(name)
        if match is None:
            return tensor
        width = self._latent_dim if match[1] == "kv_a_proj_with_mqa" else self._q_dim
        if tensor.shape[0] % width:  # whoever asks will say that the shape is wrong
            return tensor
        heads = tensor.reshape(-1, width, *tensor.shape[1:])
        kept = width - self._rope_dim
        parts = (heads[:, :kept], heads[:, kept::2], heads[:, kept + 1 :: 2])
        return torch.cat(parts, dim=1).reshape(tensor.shape)

    def read_rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        """Not for the projections whose rows are put in order."""
        return self._source.read_rows(name, rows)


_HEADS = re.compile(r"\.self_attn\.(q_proj|k_proj)\.(weight|bias)$")


class PartialRope:
    """Implements `TensorSource` over another: of each head of queries and keys the first half of
    the rotated elements comes first and then half of the others, which makes the first half of
    the head, and the rest likewise. Queries and keys alike, so scores stay as they are."""

    def __init__(self, source: TensorSource, config: ModelConfig) -> None:
        rotated = config.rope.rotated_dim
        assert rotated is not None
        half, rest = rotated // 2, (config.head_dim - rotated) // 2
        order = torch.arange(config.head_dim)
        low, high, *others = torch.split(order, [half, half, rest, rest])
        self._order = torch.cat((low, others[0], high, others[1]))
        self._source = source

    @property
    def files(self) -> Mapping[str, Path]:
        return self._source.files

    def read(self, name: str) -> torch.Tensor:
        tensor = self._source.read(name)
        width = len(self._order)
        if _HEADS.search(name) is None or tensor.shape[0] % width:
            return tensor
        heads = tensor.reshape(-1, width, *tensor.shape[1:])
        return heads[:, self._order].reshape(tensor.shape)

    def read_groups(self, name: str) -> Groups | None:
        groups, width = groups_of(self._source, name), len(self._order)
        if groups is None or _HEADS.search(name) is None or groups.shape[0] % width:
            return groups
        starts = torch.arange(0, groups.shape[0], width)
        return groups.take_rows((starts[:, None] + self._order).flatten())

    def read_rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        """Not for the projections whose rows are put in order."""
        return self._source.read_rows(name, rows)
