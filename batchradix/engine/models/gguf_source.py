"""Tensors of a GGUF file under their Hugging Face names, dequantised one by one.

The reader and the dequantisation are the gguf package's. Files of the llama architecture hold
the rows of q and k with the two halves of each head interleaved (what llama.cpp rotates by
adjacent pairs); they are put back half beside half.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from batchradix.checkpoint.model_config import ModelConfig
from batchradix.engine.models.gguf_groups import read_groups
from batchradix.errors import ModelError
from batchradix_kernels.grouped_linear import Groups

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS_OF_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OTHERWISE: Mapping[str, Mapping[str, str]] = {
    "Gemma2ForCausalLM": _NORMS_OF_GEMMA,
    "Gemma3ForCausalLM": _NORMS_OF_GEMMA,
    "Phi3ForCausalLM": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GgufSource:
    """Implements `TensorSource`. Raises `ModelError` for a file that is no GGUF file."""

    def __init__(self, paths: Sequence[Path], config: ModelConfig) -> None:
        from gguf import GGUFReader

        self.files: dict[str, Path] = {}
        self._tensors: dict[str, Any] = {}
        self._interleaved_heads = (
            {".self_attn.q_proj.": config.num_heads, ".self_attn.k_proj.": config.num_kv_heads}
            if config.architecture in ("LlamaForCausalLM", "MistralForCausalLM")
            else {}
        )
        for path in paths:
            try:
                reader = GGUFReader(path)
            except (OSError, ValueError, KeyError, IndexError) as error:
                raise ModelError(f"{path} cannot be read as GGUF: {error}") from error
            for tensor in reader.tensors:
                name = hugging_face_name(tensor.name, config.architecture)
                self.files[name] = path
                self._tensors[name] = tensor

    def read(self, name: str) -> torch.Tensor:
        tensor = self._dequantised(name, self._tensors[name].data)
        order = self._order(name, tensor.shape[0])
        return tensor if order is None else tensor[order]

    def read_groups(self, name: str) -> Groups | None:
        """The matrix as it is held; None for floats and what is held otherwise."""
        stored = self._tensors[name]
        groups = read_groups(stored.data, stored.tensor_type.name)
        order = None if groups is None else self._order(name, groups.shape[0])
        return groups if groups is None or order is None else groups.take_rows(order)

    def read_rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        """Not for q and k, whose rows stand in another order in the file."""
        return self._dequantised(name, self._tensors[name].data[list(rows)])

    def _order(self, name: str, num_rows: int) -> torch.Tensor | None:
        """int64[num_rows], where rows stand half beside half; None where they do in the file."""
        for part, num_heads in self._interleaved_heads.items():
            if part in name and num_rows % (2 * num_heads) == 0:
                return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).reshape(-1)
        return None

    def _dequantised(self, name: str, data: NDArray[Any]) -> torch.Tensor:
        from gguf import dequantize

        stored = self._tensors[name]
        try:
            values: NDArray[np.float32] = dequantize(data, stored.tensor_type)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.files[name]}: tensor {stored.name} is quantised as "
                f"{stored.tensor_type.name}, which cannot be read; use another quantisation"
            ) from error
        return torch.from_numpy(values if values.flags.writeable else values.copy())


def hugging_face_name(name: str, architecture: str = "LlamaForCausalLM") -> str:
    """A GGUF tensor's name in Hugging Face's spelling; unknown names stay as they are."""
    names = {**_IN_LAYER, **_OTHERWISE.get(architecture, {})}
    match = _LAYER_NAME.fullmatch(name)
    if match and match[2] in names:
        return f"model.layers.{match[1]}.{names[match[2]]}.{match[3]}"
    return _OUTSIDE.get(name, name)
