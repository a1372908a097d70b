"""Reads a model's tensors one by one into the layers that keep them.

Each tensor is read, converted to the run's dtype, put where it belongs and dropped before the
next, so that loading needs one layer's memory beside what the model keeps; on the way to a GPU it
is `staging` that it goes through. Names are those of Hugging Face checkpoints; the GGUF reader maps
them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch

from batchradix.checkpoint.checkpoint import Checkpoint
from batchradix.checkpoint.model_config import ModelConfig
from batchradix.config import Quantize
from batchradix.engine.layers.gated import GatedLinear, OneStep, TwoSteps
from batchradix.engine.layers.linear import (
    Bf16Linear,
    GroupedLinear,
    Int8Linear,
    Linear,
    make_linear,
)
from batchradix.engine.models.gguf_source import GgufSource
from batchradix.engine.models.lora_source import LoraSource
from batchradix.engine.models.packed_source import PackedSource
from batchradix.engine.models.rope_order import HalvedRope, PartialRope
from batchradix.engine.models.safetensors_source import SafetensorsSource
from batchradix.engine.models.source import TensorSource, groups_of
from batchradix.engine.models.split_source import SplitSource
from batchradix.engine.models.stacked_experts import StackedExperts
from batchradix.engine.models.staging import Staging
from batchradix.engine.models.text_source import TextSource
from batchradix.errors import ModelError
from batchradix_kernels.grouped_linear import Groups, serves
from batchradix_kernels.swiglu import SILU, Gating

# What files carry beside the weights: tables that are computed anew.
_DERIVED = re.compile(r"(^|\.)rotary_emb\.inv_freq$|^rope_(freqs|factors_\w+)\.weight$")


def open_source(checkpoint: Checkpoint) -> TensorSource:
    """Raises `ModelError` when a file is missing or damaged, or an adapter is another model's."""
    config = checkpoint.config
    source: TensorSource
    if checkpoint.format == "gguf":
        source = GgufSource(checkpoint.weight_files, config)
    else:
        source = files = SafetensorsSource(checkpoint.weight_files)
        if config.stored is not None:
            source = PackedSource(files, config.stored)
        elif config.moe is not None and config.moe.stacked_files:
            source = StackedExperts(files, config)
    if config.text_part:
        source = TextSource(source)
    if checkpoint.adapter is not None:
        source = LoraSource(source, checkpoint.adapter, config)
    if config.fused_files:
        source = SplitSource(source, config)
    if config.mla is not None and config.mla.rope_interleaved:
        source = HalvedRope(source, config)
    if config.rope.rotated_dim is not None:
        source = PartialRope(source, config)
    return source


