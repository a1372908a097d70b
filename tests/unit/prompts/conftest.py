"""Small tokenizers of the kinds that models have, each with `transformers` as its oracle."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.trainers import BpeTrainer

from batchradix.checkpoint.checkpoint import Checkpoint
from batchradix.checkpoint.model_config import ModelConfig, RopeConfig
from batchradix.checkpoint.tokenizer import SpecialTokens, Tokenizer, byte_of_character
from batchradix.config import PromptOptions
from batchradix.prompts.build import PromptBatch, PromptBuilder
from batchradix.types import Row

TINY_SPECIALS = ("<pad>", "<bos>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>")
TINY_SPECIALS += ("<|tool|>", "<|end|>")
TINY_CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' }}{{ m.content }}"
    "{% for c in (m.tool_calls or []) %}{{ c.function.name + '(' + (c.function.arguments "
    "if c.function.arguments is string else c.function.arguments | tojson) + ')' }}{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + "
    "message['content'] | trim + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INST = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}"
    " {{ message.content }}{{ eos_token }}{% else %}[INST] {{ message.content }} [/INST]"
    "{% endif %}{% endfor %}"
)
CORPUS = (
    "The answer is forty two, said the quick brown fox. Name: Ada Lovelace, city: London.",
    'Grüße aus München, 東京から、привет! 12345 67890 3.14159 {"answer": 1} [1, 2, 3]',
    "one two  three   four\n\nfive\tsix; user assistant system <tag> </tag> it's we'll don't",
)


@dataclass(frozen=True)
class Kind:
    """A tokenizer with its chat template, and the oracle: a `transformers` tokenizer."""

    checkpoint: Checkpoint
    oracle: Any


def make_checkpoint(tokenizer: Tokenizer, chat: str | None, bos: str, eos: str) -> Checkpoint:
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=tokenizer.vocab_size,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        context_length=512,
        rms_norm_eps=1e-6,
        rope=RopeConfig(),
        tie_embeddings=True,
    )
    return Checkpoint(
        name="a-model",
        revision=None,
        path=Path("nowhere"),
        format="safetensors",
        weight_files=(),
        config=config,
        tokenizer=tokenizer,
        chat_template=chat,
        bos_token=bos,
        eos_token=eos,
    )


def _kind(backend: Backend, chat: str, bos: str | None, eos: str) -> Kind:
    from transformers import PreTrainedTokenizerFast

    oracle = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=eos,
        clean_up_tokenization_spaces=False,
    )
    oracle.chat_template = chat
    definition = json.loads(oracle.backend_tokenizer.to_str())
    tokenizer = Tokenizer(
        definition,
        SpecialTokens(bos_token=bos or "", eos_token=eos),
        num_embeddings=backend.get_vocab_size(),
    )
    return Kind(make_checkpoint(tokenizer, chat, bos or "", eos), oracle)


@pytest.fixture(scope="session")
def tiny() -> Kind:
    """One token a byte, special tokens from 256, a BOS that tokenizer and template both write."""
    backend = Backend(models.BPE(vocab=dict(byte_of_character()), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(s, normalized=False) for s in TINY_SPECIALS])
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 257)]
    )
    return _kind(backend, TINY_CHAT, "<bos>", "<eos>")


@pytest.fixture(scope="session")
def byte_bpe() -> Kind:
    """Byte-level BPE with merges, digits apart, ChatML, and added tokens that are not special."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex(r"'s|'ll| ?\p{L}+| ?[^\s\p{L}]+|\s+(?!\S)|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS * 4, BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens(
        [AddedToken(s, normalized=False) for s in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    )
    backend.add_tokens(
        [AddedToken(s, normalized=False) for s in ("<think>", "</think>", "<think>!")]
        + [AddedToken("<mask>", lstrip=True, rstrip=True, normalized=False)]
        + [AddedToken("whole", single_word=True, normalized=True)]
    )
    return _kind(backend, CHATML, None, "<|im_end|>")


def _metaspace(normalizer: Any, pre_tokenizer: Any) -> Backend:
    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    names = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    backend.train_from_iterator(
        CORPUS * 4,
        BpeTrainer(
            vocab_size=600,
            special_tokens=[AddedToken(n, normalized=False) for n in names[:3]] + names[3:],
            show_progress=False,
        ),
    )
    definition = json.loads(backend.to_str())
    kept = [t for t in definition["added_tokens"] if not t["content"].startswith("<0x")]
    backend = Backend.from_str(json.dumps({**definition, "added_tokens": kept}))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([AddedToken(s, normalized=False) for s in ("[INST]", "[/INST]")])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return backend


@pytest.fixture(scope="session")
def metaspace() -> Kind:
    """SentencePiece-like BPE with a space put before the beginning only, as in new Llamas."""
    part = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return _kind(_metaspace(None, part), INST, "<s>", "</s>")


@pytest.fixture(scope="session")
def legacy() -> Kind:
    """SentencePiece-like BPE whose normalizer puts a space before every stretch of text."""
    part = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _kind(_metaspace(part, None), INST, "<s>", "</s>")


@pytest.fixture(scope="session", params=["tiny", "byte_bpe", "metaspace", "legacy"])
def kind(request: pytest.FixtureRequest) -> Kind:
    """Each of the tokenizers."""
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


Build = Callable[..., PromptBuilder]


@pytest.fixture
def build() -> Build:
    """``build(kind, columns=None, schema=None, chat_template=..., **options)``."""

    def make(
        kind: Kind,
        columns: list[str] | None = None,
        schema: str | None = None,
        chat_template: str | None = "",
        **options: Any,
    ) -> PromptBuilder:
        checkpoint = kind.checkpoint
        if chat_template != "":
            checkpoint = make_checkpoint(
                checkpoint.tokenizer, chat_template, checkpoint.bos_token, checkpoint.eos_token
            )
        options = PromptOptions(**options)
        return PromptBuilder(checkpoint, options, columns=columns, schema_text=schema)

    return make


@pytest.fixture
def ids_of() -> Callable[..., list[int]]:
    """The ids of one row that must have no error: ``ids_of(builder, column=value, ...)``."""

    def encode(builder: PromptBuilder, /, **values: Any) -> list[int]:
        batch = builder.encode([Row(index=0, values=values)])
        assert batch.errors == {}
        return list(batch.tokens[0].tolist())

    return encode


@pytest.fixture
def error_of() -> Callable[..., tuple[str, str]]:
    """Code and sentence of one row's error: ``error_of(builder, column=value, ...)``."""

    def encode(builder: PromptBuilder, /, **values: Any) -> tuple[str, str]:
        batch: PromptBatch = builder.encode([Row(index=3, line=4, values=values)])
        assert list(batch.tokens.lengths) == [0]
        error = batch.errors[0]
        return error.code.value, error.message

    return encode
