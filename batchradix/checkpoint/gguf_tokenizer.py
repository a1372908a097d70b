"""A GGUF file's vocabulary as the content of a ``tokenizer.json``.

The construction is that of `transformers` (``AutoTokenizer.from_pretrained(gguf_file=...)``), so
that both give the same ids, but needs neither it nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchradix.checkpoint.tokenizer import SpecialTokens, byte_of_character
from batchradix.errors import ModelError

_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# tokenizer.ggml.pre -> the split before byte-level BPE; None is GPT-2's own. For smollm llama.cpp
# cuts digits apart before that, which `transformers` does not: no token of that vocabulary holds
# two digits, so ids differ only where a run of white space ends at a digit.
_SPLITS: Mapping[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "smollm": None,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "llama-bpe": _LLAMA3_SPLIT,
    "smaug-bpe": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "tekken": _TEKKEN_SPLIT,
}


def gguf_tokenizer(
    path: Path, metadata: Mapping[str, Any]
) -> tuple[dict[str, Any], SpecialTokens, dict[str, str]]:
    """The definition, the special tokens, and the texts of named special tokens.

    Raises `ModelError` when the file holds no tokenizer or one that cannot be built exactly.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str) for t in tokens):
        raise ModelError(f"{path} holds no tokenizer; use another file of this model")
    if kind == "gpt2":
        definition = _byte_level(path, metadata, tokens)
    elif kind == "llama":
        definition = _sentencepiece(path, metadata, tokens)
    else:
        raise ModelError(
            f"{path} has a tokenizer of kind {kind!r}, which cannot be built from a GGUF file; "
            f"use the model's safetensors folder"
        )
    names = {
        name: tokens[token_id]
        for name, key in (
            ("bos_token", "bos_token_id"),
            ("eos_token", "eos_token_id"),
            ("unk_token", "unknown_token_id"),
            ("pad_token", "padding_token_id"),
        )
        if (token_id := _token_id(path, metadata, key, len(tokens))) is not None
    }
    definition["added_tokens"] = _added_tokens(metadata, tokens, kind, set(names.values()))
    eos_ids = [
        token_id
        for key in ("eos_token_id", "eot_token_id")
        if (token_id := _token_id(path, metadata, key, len(tokens))) is not None
    ]
    specials = SpecialTokens(
        bos_token=names.get("bos_token", ""),
        eos_token=names.get("eos_token", ""),
        eos_ids=tuple(eos_ids),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", kind == "llama")),
    )
    return definition, specials, names


def _token_id(path: Path, metadata: Mapping[str, Any], key: str, num_tokens: int) -> int | None:
    token_id = metadata.get(f"tokenizer.ggml.{key}")
    if token_id is None or token_id == 0xFFFFFFFF or token_id == -1:
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < num_tokens:
        raise ModelError(f"{path} is damaged: tokenizer.ggml.{key} is {token_id!r}")
    return token_id


def _merges(path: Path, metadata: Mapping[str, Any]) -> list[list[str]] | None:
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        return None
    pairs = [merge.split(" ") for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
        raise ModelError(f"{path} is damaged: a merge of its tokenizer is not a pair")
    return pairs


def _byte_level(path: Path, metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    """Byte-level BPE as GPT-2 has it, after the split that ``tokenizer.ggml.pre`` names."""
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _SPLITS:
        raise ModelError(
            f"{path} splits text the way {pre!r} does, which is not known here; "
            f"use the model's safetensors folder"
        )
    merges = _merges(path, metadata)
    if merges is None:
        raise ModelError(f"{path} is damaged: its tokenizer has no merges")
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    split = _SPLITS[pre]
    pre_tokenizer: dict[str, Any] = {**level, "use_regex": True}
    if split is not None:
        cut = {
            "type": "Split",
            "pattern": {"Regex": split},
            "behavior": "Isolated",
            "invert": False,
        }
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [cut, {**level, "use_regex": False}]}
    spelling = {byte: character for character, byte in byte_of_character().items()}
    alphabet = set(byte_of_character())
    vocab = {
        token if alphabet.issuperset(token) else "".join(spelling[b] for b in token.encode()): i
        for i, token in enumerate(tokens)
    }
    return {
        "version": "1.0",
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": {**level, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }


def _sentencepiece(path: Path, metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    """SentencePiece BPE as Llama 2 has it, or Gemma, which puts no space before a text: merges in
    order of score, bytes for the unknown."""
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = _merges(path, metadata)
    if merges is None:
        scores = metadata.get("tokenizer.ggml.scores")
        if not isinstance(scores, list) or len(scores) != len(tokens):
            raise ModelError(f"{path} is damaged: its tokenizer has neither merges nor scores")
        merges = _merges_by_score(vocab, dict(zip(tokens, scores, strict=True)))
    begins_with_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    scheme = "first" if begins_with_space else "never"
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return {
        "version": "1.0",
        "normalizer": None,
        "pre_tokenizer": metaspace,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *([strip] if begins_with_space else []),
            ],
        },
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": merges,
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _merges_by_score(vocab: Mapping[str, int], scores: Mapping[str, float]) -> list[list[str]]:
    """Every way to put a token together from two others, the best-scored token first."""
    found = []
    for token, score in scores.items():
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = [(left, right) for left, right in cuts if left in vocab and right in vocab]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found += [(score, left, right) for left, right in pairs]
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [[left, right] for _, left, right in found]


def _added_tokens(
    metadata: Mapping[str, Any], tokens: list[str], kind: str, named: set[str]
) -> list[dict[str, Any]]:
    """Control and user-defined tokens, which stand whole in a template.

    A byte-level vocabulary spells every real token in its alphabet; a control token that it
    could not spell is a mistake of the converter and is left out.
    """
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    alphabet = set(byte_of_character())
    added = []
    for i, (token, token_type) in enumerate(zip(tokens, types, strict=False)):
        spelt = kind != "gpt2" or alphabet.issuperset(token)
        special = token in named or (token_type == _CONTROL and spelt)
        if special or (token_type == _USER_DEFINED and spelt):
            added.append({"id": i, "content": token, "special": special})
    return added
