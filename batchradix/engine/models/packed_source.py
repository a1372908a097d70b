"""Weights stored as integers or FP8 with scales, dequantised as they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from batchradix.checkpoint.stored_weights import StoredWeights
from batchradix.engine.models.safetensors_source import SafetensorsSource
from batchradix.engine.models.unpacking import Scaled, awq, gptq, packed
from batchradix.errors import ModelError
from batchradix_kernels.grouped_linear import Groups

_MARKS = {"awq": "qweight", "gptq": "qweight", "packed": "weight_packed", "scaled": "weight"}
_SCALES = ("weight_scale", "weight_scale_inv")
_PARTS = {
    *("qweight", "qzeros", "scales", "g_idx"),
    *(*_SCALES, "weight_zero_point", "weight_packed", "weight_shape", "weight_g_idx"),
    # of activations, keys and values, which are not rounded here
    *("input_scale", "input_scale_ub", "input_zero_point", "output_scale", "output_zero_point"),
    *("q_scale", "k_scale", "v_scale", "k_zero_point", "v_zero_point"),
}


class PackedSource:
    """Implements `TensorSource` over files some of whose matrices are as ``stored`` says; the
    others are read as they are."""

    def __init__(self, source: SafetensorsSource, stored: StoredWeights) -> None:
        self._source = source
        self._stored = stored
        self._mark = _MARKS[stored.layout]
        self._files: dict[str, Path] = {}
        for name, path in source.files.items():
            layer, _, part = name.rpartition(".")
            if part == self._mark:
                self._files[f"{layer}.weight"] = path
            elif part not in _PARTS:
                self._files[name] = path

    @property
    def files(self) -> Mapping[str, Path]:
        return self._files

    def read(self, name: str) -> torch.Tensor:
        found = self._scaled(name)
        return self._source.read(name) if found is None else found.widen()

    def read_groups(self, name: str) -> Groups | None:
        """The matrix as integers with scales; None for what is stored otherwise."""
        if self._stored.layout == "scaled":
            return None
        found = self._scaled(name)
        return None if found is None else found.as_groups()

    def read_rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        """Of a matrix that is not plain the whole is read."""
        layer = name.rpartition(".")[0]
        if name in self._source.files and not any(
            f"{layer}.{scale}" in self._source.files for scale in _SCALES
        ):
            return self._source.read_rows(name, rows)
        return self.read(name)[list(rows)]

    def _scaled(self, name: str) -> Scaled | None:
        """The parts of a matrix, None for a plain tensor."""
        layer, _, part = name.rpartition(".")
        mark = f"{layer}.{self._mark}"
        is_matrix = part == "weight" and mark in self._source.files
        if not is_matrix or self._source.stored_dtype(mark) not in ("I32", "I8", "F8_E4M3"):
            return None
        match self._stored.layout:
            case "awq" | "gptq":
                return self._integers(layer)
            case "packed":
                return self._packed(layer)
            case "scaled":
                return self._bytes(layer)

    def _integers(self, layer: str) -> Scaled:
        words, zeros = self._part(layer, "qweight"), self._part(layer, "qzeros")
        scales = self._part(layer, "scales")
        num_groups, num_outputs = scales.shape
        if self._stored.layout == "awq":
            packed_outputs = -(-num_outputs // 8)
            self._check(layer, "qweight", words, (None, packed_outputs))
            self._check(layer, "qzeros", zeros, (num_groups, packed_outputs))
            return awq(words, zeros, scales)
        self._check(layer, "qweight", words, (None, num_outputs))
        self._check(layer, "qzeros", zeros, (num_groups, None))
        bits = zeros.shape[1] * 32 // num_outputs
        groups = self._groups(layer, "g_idx", words.shape[0] * 32 // max(1, bits), num_groups)
        if bits not in (2, 3, 4, 8):
            raise self._error(layer, "qzeros", f"tells of {bits} bits, which cannot be read")
        return gptq(words, zeros, scales, groups, self._stored.zero_offset)

    def _packed(self, layer: str) -> Scaled:
        shape = self._part(layer, "weight_shape").tolist()
        words = self._part(layer, "weight_packed")
        self._check(layer, "weight_packed", words, (shape[0], None))
        if not -(-shape[1] * 2 // 32) <= words.shape[1] <= -(-shape[1] * 8 // 32):
            raise self._error(layer, "weight_packed", f"does not hold {shape[1]} inputs a row")
        scales = self._scales(layer, "weight_scale", shape)
        groups = self._groups(layer, "weight_g_idx", shape[1], scales.shape[1])
        zeros = None
        if f"{layer}.weight_zero_point" in self._source.files:
            zeros = self._part(layer, "weight_zero_point")
        return packed(words, scales, zeros, groups, shape[1])

    def _bytes(self, layer: str) -> Scaled:
        values = self._part(layer, "weight")
        name = next((s for s in _SCALES if f"{layer}.{s}" in self._source.files), None)
        block = self._stored.block
        if name is None:
            name = _SCALES[0 if block is None else 1]
            raise ModelError(
                f"{self.files[f'{layer}.weight']}: tensor {layer}.weight is quantised, but there "
                f"is no {layer}.{name}; fetch the model again"
            )
        zeros = None
        if f"{layer}.weight_zero_point" in self._source.files:
            zeros = self._part(layer, "weight_zero_point")
            zeros = zeros.view(-1, 1) if zeros.ndim < 2 else zeros
        if block is None:
            scales = self._scales(layer, name, values.shape)
            return Scaled(values=values, scales=scales, zeros=zeros)
        scales = self._part(layer, name)
        blocks = [-(-size // part) for size, part in zip(values.shape, block, strict=True)]
        self._check(layer, name, scales, tuple(blocks))
        of_rows = scales.repeat_interleave(block[0], 0)[: values.shape[0]]
        groups = torch.arange(values.shape[1]) // block[1]
        return Scaled(values=values, scales=of_rows, groups=groups)

    def _scales(self, layer: str, name: str, shape: Sequence[int]) -> torch.Tensor:
        """[N, G] or [1, 1]."""
        scales = self._part(layer, name)
        scales = scales.view(-1, 1) if scales.ndim < 2 else scales
        if scales.shape[0] != 1 or scales.shape[1] != 1:
            self._check(layer, name, scales, (shape[0], None))
        return scales

    def _groups(
        self, layer: str, part: str, num_inputs: int, num_groups: int
    ) -> torch.Tensor | None:
        """int64[K], None where inputs stand in the order of their groups."""
        if f"{layer}.{part}" not in self._source.files:
            return None
        groups = self._part(layer, part).long()
        self._check(layer, part, groups, (num_inputs,))
        if (groups < 0).all():  # never set
            return None
        if groups.min() < 0 or groups.max() >= num_groups:
            raise self._error(layer, part, f"names groups beyond {num_groups}")
        in_order = torch.arange(num_inputs) // -(-num_inputs // num_groups)
        return None if torch.equal(groups, in_order) else groups

    def _part(self, layer: str, part: str) -> torch.Tensor:
        name = f"{layer}.{part}"
        if name not in self._source.files:
            raise ModelError(
                f"{self.files[f'{layer}.weight']}: there is no tensor {name} beside "
                f"{layer}.{self._mark}; fetch the model again"
            )
        return self._source.read_stored(name)

    def _check(
        self, layer: str, part: str, tensor: torch.Tensor, shape: tuple[int | None, ...]
    ) -> None:
        sizes = zip(tensor.shape, shape, strict=False)
        if tensor.ndim != len(shape) or any(w is not None and s != w for s, w in sizes):
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            what = f"has shape {list(tensor.shape)}, but [{wanted}] goes with the others"
            raise self._error(layer, part, what)

    def _error(self, layer: str, part: str, what: str) -> ModelError:
        path = self.files[f"{layer}.weight"]
        return ModelError(f"{path}: tensor {layer}.{part} {what}; fetch the model again")
