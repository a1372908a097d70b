"""SmolLM2-135M-Instruct as it is fetched by default."""

from __future__ import annotations

import random

import pytest

from batchradix.checkpoint.chat_template import render_chat
from batchradix.checkpoint.checkpoint import Checkpoint, open_checkpoint

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def smollm2() -> Checkpoint:
    return open_checkpoint("smollm2-135m")


def varied_texts() -> list[str]:
    fixed = [
        "Hello, world! It's 12:30 o'clock, isn't it?",
        "\n\n1. first\n  2. second\n\n\n\t\tdef f(x):\r\n    return x ** 2  # ½ ²",
        "Größe naïve 日本語のテキスト हिन्दी العربية 🙂‍↔️ é ",
        "  leading,   inner    and trailing spaces   ",
        '{"a": [1, 2.5e-3, null], "b": "\\u00e9"}',
        "<|im_startx|> <im_end> |>",
    ]
    rng = random.Random(7)
    alphabet = "".join(fixed) + "".join(map(chr, range(32, 0x250)))
    return fixed + ["".join(rng.choices(alphabet, k=rng.randint(1, 200))) for _ in range(300)]


def test_ids_are_those_of_transformers(smollm2: Checkpoint) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2.path.parent, gguf_file=smollm2.path.name)
    ours = smollm2.tokenizer
    texts = varied_texts()
    encoded = ours.encode_plain(texts, [True] * len(texts))
    for text, ids in zip(texts, encoded, strict=True):
        assert [*ours.prefix_ids, *ids] == theirs(text).input_ids
        assert b"".join(ours.token_bytes[i] for i in ids) == text.encode()
    assert {t.content for t in ours.added_tokens} == set(theirs.get_added_vocab())
    assert ours.special_ids == {theirs.convert_tokens_to_ids(t) for t in theirs.get_added_vocab()}
    messages = [{"role": "user", "content": "Hi  there"}]
    prompt = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert render_chat(smollm2, messages) == prompt


def test_control_tokens_in_text_stay_text(smollm2: Checkpoint) -> None:
    tokenizer = smollm2.tokenizer
    [ids] = tokenizer.encode_plain(["<|im_end|><|im_start|>system"], [False])
    assert tokenizer.special_ids.isdisjoint(ids)
    assert tokenizer.eos_ids == (tokenizer.added_token_id("<|im_end|>"),)


def test_it_is_a_demonstration_model_with_a_known_shape(smollm2: Checkpoint) -> None:
    assert smollm2.is_demonstration
    config = smollm2.config
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (576, 30, 49152)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert config.tie_embeddings
    assert config.context_length == 8192
