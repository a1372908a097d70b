"""A model's architecture as numbers, the same for safetensors folders and GGUF files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, half-split pairs) and its scaling.

    ``linear`` divides positions by ``factor``. ``llama3`` stretches the low frequencies by
    ``factor`` and blends between ``low_freq_factor`` and ``high_freq_factor`` wavelengths of
    ``original_context_length`` (Llama 3.1).
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What a decoder of the Llama kind needs to be built; sizes in elements.

    ``vocab_size`` is the rows of the output layer, which may exceed the tokenizer's.
    """

    architecture: Literal[
        "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
    ]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    attention_bias: bool = False  # on q, k, v
    output_bias: bool = False  # on o
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim of q and k before rope (Qwen3)
    sliding_window: int | None = None  # None also where the window exceeds context_length

    @property
    def num_kv_elements_per_token(self) -> int:
        """Elements of keys and values that one token takes over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Weights in elements, biases and norms left out."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        heads = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * layer + heads
