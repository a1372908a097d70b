"""What a GGUF file's weights take where they stay in memory as they are held."""

from __future__ import annotations

import math
from pathlib import Path

from batchradix.checkpoint.gguf_header import read_gguf_header

_TABLE = "token_embd.weight"
# Bits of a weight by ggml's number of its type, scales included; codes of 5 and 6 bits take 8.
_BITS = {2: 4.5, 3: 5, 6: 8.5, 7: 9, 8: 8.5, 12: 4.625, 13: 8.625, 14: 8.5625}
_WIDENED_BITS = 16


def kept_bytes(path: Path) -> int:
    """Bytes of all weights, those that cannot be kept in bfloat16; embeddings are there widened
    too, to be looked up. Raises `ModelError` as `read_gguf_header` does."""
    total = 0.0
    for name, tensor in read_gguf_header(path).tensors.items():
        bits = _BITS.get(tensor.ggml_type, _WIDENED_BITS)
        if name == _TABLE:
            bits += _WIDENED_BITS
        total += math.prod(tensor.shape) * bits / 8
    return int(total)
