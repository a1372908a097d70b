"""The experts of a layer in bfloat16 for CPUs that multiply it (Shazeer et al. 2017).

Every token goes through some of many small feed-forward layers with SwiGLU (Shazeer 2020), and gets
the weighted sum of what they give. Rows are grouped by expert, so that each weight is read once for
all its rows. A token's result depends on the token alone, to the last bit: products are those of
`bf16_linear`, and its sum is taken in float32 in the order in which its experts are named.

Legend: T tokens, D hidden, N experts, k experts a token, F width of an expert.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np
import torch

from batchradix_kernels.bf16_linear import Bf16Weight
from batchradix_kernels.bf16_linear import serves as serves_linear
from batchradix_kernels.experts.reference import experts_reference
from batchradix_kernels.native import function

__all__ = ["Bf16Experts", "experts_reference"]

_native = function("bx_bf16_experts", (ctypes.c_void_p,))


class _Experts(ctypes.Structure):
    """``struct experts`` of cpu.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "tokens", "offsets", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("places", "weights", "rows", "gated", "outputs")),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_chosen", "num_experts")),
        *((name, ctypes.c_int64) for name in ("width", "expert_width", "num_threads")),
    )


class Bf16Experts:
    """The weights of a layer's experts, packed. ``weights``: of each expert its gates before what
    they gate, bfloat16[2F, D], and bfloat16[D, F], read one after the other and not kept."""

    def __init__(self, weights: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._gate_up: list[Bf16Weight] = []
        self._down: list[Bf16Weight] = []
        for gate_up, down in weights:
            self._gate_up.append(Bf16Weight(gate_up, gated=True))
            self._down.append(Bf16Weight(down))
        self.width = self._down[0].out_size
        self.expert_width = self._down[0].in_size
        self._pointers = [
            np.array([weight.packed.data_ptr() for weight in side], dtype=np.uintp)
            for side in (self._gate_up, self._down)
        ]

    @staticmethod
    def serves(width: int, expert_width: int) -> bool:
        """Whether there is a kernel for such experts on this CPU."""
        return (
            _native is not None
            and serves_linear(width, 2 * expert_width, gated=True)
            and serves_linear(expert_width, width)
        )

    def __call__(
        self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """bfloat16[T, D] to bfloat16[T, D]; ``expert_ids``: int64[T, k], ``weights``:
        float32[T, k]."""
        assert _native is not None
        assert x.dtype == torch.bfloat16
        assert weights.dtype == torch.float32
        num_experts, (num_tokens, num_chosen) = len(self._down), expert_ids.shape
        ids = expert_ids.numpy().ravel()
        order = np.argsort(ids, kind="stable")
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        offsets = np.zeros(num_experts + 1, dtype=np.int64)
        np.cumsum(np.bincount(ids, minlength=num_experts), out=offsets[1:])
        assert len(offsets) == num_experts + 1, "an expert is named that is not there"
        tokens = order // num_chosen
        x, weights = x.contiguous(), weights.contiguous()
        out = torch.empty((num_tokens, self.width), dtype=torch.bfloat16)
        rows = torch.empty((len(order), self.width), dtype=torch.bfloat16)
        gated = torch.empty((len(order), self.expert_width), dtype=torch.bfloat16)
        outputs = torch.empty((len(order), self.width), dtype=torch.float32)
        arrays = (tokens, offsets, *self._pointers, places)
        call = _Experts(
            x.data_ptr(),
            *(array.ctypes.data for array in arrays),
            *(tensor.data_ptr() for tensor in (weights, rows, gated, outputs, out)),
            *(num_tokens, num_chosen, num_experts, self.width, self.expert_width),
            torch.get_num_threads(),
        )
        _native(ctypes.addressof(call))
        return out
