"""Tiny checkpoints built by hand: tokenizers trained on a few lines, weights of zeros."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The cat sat on the mat, and the other cat sat on the hat.",
    "It's 12 o'clock; she'll be there by 1:30, won't she?",
    "  indented code:\n\n    return {'a': 1}\n",
    "Größe, naïve, 日本語のテキスト, emoji 🙂🙃, और हिन्दी",
    "user assistant system end begin of text think",
] * 4
SPECIALS = ["<|end|>", "<|user|>", "<s>"]
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIALS, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _byte_level_with_space() -> Tokenizer:
    tokenizer = _byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def _llama3() -> Tokenizer:
    """A split before byte-level BPE, words found whole, and a BOS before every text."""
    tokenizer = _byte_level()
    definition = json.loads(tokenizer.to_str())
    definition["model"]["ignore_merges"] = True
    tokenizer = Tokenizer.from_str(json.dumps(definition))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)]),
        ]
    )
    return tokenizer


def _sentencepiece(scheme: str | None) -> Tokenizer:
    """The Llama 2 kind; ``scheme`` None is its older spelling, a normalizer that prepends."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    if scheme is None:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", *SPECIALS, *bytes_], show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(CORPUS[:3])], trainer)
    definition = json.loads(tokenizer.to_str())  # byte tokens are words, not added tokens
    definition["added_tokens"] = [
        token for token in definition["added_tokens"] if not token["content"].startswith("<0x")
    ]
    tokenizer = Tokenizer.from_str(json.dumps(definition))
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    return tokenizer


KINDS: Mapping[str, Callable[[], Tokenizer]] = {
    "byte_level": _byte_level,
    "byte_level_with_space": _byte_level_with_space,
    "llama3": _llama3,
    "metaspace_first": lambda: _sentencepiece("first"),
    "metaspace_always": lambda: _sentencepiece("always"),
    "metaspace_never": lambda: _sentencepiece("never"),
    "prepend": lambda: _sentencepiece(None),
}


@pytest.fixture(scope="session")
def backends() -> dict[str, Tokenizer]:
    """A `tokenizers` tokenizer of each kind, with special and plain added tokens."""
    built = {}
    for name, build in KINDS.items():
        tokenizer = build()
        tokenizer.add_tokens([AddedToken("<think>", normalized=False, special=False)])
        built[name] = tokenizer
    return built


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}


@pytest.fixture
def llama_config() -> dict[str, Any]:
    return dict(LLAMA)


@pytest.fixture
def make_folder(tmp_path: Path, backends: dict[str, Tokenizer]) -> Callable[..., Path]:
    """Builds a model folder; keyword arguments are the content of files in it."""

    def make(
        *,
        kind: str = "byte_level",
        config: Mapping[str, Any] = LLAMA,
        tokenizer_config: Mapping[str, Any] | None = None,
        files: Mapping[str, str] | None = None,
    ) -> Path:
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        backends[kind].save(str(folder / "tokenizer.json"))
        settings = {"bos_token": "<s>", "eos_token": "<|end|>", **(tokenizer_config or {})}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        save_file(
            {"model.embed_tokens.weight": np.zeros((1024, 16), dtype=np.float32)},
            folder / "model.safetensors",
        )
        for name, text in (files or {}).items():
            (folder / name).write_text(text)
        return folder

    return make


GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<s>", "<|end|>", "<think>", "a", "b", "ab", "Ġ", "Ġa"],
    "tokenizer.ggml.token_type": [3, 3, 4, 1, 1, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b", "Ġ a"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
}


def _write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        kind = GGMLQuantizationType.Q8_0 if tensor.dtype == np.uint8 else None
        writer.add_tensor(name, tensor, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def gguf_metadata() -> dict[str, Any]:
    return dict(GGUF)


@pytest.fixture
def make_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tiny GGUF file; a value of None leaves a key out."""

    def make(
        changes: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Any] | None = None,
        name: str = "tiny.gguf",
    ) -> Path:
        metadata = {k: v for k, v in {**GGUF, **(changes or {})}.items() if v is not None}
        num_tokens = len(metadata.get("tokenizer.ggml.tokens", [0] * 8))
        embedding = {"token_embd.weight": np.zeros((num_tokens, 32), dtype=np.float32)}
        _write_gguf(tmp_path / name, metadata, {**embedding, **(tensors or {})})
        return tmp_path / name

    return make
