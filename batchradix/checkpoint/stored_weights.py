"""How a checkpoint's files hold the matrices of linear layers that are no plain floats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Layout = Literal["awq", "gptq", "packed", "scaled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """What `hf_quantisation` makes of a ``quantization_config``; layers that were left as they are
    stand beside the others as plain floats, so no list of them is needed.

    ``awq``: 4 bits along the outputs, in AutoAWQ's gemm layout (``qweight, qzeros, scales``).
    ``gptq``: 2, 3, 4 or 8 bits along the inputs (and ``g_idx``); ``zero_offset`` is 1 where files
    hold zero points less one (v1), 0 where they hold them as they are (v2).
    ``packed``: compressed-tensors' ``weight_packed``, 2, 4 or 8 bits along the inputs.
    ``scaled``: matrices in FP8 or int8 with ``weight_scale`` or ``weight_scale_inv``: one, one an
    output or one a group of inputs; or, with ``block``, one a block of so many rows and columns.
    """

    layout: Layout
    zero_offset: int = 0
    block: tuple[int, int] | None = None
