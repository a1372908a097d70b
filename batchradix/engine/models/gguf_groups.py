"""Tensors of a GGUF file as `Groups`: the codes and scales of ggml's quantisations, still apart.

A row is blocks of 32 or 256 inputs; a block begins or ends with its scale, a float16. In the
k-quants 16 or 32 inputs have a factor of their own. The layouts are those of ggml's ``block_q*``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from batchradix_kernels.grouped_linear import Groups

_Bytes = NDArray[np.uint8]
_Parts = dict[str, NDArray[np.generic]]


def read_groups(data: _Bytes, kind: str) -> Groups | None:
    """``data``: uint8[N, bytes of a row] in the quantisation of that name; None for one whose
    numbers are no codes times scales, and for floats."""
    found = _KINDS.get(kind)
    if found is None:
        return None
    num_bytes, bits, offset, split = found
    blocks = np.ascontiguousarray(data).reshape(-1, num_bytes)
    parts = {
        name: torch.from_numpy(np.ascontiguousarray(values)).reshape(len(data), -1)
        for name, values in split(blocks).items()
    }
    return Groups(bits=bits, offset=offset, **parts)


def _float16(blocks: _Bytes, at: int) -> NDArray[np.float16]:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)


def _nibbles(codes: _Bytes) -> NDArray[np.int8]:
    """[B, n] to [B, 2, n]: the lower halves first."""
    return np.stack([codes & 15, codes >> 4], axis=1).view(np.int8)


def _top_bits(words: _Bytes) -> NDArray[np.int8]:
    """[B, 4] bytes to a bit for each of 32 inputs, as 0 or 16."""
    return np.unpackbits(words, axis=1, bitorder="little").view(np.int8) << 4


def _q4_0(blocks: _Bytes) -> _Parts:
    return {"scales": _float16(blocks, 0), "codes": _nibbles(blocks[:, 2:])}


def _q4_1(blocks: _Bytes) -> _Parts:
    # What is added there is taken off here.
    parts = {"scales": _float16(blocks, 0), "minima": -_float16(blocks, 2)}
    return {**parts, "codes": _nibbles(blocks[:, 4:])}


def _q5_0(blocks: _Bytes) -> _Parts:
    codes = _nibbles(blocks[:, 6:]).reshape(-1, 32) | _top_bits(blocks[:, 2:6])
    return {"scales": _float16(blocks, 0), "codes": codes}


def _q5_1(blocks: _Bytes) -> _Parts:
    codes = _nibbles(blocks[:, 8:]).reshape(-1, 32) | _top_bits(blocks[:, 4:8])
    return {"scales": _float16(blocks, 0), "minima": -_float16(blocks, 2), "codes": codes}


def _q8_0(blocks: _Bytes) -> _Parts:
    return {"scales": _float16(blocks, 0), "codes": blocks[:, 2:].view(np.int8)}


def _factors(packed: _Bytes) -> _Parts:
    """Eight factors of scales and of minima, of six bits each, in 12 bytes."""
    low, low_minima, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    factors = np.concatenate([low & 63, high & 15 | low >> 2 & 48], axis=1)
    minima = np.concatenate([low_minima & 63, high >> 4 | low_minima >> 2 & 48], axis=1)
    return {"factors": factors.view(np.int8), "minimum_factors": minima.view(np.int8)}


def _q4_k(blocks: _Bytes) -> _Parts:
    codes = _nibbles(blocks[:, 16:].reshape(-1, 32))  # 32 bytes hold two groups
    scales = {"scales": _float16(blocks, 0), "minima": _float16(blocks, 2)}
    return {**scales, **_factors(blocks[:, 4:16]), "codes": codes}


def _q5_k(blocks: _Bytes) -> _Parts:
    low = _nibbles(blocks[:, 48:].reshape(-1, 32)).reshape(-1, 8, 32)
    high = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little").transpose(0, 2, 1)
    scales = {"scales": _float16(blocks, 0), "minima": _float16(blocks, 2)}
    return {**scales, **_factors(blocks[:, 4:16]), "codes": low | high.view(np.int8) << 4}


def _q6_k(blocks: _Bytes) -> _Parts:
    low = _nibbles(blocks[:, :128].reshape(-1, 64)).reshape(-1, 8, 32)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8)
    high = (pairs & 3).view(np.int8).reshape(-1, 8, 32) << 4
    return {
        "scales": _float16(blocks, 208),
        "factors": blocks[:, 192:208].view(np.int8),
        "codes": (low | high) - np.int8(32),
    }


# Bytes of a block, bits of a code here, what is taken off a code.
_KINDS: Mapping[str, tuple[int, int, int, Callable[[_Bytes], _Parts]]] = {
    "Q4_0": (18, 4, 8, _q4_0),
    "Q4_1": (20, 4, 0, _q4_1),
    "Q5_0": (22, 8, 16, _q5_0),
    "Q5_1": (24, 8, 0, _q5_1),
    "Q8_0": (34, 8, 0, _q8_0),
    "Q4_K": (144, 4, 0, _q4_k),
    "Q5_K": (176, 8, 0, _q5_k),
    "Q6_K": (210, 8, 0, _q6_k),
}
