"""Random models in memory, as transformers and as the engine take them.

A model is made by transformers on the device, and its tensors are the source of the engine's
weights: nothing is written to disk or fetched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from batchradix.checkpoint.checkpoint import Checkpoint
from batchradix.checkpoint.hf_config import hf_config
from batchradix.checkpoint.tokenizer import SpecialTokens, Tokenizer
from batchradix.engine.models.rope_order import HalvedRope
from batchradix.engine.models.source import TensorSource

IN_MEMORY = Path("in memory")
END_ID = 1


class ModelSource:
    """The tensors of a transformers model, where they are, under the names that they have in
    files; a `TensorSource`."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._tensors = {
            name: tensor
            for stacked in model.state_dict().items()
            for name, tensor in _of_each_expert(*stacked)
        }
        self.files: Mapping[str, Path] = dict.fromkeys(self._tensors, IN_MEMORY)

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def read_rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        return self._tensors[name][list(rows)]


def _of_each_expert(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of what newer transformers stack in memory; all other tensors as they are."""
    block, _, kind = name.rpartition(".experts.")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind)
    if parts is None:
        yield name, tensor
        return
    for number, expert in enumerate(tensor):
        for part, weight in zip(parts, expert.chunk(len(parts)), strict=True):
            yield f"{block}.experts.{number}.{part}.weight", weight


@dataclass(frozen=True, slots=True)
class Model:
    """The same weights twice: ``peer`` is a causal language model of transformers."""

    checkpoint: Checkpoint
    peer: Any
    source: TensorSource | None  # None: the files of the checkpoint


FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "Llama": {
        "head_dim": 64,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "Mistral": {"head_dim": 128, "sliding_window": None},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 64},
}
"""What a tiny model of each has of its own; the family is the first word."""

_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "q_lora_rank": None,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
EXPERT_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "DeepseekV2": _LATENT,
    # The sizes of the large ones, for kernels that have no other.
    "DeepseekV2 without experts": {
        **_LATENT,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "first_k_dense_replace": 2,
    },
    "DeepseekV3": {**_LATENT, "q_lora_rank": 28, "n_group": 4, "topk_group": 2},
    "Qwen3Moe": {
        "head_dim": 64,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
    },
}
"""The same of those with latent attention or experts."""

_TINY = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def tiny_model(family: str, device: torch.device) -> Model:
    """Two layers in float32 whose weights are large enough that all of it matters; one answer in
    some ends by itself. ``family``: of `FAMILIES` or `EXPERT_FAMILIES`."""
    own = {**FAMILIES, **EXPERT_FAMILIES}[family]
    settings = {**_TINY, **own, "eos_token_id": END_ID}
    # What computes row by row must not take a shortcut in lower precision.
    peer = _make_peer(family, settings, torch.float32, device, attn_implementation="eager")
    peer.config._experts_implementation = "eager"
    random = torch.Generator().manual_seed(7)
    scales = {"embed": 0.5, "lm_head": 0.5, "bias": 0.5, "norm": 0.2}
    with torch.no_grad():
        for name, weight in peer.named_parameters():
            wide = 0.25 * min(1.0, (96 / weight.shape[-1]) ** 0.5)
            scale = next((scales[part] for part in scales if part in name), wide)
            drawn = torch.randn(weight.shape, generator=random) * scale
            weight.copy_(1 + drawn if "norm" in name else drawn)
        for name, buffer in peer.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=random) * 0.3)
        if not settings["tie_word_embeddings"]:
            peer.lm_head.weight[END_ID] *= 2
    return _model(f"tiny {family}", peer, (END_ID,))


def random_model(
    family: str, settings: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> Model:
    """A model as transformers begins one; no token ends its answers."""
    peer = _make_peer(family, {**settings, "eos_token_id": None}, dtype, device)
    return _model(f"random {family}", peer, ())


def _model(name: str, peer: Any, eos_ids: tuple[int, ...]) -> Model:
    checkpoint, source = _checkpoint(name, peer, eos_ids), ModelSource(peer)
    mla = checkpoint.config.mla
    if mla is not None and mla.rope_interleaved:
        return Model(checkpoint, peer, HalvedRope(source, checkpoint.config))
    return Model(checkpoint, peer, source)


def _make_peer(
    family: str,
    settings: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    **options: Any,
) -> Any:
    name = family.split()[0]
    config = getattr(transformers, f"{name}Config")(
        **settings, bos_token_id=0, pad_token_id=0, architectures=[f"{name}ForCausalLM"]
    )
    torch.manual_seed(7)
    with torch.device(device):
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    return made.to(device).eval()


def _checkpoint(name: str, peer: Any, eos_ids: tuple[int, ...]) -> Checkpoint:
    """Tokens that stand for nothing: what is asked for is ids."""
    config = hf_config(IN_MEMORY, peer.config.to_dict())
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    definition = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {**level, "use_regex": True},
        "post_processor": None,
        "decoder": {**level, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {f"t{number}": number for number in range(config.vocab_size)},
            "merges": [],
        },
    }
    tokenizer = Tokenizer(
        definition, SpecialTokens(eos_ids=eos_ids), num_embeddings=config.vocab_size
    )
    return Checkpoint(
        name=name,
        revision=None,
        path=IN_MEMORY,
        format="safetensors",
        weight_files=(),
        config=config,
        tokenizer=tokenizer,
        chat_template=None,
        bos_token="",
        eos_token="",
    )
