"""All layers of a decoder on the CPU in one call (pre-norm, grouped queries, SwiGLU).

It runs the operations of this library one after the other, in the order of the layers, so its
results are those of the operations called one by one. What it saves is what lies between them:
threads are woken once a step, and neither Python nor an allocator is in the way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from batchradix_kernels.bf16_linear import Bf16Weight
from batchradix_kernels.grouped_linear import PANEL, GroupedWeight
from batchradix_kernels.int8_linear import Int8Weight
from batchradix_kernels.native import FLOATS, KINDS, library
from batchradix_kernels.tree_attention.cpu import CpuTreePlan, PairedPool

__all__ = ["CpuDecoder", "DecoderLayer"]

Weight = Bf16Weight | GroupedWeight | Int8Weight


class _Linear(ctypes.Structure):
    """``struct linear`` of cpu.c."""

    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("groups", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("in_size", ctypes.c_int64),
        ("out_size", ctypes.c_int64),
    )


class _Layer(ctypes.Structure):
    """``struct decoder_layer``."""

    _fields_ = (
        ("input_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("qkv", _Linear),
        ("o", _Linear),
        ("gate_up", _Linear),
        ("down", _Linear),
        ("sinks", ctypes.c_void_p),
    )


class _Decoder(ctypes.Structure):
    """``struct decoder``."""

    _fields_ = (
        ("layers", ctypes.c_void_p),
        ("num_layers", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("epsilon", ctypes.c_float),
        ("kind", ctypes.c_int32),
    )


class _Step(ctypes.Structure):
    """``struct decoder_step``."""

    _fields_ = (
        ("plans", ctypes.c_void_p),
        ("pool", ctypes.c_void_p),
        ("side_bytes", ctypes.c_int64),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("left", ctypes.c_void_p),
        ("qkv", ctypes.c_void_p),
        ("attended", ctypes.c_void_p),
        ("gate_up", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("panels", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """The weights of a layer; norms are of the activations' dtype.

    ``head_norms``: weights [E] of query and of key heads. ``qkv`` gives query, key and value
    heads side by side; ``gate_up`` is gated unless it is int8: gates and then what they gate.
    ``biases``: of `qkv`, `o`, `gate_up` and `down` where those are int8. ``sinks``: float32[H],
    as in `CpuTreeAttention.run`.
    """

    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    qkv: Weight
    o: Weight
    gate_up: Weight
    down: Weight
    biases: tuple[torch.Tensor | None, ...] = (None, None, None, None)
    sinks: torch.Tensor | None = None

    @property
    def weights(self) -> tuple[Weight, Weight, Weight, Weight]:
        return self.qkv, self.o, self.gate_up, self.down

    def is_served(self, dtype: torch.dtype) -> bool:
        """Whether `CpuDecoder` computes it with activations of ``dtype``."""
        if dtype not in FLOATS or not self.input_norm.is_cpu:
            return False
        if not isinstance(self.gate_up, Int8Weight) and not self.gate_up.is_gated:
            return False
        return all(
            weight.is_packed if isinstance(weight, Int8Weight) else dtype == torch.bfloat16
            for weight in self.weights
        )


class CpuDecoder:
    """``layers`` in order, each of which `is_served`.

    ``epsilon`` is that of all norms, ``dtype`` (bfloat16 or float32) that of activations. One
    object must not run in two threads at once: they would share its scratch.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        epsilon: float,
        dtype: torch.dtype,
    ) -> None:
        assert all(layer.is_served(dtype) for layer in layers)
        loaded = library()
        assert loaded is not None
        self._library = loaded
        self._layers = tuple(layers)  # what the pointers below are to
        self._table = (_Layer * len(layers))(*map(_describe, layers))
        self._decoder = _Decoder(
            layers=ctypes.addressof(self._table),
            num_layers=len(layers),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            epsilon=epsilon,
            kind=KINDS[dtype],
        )
        self._dtype = dtype
        self._width = num_heads * head_dim
        self._scratch: dict[str, torch.Tensor] = {}
        self._num_rows = self._num_threads = 0

    def run(
        self,
        x: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        plans: Sequence[CpuTreePlan],
        pool: PairedPool,
    ) -> torch.Tensor:
        """``x``: contiguous [T, D] of the model's dtype, changed in place; returns it.

        ``cosines``, ``sines``: contiguous float32[T, E / 2]. ``plans``: of each layer, over the
        same slots, where keys and values are written to in the pool.
        """
        assert x.is_contiguous()
        assert x.dtype == pool.storage.dtype == self._dtype
        assert cosines.is_contiguous()
        assert sines.is_contiguous()
        num_tokens = x.shape[0]
        assert len(plans) == len(self._layers)
        assert all(plan.argument.num_tokens == num_tokens for plan in plans)
        addresses = [ctypes.addressof(plan.argument) for plan in plans]
        plan_table = (ctypes.c_void_p * len(plans))(*addresses)
        scratch = self._make_scratch(num_tokens, plans[0].argument.num_threads)
        side = pool.storage[0, 0]
        step = _Step(
            plans=ctypes.addressof(plan_table),
            pool=pool.storage.data_ptr(),
            side_bytes=side.numel() * side.element_size(),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            x=x.data_ptr(),
            **{name: memory.data_ptr() for name, memory in scratch.items()},
        )
        self._library.bx_decode(ctypes.byref(self._decoder), ctypes.byref(step))
        return x.add_(scratch["left"][: x.numel()].view(x.shape))

    def _make_scratch(self, num_rows: int, num_threads: int) -> dict[str, torch.Tensor]:
        if num_rows > self._num_rows or num_threads > self._num_threads:
            self._scratch, self._num_rows = {}, 0  # where there is no memory for more, none is left
            first = self._layers[0]
            widths = {
                "left": first.down.out_size,
                "qkv": first.qkv.out_size,
                "attended": self._width,
                "gate_up": first.gate_up.out_size,
                "rows": max(weight.in_size for weight in first.weights),
            }
            scratch = {
                name: torch.empty(num_rows * width, dtype=self._dtype)
                for name, width in widths.items()
            }
            scratch["scales"] = torch.empty(num_rows)
            scratch["panels"] = self._make_panels(num_threads)
            self._scratch, self._num_rows = scratch, num_rows
            self._num_threads = num_threads
        return self._scratch

    def _make_panels(self, num_threads: int) -> torch.Tensor:
        """Where grouped weights are widened, a panel a thread."""
        sizes = [
            weight.in_size
            for layer in self._layers
            for weight in layer.weights
            if isinstance(weight, GroupedWeight)
        ]
        return torch.empty(num_threads * PANEL * max(sizes, default=0), dtype=torch.bfloat16)


def _describe_linear(weight: Weight, bias: torch.Tensor | None) -> _Linear:
    linear = _Linear(in_size=weight.in_size, out_size=weight.out_size)
    if isinstance(weight, Int8Weight):
        linear.packed, linear.scales = weight.values.data_ptr(), weight.scales.data_ptr()
        linear.bias = _address(bias)
        return linear
    if isinstance(weight, GroupedWeight):
        linear.groups = ctypes.addressof(weight.blocks)
    else:
        linear.packed = weight.packed.data_ptr()
    linear.bias = _address(weight.bias)
    return linear


def _describe(layer: DecoderLayer) -> _Layer:
    linears = [
        _describe_linear(weight, bias)
        for weight, bias in zip(layer.weights, layer.biases, strict=True)
    ]
    q_norm, k_norm = layer.head_norms or (None, None)
    return _Layer(
        layer.input_norm.data_ptr(),
        layer.mlp_norm.data_ptr(),
        _address(q_norm),
        _address(k_norm),
        *linears,
        _address(layer.sinks),
    )


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