class Weights:
    """Hands out each tensor once, checked for shape, in one dtype on one device; the weights
    of linear layers quantised, or kept as the file holds them.

    ``staging`` takes tensors to the device, unless it is given one of its own for any but the CPU.
    """

    def __init__(
        self,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        *,
        quantize: Quantize = "off",
        batch_invariant: bool = False,
        staging: Staging | None = None,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.batch_invariant = batch_invariant
        self._quantize = quantize
        self._source = source
        if staging is None and device.type != "cpu":
            staging = Staging(device)
        self._staging = staging
        self._taken: set[str] = set()
        self.num_kept = 0  # weights that stay as the file holds them

    @property
    def is_quantised(self) -> bool:
        """Whether linear layers are in 8 bits."""
        return self._quantize == "int8"

    @property
    def keeps(self) -> bool:
        """Whether weights that are held in few bits stay so, where a kernel serves."""
        return self._quantize == "keep"

    def take(
        self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """In the run's dtype unless another is given. Raises `ModelError` naming tensor and file
        when it is missing or has another shape."""
        return self.take_stacked([name], [shape], dtype)

    def norm(self, name: str, size: int, config: ModelConfig) -> torch.Tensor:
        """The weight [size] of a norm, as ``config.norm_offset`` says."""
        if config.norm_offset is None:
            return self.take(name, (size,))
        return self.take(name, (size,), torch.float32).add_(config.norm_offset)

    def read_rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        """Rows of a matrix that was taken before, read from its file once more."""
        return self._source.read_rows(name, rows).to(self.dtype).to(self.device)

    def take_stacked(
        self,
        names: Sequence[str],
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Several tensors, one after the other along their first dimension."""
        size = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        stacked = torch.empty(size, dtype=dtype or self.dtype, device=self.device)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            self.fill(name, stacked[start : start + shape[0]])
            start += shape[0]
        return stacked

    def empty(self, *size: int) -> torch.Tensor:
        """In the run's dtype, on its device, to be filled."""
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def fill(self, name: str, target: torch.Tensor) -> None:
        """Copies a tensor into ``target``, whose shape it must have."""
        tensor = self._read(name, tuple(target.shape))
        if self._staging is None:
            target.copy_(tensor)
        else:
            self._staging.copy(tensor, target)

    def linear(
        self,
        names: Sequence[str],
        out_sizes: Sequence[int],
        in_size: int,
        *,
        bias: bool | Sequence[bool],
    ) -> Linear:
        """One layer [T, in_size] → [T, sum(out_sizes)] from layers side by side; ``bias`` says
        which of them have one."""
        groups = self._groups(names, out_sizes, in_size)
        if groups is not None:
            return GroupedLinear(groups, self._biases(names, out_sizes, bias=bias))
        weight, biases = self._side_by_side(names, out_sizes, in_size, bias=bias)
        if self.is_quantised:
            return Int8Linear(weight, biases, self.dtype)
        return make_linear(weight, biases, batch_invariant=self.batch_invariant)

    def kept_head(self, name: str, vocab_size: int, in_size: int) -> Linear | None:
        """The output layer as the file holds it, with results in float32; None where it is not
        kept."""
        groups = self._groups([name], [vocab_size], in_size)
        return None if groups is None else GroupedLinear(groups, dtype=torch.float32)

    def gated_linear(
        self,
        names: Sequence[str],
        out_size: int,
        in_size: int,
        *,
        bias: bool,
        gating: Gating = SILU,
    ) -> GatedLinear:
        """The layers of the gates and of what they gate, in this order; SwiGLU unless ``gating``
        says otherwise."""
        sizes, is_swiglu = [out_size, out_size], gating == SILU
        groups = self._groups(names, sizes, in_size, gated=is_swiglu)
        if groups is not None:
            biases = self._biases(names, sizes, bias=bias)
            kept = GroupedLinear(groups, biases, gated=is_swiglu)
            return OneStep(kept) if is_swiglu else TwoSteps(kept, gating)
        weight, biases = self._side_by_side(names, sizes, in_size, bias=bias)
        if self.is_quantised:
            return TwoSteps(Int8Linear(weight, biases, self.dtype), gating)
        if is_swiglu and Bf16Linear.serves(weight, gated=True):
            return OneStep(Bf16Linear(weight, biases, gated=True))
        return TwoSteps(make_linear(weight, biases, batch_invariant=self.batch_invariant), gating)

    def _side_by_side(
        self,
        names: Sequence[str],
        out_sizes: Sequence[int],
        in_size: int,
        *,
        bias: bool | Sequence[bool],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight [sum(out_sizes), in_size], in float32 where it is to be quantised, and bias."""
        weight = self.take_stacked(
            [f"{name}.weight" for name in names],
            [(size, in_size) for size in out_sizes],
            torch.float32 if self.is_quantised else None,
        )
        return weight, self._biases(names, out_sizes, bias=bias)

    def _biases(
        self, names: Sequence[str], out_sizes: Sequence[int], *, bias: bool | Sequence[bool]
    ) -> torch.Tensor | None:
        has_bias = [bias] * len(names) if isinstance(bias, bool) else bias
        if not any(has_bias):
            return None
        biases = torch.zeros(sum(out_sizes), dtype=self.dtype, device=self.device)
        for name, part, has in zip(
            names, torch.split(biases, list(out_sizes)), has_bias, strict=True
        ):
            if has:
                self.fill(f"{name}.bias", part)
        return biases

    def _groups(
        self,
        names: Sequence[str],
        out_sizes: Sequence[int],
        in_size: int,
        *,
        gated: bool = False,
    ) -> list[Groups] | None:
        """The weights of layers side by side, where all of them are kept as they are held."""
        source = self._source
        is_bf16 = self.device.type == "cpu" and self.dtype == torch.bfloat16
        if not (self.keeps and is_bf16):
            return None
        found = []
        for name, size in zip(names, out_sizes, strict=True):
            path = f"{name}.weight"
            groups = groups_of(source, path) if path in source.files else None
            if groups is None or groups.shape != (size, in_size):
                return None  # whoever reads it will say what is wrong
            found.append(groups)
        if not serves(found, gated=gated):
            return None
        self._taken.update(f"{name}.weight" for name in names)
        self.num_kept += len(names)
        return found

    def finish(self, *, unused: Iterable[str] = ()) -> None:
        """Waits for what is on its way to the device; nothing may be taken afterwards.

        Raises `ModelError` when the checkpoint holds a tensor that no layer took; ``unused`` are
        beginnings of the names of tensors that may be there without being needed.
        """
        if self._staging is not None:
            self._staging.finish()
            self._staging = None
        left = set(self._source.files) - self._taken
        allowed = tuple(unused)
        unexpected = sorted(
            name for name in left if not name.startswith(allowed) and not _DERIVED.search(name)
        )
        if unexpected:
            file = self._source.files[unexpected[0]]
            more = f" (and {len(unexpected) - 1} more)" if len(unexpected) > 1 else ""
            raise ModelError(
                f"{file} holds the tensor {unexpected[0]}{more}, which this architecture does "
                f"not use; its config does not describe these weights"
            )

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        files = self._source.files
        if name not in files:
            among = ", ".join(sorted({path.name for path in files.values()})) or "no file"
            raise ModelError(
                f"the model has no tensor {name} (looked in {among}); fetch it again or use "
                f"another copy"
            )
        tensor = self._source.read(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{files[name]}: tensor {name} has shape {list(tensor.shape)}, but the config "
                f"asks for {list(shape)}"
            )
        self._taken.add(name)
        return tensor


def weights_of(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Weights:
    return Weights(open_source(checkpoint), dtype, device)
