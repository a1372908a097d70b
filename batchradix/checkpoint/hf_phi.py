"""Phi-3, 3.5 and 4 in a ``config.json`` (Abdin et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchradix.checkpoint.hf_fields import Fields
from batchradix.checkpoint.hf_layers import every_layer


def phi3(fields: Fields, context_length: int) -> Mapping[str, Any]:
    return {**every_layer(fields, context_length), "fused_files": True}
