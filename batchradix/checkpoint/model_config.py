"""A model's architecture as numbers, the same for safetensors folders and GGUF files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from batchradix.checkpoint.stored_weights import StoredWeights

Architecture = Literal[
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Phi3ForCausalLM",
    "GptOssForCausalLM",
    "SmolLM3ForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "GraniteForCausalLM",
]
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, half-split pairs) and its scaling.

    ``linear`` divides positions by ``factor``. ``llama3`` stretches the low frequencies by
    ``factor`` and blends between ``low_freq_factor`` and ``high_freq_factor`` wavelengths of
    ``original_context_length`` (Llama 3.1). ``yarn`` divides the frequencies that rotate less than
    ``slow_rotations`` times within ``original_context_length`` by ``factor``, keeps those that
    rotate more than ``fast_rotations`` times, and blends between the two by dimension; rotated
    queries and keys are multiplied by ``amplitude`` (Peng et al. 2023). ``longrope`` divides each
    frequency by its own of ``divisors``, and multiplies by ``amplitude`` too; the divisors are
    those for rows within ``original_context_length``. ``dynamic`` raises theta for positions from
    ``original_context_length`` on, each by as much as a context that ends with it asks for.

    Only the first ``rotated_dim`` elements of a head are rotated, where that is not None; the
    others stay as they are, whatever the amplitude.
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3", "yarn", "longrope", "dynamic"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 0
    fast_rotations: float = 32.0
    slow_rotations: float = 1.0
    whole_dimensions: bool = True  # the blend begins and ends at whole dimensions
    amplitude: float = 1.0
    divisors: tuple[float, ...] = ()
    rotated_dim: int | None = None


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


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """Gates above ``limit`` and what they gate beyond ``±limit`` are cut to it; the result is
    ``gate · sigmoid(alpha · gate) · (gated + 1)``."""

    alpha: float
    limit: float


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
    router_bias: bool = False
    expert_bias: bool = False
    clamped: ClampedSwiglu | None = None  # in place of SwiGLU (gpt-oss)
    stacked_files: bool = False  # files hold the experts of a layer in one tensor (gpt-oss)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What a decoder of the Llama kind needs to be built; sizes in elements.

    ``vocab_size`` is the rows of the output layer, which may exceed the tokenizer's.
    """

    architecture: Architecture
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
    # of each layer, tokens that a query sees, itself included; None: all; empty: all in all layers
    layer_windows: tuple[int | None, ...] = ()
    # of each layer; None: nothing is rotated; empty: `rope` in all layers
    layer_ropes: tuple[RopeConfig | None, ...] = ()
    activation: Activation = "silu"  # of the gates
    # added to the weights of norms, which stay in float32 then (Gemma: 1, and 0 in GGUF files,
    # where it is in them); None: weights as they are, in the model's dtype
    norm_offset: float | None = None
    embedding_scale: float = 1.0  # in the model's dtype; embeddings are multiplied by it
    residual_scale: float = 1.0  # of what attention and feed-forward part add (Granite)
    logit_scale: float = 1.0
    fused_files: bool = False  # files hold q, k, v in one tensor, and gates with what they gate
    text_part: bool = False  # files hold parts that see, too
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_softcap: float | None = None  # scores become cap * tanh(score / cap) (Gemma 2)
    attention_sinks: bool = False  # a learned score a head that takes weight and gives no value
    logit_softcap: float | None = None  # the same of the output layer's logits
    mla: MlaConfig | None = None
    moe: MoeConfig | None = None
    num_prediction_layers: int = 0  # behind the others in the files; they are not used
    mxfp4: bool = False  # experts in blocks of 32 numbers of 4 bits with a scale (gpt-oss)
    stored: StoredWeights | None = None  # None: as plain floats, or a GGUF file's way

    @property
    def ropes(self) -> tuple[RopeConfig | None, ...]:
        """Of each layer; None where nothing is rotated."""
        return self.layer_ropes or (self.rope,) * self.num_layers

    @property
    def rope_dim(self) -> int:
        """Elements of a head among which pairs are rotated; see `RopeConfig.rotated_dim`."""
        return self.head_dim if self.mla is None else self.mla.rope_dim

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """Of one token and layer: heads, elements of a key, elements of a value. With latent
        attention the latent stands for the key, and the rotated key for the value."""
        if self.mla is not None:
            return 1, self.mla.kv_lora_rank, self.mla.rope_dim
        return self.num_kv_heads, self.head_dim, self.head_dim

    @property
    def num_kv_elements_per_token(self) -> int:
        """Elements of keys and values that one token takes over all layers."""
        heads, key, value = self.kv_shape
        return self.num_layers * heads * (key + value)

    @property
    def num_expanded_kv_elements_per_token(self) -> int:
        """What a token's keys and values would take if those of every head were kept."""
        if self.mla is None:
            return self.num_kv_elements_per_token
        head = self.mla.nope_dim + self.mla.rope_dim + self.mla.v_dim
        return self.num_layers * self.num_heads * head

    @property
    def num_parameters(self) -> int:
        """Weights in elements, biases and norms left out."""
        table = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        moe = self.moe
        num_dense = self.num_layers - (0 if moe is None else len(moe.layers))
        layers = self.num_layers * self._attention_parameters
        layers += num_dense * 3 * self.hidden_size * self.intermediate_size
        if moe is not None:
            width = moe.num_experts * moe.intermediate_size + moe.shared_intermediate_size
            routed = moe.num_experts + int(moe.shared_gate)
            layers += len(moe.layers) * self.hidden_size * (3 * width + routed)
        return layers + table

    @property
    def _attention_parameters(self) -> int:
        """Of one layer."""
        mla = self.mla
        if mla is None:
            return self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        q_size = self.num_heads * (mla.nope_dim + mla.rope_dim)
        if mla.q_lora_rank is None:
            queries = self.hidden_size * q_size
        else:
            queries = mla.q_lora_rank * (self.hidden_size + q_size)
        latents = self.hidden_size * (mla.kv_lora_rank + mla.rope_dim)
        heads = self.num_heads * mla.kv_lora_rank * (mla.nope_dim + mla.v_dim)
        return queries + latents + heads + self.num_heads * mla.v_dim * self.hidden_size
