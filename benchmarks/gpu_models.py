"""Random models in memory, as transformers and as the engine take them.

A model is made by transformers on the device, and its tensors are the source of the engine's
weights: nothing is written to disk or fetched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from batchradix.checkpoint.checkpoint import Checkpoint
from batchradix.checkpoint.hf_config import hf_config
from batchradix.checkpoint.tokenizer import SpecialTokens, Tokenizer

IN_MEMORY = Path("in memory")
END_ID = 1


class ModelSource:
    """The tensors of a transformers model, where they are; a `TensorSource`."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._tensors = model.state_dict()
        self.files: Mapping[str, Path] = dict.fromkeys(self._tensors, IN_MEMORY)

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def read_rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        return self._tensors[name][list(rows)]


@dataclass(frozen=True, slots=True)
class Model:
    """The same weights twice: ``peer`` is a causal language model of transformers."""

    checkpoint: Checkpoint
    peer: Any
    source: ModelSource | None  # None: the files of the checkpoint


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
"""What a tiny model of each has of its own."""

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
    some ends by itself."""
    settings = {**_TINY, **FAMILIES[family], "eos_token_id": END_ID}
    # What computes row by row must not take a shortcut in lower precision.
    peer = _make_peer(family, settings, torch.float32, device, attn_implementation="eager")
    random = torch.Generator().manual_seed(7)
    scales = {"embed": 0.5, "lm_head": 0.5, "bias": 0.5, "norm": 0.2}
    with torch.no_grad():
        for name, weight in peer.named_parameters():
            scale = next((scales[part] for part in scales if part in name), 0.25)
            drawn = torch.randn(weight.shape, generator=random) * scale
            weight.copy_(1 + drawn if "norm" in name else drawn)
        if not settings["tie_word_embeddings"]:
            peer.lm_head.weight[END_ID] *= 2
    return Model(_checkpoint(f"tiny {family}", peer, (END_ID,)), peer, ModelSource(peer))


def random_llama(
    name: str, settings: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> Model:
    """A Llama as transformers begins one; no token ends its answers."""
    peer = _make_peer("Llama", {**settings, "eos_token_id": None}, dtype, device)
    return Model(_checkpoint(name, peer, ()), peer, ModelSource(peer))


def _make_peer(
    family: str,
    settings: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    **options: Any,
) -> Any:
    config = getattr(transformers, f"{family}Config")(
        **settings, bos_token_id=0, pad_token_id=0, architectures=[f"{family}ForCausalLM"]
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
