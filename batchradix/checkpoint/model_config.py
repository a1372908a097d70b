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
class MlaConfig:
    """Multi-head latent attention (DeepSeek-V2): what is cached of a token is one latent vector
    and one rotated key for all heads; keys and values of the heads are made from the latent.

    ``rope_interleaved``: adjacent elements are rotated as a pair, not those half a head apart.
    ``scale`` multiplies the scores.
    """

    q_lora_rank: int | None  # None: queries come from the hidden state directly
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    rope_interleaved: bool
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Layers whose feed-forward part is a mixture of experts, and how a token chooses among them.

    Scores of all experts are a softmax or sigmoids of the router's logits. Where there are groups,
    experts are taken from the ``num_groups_kept`` best groups alone; a group is as good as its
    best expert, or as the sum of its best two. ``correction_bias`` is added to the scores for the
    choice and not for the weights. Weights are divided by their sum where ``normalise``, and
    multiplied by ``scaling``.
    """

    layers: tuple[int, ...]  # numbers of the layers that have experts
    num_experts: int
    num_experts_per_token: int
    intermediate_size: int  # of one expert
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1
    num_groups_kept: int = 1
    group_score: Literal["best", "best_two"] = "best"
    correction_bias: bool = False
    normalise: bool = False
    scaling: float = 1.0
    float32_router: bool = False  # logits in float32, not in the model's dtype
    shared_intermediate_size: int = 0  # of the expert that every token takes; 0: there is none
    shared_gate: bool = False  # it is weighted by a sigmoid (Qwen2-MoE)


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
    mla: MlaConfig | None = None  # num_kv_heads and head_dim then say nothing of the cache
    moe: MoeConfig | None = None

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
