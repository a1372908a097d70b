"""Weights stored as integers or FP8 with scales, dequantised as they are read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch

from batchradix.checkpoint.stored_weights import StoredWeights
from batchradix.engine.models.safetensors_source import SafetensorsSource
from batchradix.engine.models.unpacking import Scaled, awq, gptq, packed
from batchradix.errors import ModelError
from batchradix_kernels.grouped_linear import Groups

_MARKS = {"awq": "qweight", "gptq": "qweight", "packed": "weight_packed", "scaled": "weight"}
_WORDS = (torch.int32,)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e8m0fnu)
_ZEROS = (*_INTEGERS, *_FLOATS, torch.float8_e4m3fn)
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
        if part != "weight" or mark not in self._source.files:
            return None
        match self._stored.layout:
            case "awq" | "gptq":
                return self._integers(layer)
            case "packed":
                return self._packed(layer)
            case "scaled":
                is_plain = self._source.stored_dtype(mark) not in ("I8", "F8_E4M3")
                return None if is_plain else self._bytes(layer)

    def _integers(self, layer: str) -> Scaled:
        words = self._part(layer, "qweight", _WORDS)
        zeros = self._part(layer, "qzeros", _WORDS)
        scales = self._part(layer, "scales", _FLOATS)
        self._check(layer, "scales", scales, (None, None))
        num_groups, num_outputs = scales.shape
        if self._stored.layout == "awq":
            self._check(layer, "qweight", words, (None, num_outputs / 8))
            self._check(layer, "qzeros", zeros, (num_groups, num_outputs / 8))
            self._check_groups(layer, "scales", words.shape[0], num_groups)
            return awq(words, zeros, scales)
        self._check(layer, "qweight", words, (None, num_outputs))
        self._check(layer, "qzeros", zeros, (num_groups, None))
        bits, rest = divmod(zeros.shape[1] * 32, num_outputs)
        if rest or bits not in (2, 3, 4, 8) or words.shape[0] * 32 % bits:
            what = f"tells of {zeros.shape[1] * 32 / num_outputs:g} bits, which cannot be read"
            raise self._error(layer, "qzeros", what)
        num_inputs = words.shape[0] * 32 // bits
        groups = self._groups(layer, "g_idx", num_inputs, num_groups)
        return gptq(words, zeros, scales, groups, self._stored.zero_offset)

    def _packed(self, layer: str) -> Scaled:
        sizes = self._part(layer, "weight_shape", _INTEGERS)
        self._check(layer, "weight_shape", sizes, (2,))
        num_outputs, num_inputs = sizes.tolist()
        words = self._part(layer, "weight_packed", _WORDS)
        self._check(layer, "weight_packed", words, (num_outputs, None))
        widths = {-(-num_inputs * bits // 32): bits for bits in (2, 4, 8)}
        bits = widths.get(words.shape[1])
        if bits is None or num_inputs < 1:
            what = f"does not hold {num_inputs} inputs a row, as weight_shape says"
            raise self._error(layer, "weight_packed", what)
        scales = self._scales(layer, "weight_scale", num_outputs)
        groups = self._groups(layer, "weight_g_idx", num_inputs, scales.shape[1])
        zeros = self._zeros(layer)
        if zeros is not None:
            is_packed = zeros.dtype == torch.int32
            height = -(-len(scales) * bits // 32) if is_packed else len(scales)
            self._check(layer, "weight_zero_point", zeros, (height, scales.shape[1]))
        return packed(words, scales, zeros, groups, num_inputs)

    def _bytes(self, layer: str) -> Scaled:
        values = self._part(layer, "weight", (torch.int8, torch.float8_e4m3fn))
        self._check(layer, "weight", values, (None, None))
        name = next((s for s in _SCALES if f"{layer}.{s}" in self._source.files), None)
        block = self._stored.block
        if name is None:
            name = _SCALES[0 if block is None else 1]
            raise ModelError(
                f"{self.files[f'{layer}.weight']}: tensor {layer}.weight is quantised, but there "
                f"is no {layer}.{name}; fetch the model again"
            )
        zeros = self._zeros(layer)
        if block is None:
            scales = self._scales(layer, name, values.shape[0])
            self._check_groups(layer, name, values.shape[1], scales.shape[1])
            if zeros is not None:
                self._check(layer, "weight_zero_point", zeros, tuple(scales.shape))
                zeros = zeros.float()
            return Scaled(values=values, scales=scales, zeros=zeros)
        if zeros is not None and zeros.float().any():
            raise self._error(layer, "weight_zero_point", "goes with no block of weights")
        scales = self._part(layer, name, _FLOATS)
        blocks = [-(-size // part) for size, part in zip(values.shape, block, strict=True)]
        self._check(layer, name, scales, tuple(blocks))
        of_rows = scales.repeat_interleave(block[0], 0)[: values.shape[0]]
        groups = torch.arange(values.shape[1]) // block[1]
        return Scaled(values=values, scales=of_rows, groups=groups)

    def _scales(self, layer: str, name: str, num_outputs: int) -> torch.Tensor:
        """[N, G] or [1, 1]."""
        scales = self._part(layer, name, _FLOATS)
        scales = scales.reshape(-1, 1) if scales.ndim < 2 else scales
        if tuple(scales.shape) != (1, 1):
            self._check(layer, name, scales, (num_outputs, None))
        return scales

    def _zeros(self, layer: str) -> torch.Tensor | None:
        """[N, G] or [1, 1], the first packed in words of int32; None where there are none."""
        if f"{layer}.weight_zero_point" not in self._source.files:
            return None
        zeros = self._part(layer, "weight_zero_point", _ZEROS)
        return zeros.reshape(-1, 1) if zeros.ndim < 2 else zeros

    def _groups(
        self, layer: str, part: str, num_inputs: int, num_groups: int
    ) -> torch.Tensor | None:
        """int64[K], None where inputs stand in the order of their groups."""
        if f"{layer}.{part}" not in self._source.files:
            self._check_groups(layer, "scales", num_inputs, num_groups)
            return None
        groups = self._part(layer, part, _INTEGERS).long()
        self._check(layer, part, groups, (num_inputs,))
        if (groups < 0).all():  # never set
            self._check_groups(layer, "scales", num_inputs, num_groups)
            return None
        if groups.min() < 0 or groups.max() >= num_groups:
            raise self._error(layer, part, f"names groups beyond {num_groups}")
        if num_inputs % num_groups:
            return groups
        in_order = torch.arange(num_inputs) // (num_inputs // num_groups)
        return None if torch.equal(groups, in_order) else groups

    def _check_groups(self, layer: str, part: str, num_inputs: int, num_groups: int) -> None:
        """Groups of one size, where nothing says of each input which is its own."""
        if num_inputs % num_groups:
            what = f"has scales for {num_groups} groups, which do not divide {num_inputs} inputs"
            raise self._error(layer, part, what)

    def _part(self, layer: str, part: str, dtypes: Collection[torch.dtype]) -> torch.Tensor:
        name = f"{layer}.{part}"
        if name not in self._source.files:
            raise ModelError(
                f"{self.files[f'{layer}.weight']}: there is no tensor {name} beside "
                f"{layer}.{self._mark}; fetch the model again"
            )
        tensor = self._source.read_stored(name)
        if tensor.dtype not in dtypes:
            held = str(tensor.dtype).removeprefix("torch.")
            raise self._error(layer, part, f"is stored as {held}, which cannot be read")
        return tensor

    def _check(
        self, layer: str, part: str, tensor: torch.Tensor, shape: tuple[float | None, ...]
    ) -> None:
        """``shape``: None for any size but 0."""
        sizes = zip(tensor.shape, shape, strict=False)
        if tensor.ndim != len(shape) or any(s == 0 or w not in (None, s) for s, w in sizes):
            wanted = ", ".join("any" if size is None else f"{size:g}" for size in shape)
            what = f"has shape {list(tensor.shape)}, but [{wanted}] goes with the others"
            raise self._error(layer, part, what)

    def _error(self, layer: str, part: str, what: str) -> ModelError:
        path = self.files[f"{layer}.weight"]
        return ModelError(f"{path}: tensor {layer}.{part} {what}; fetch the model again")
