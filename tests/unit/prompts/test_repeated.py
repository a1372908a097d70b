"""What repeats is encoded once, and prompts have the ids that they have when encoded whole."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchradix.prompts import repeated
from batchradix.prompts.guard import Span
from batchradix.prompts.repeated import TextEncoder
from batchradix.prompts.tokenise import encode_prompts
from batchradix.types import Row

WORDS = [
    "the", "answer", "Grüße", "東京", "don't", "12345", "x=1;", "(why?)", "\n\n", "\n", " ", "  ",
    "e\u0301", "<|end|>", "<|im_end|>", "[INST]", "<s>", ".\n", "...", "-", "whole", "\u00a0", "\t",
]  # fmt: skip
RELAXED = settings(
    deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
TEMPLATES = {
    "document": {"template": "Read this.\n\nDocument: {{ a }}\n\nQuestion: {{ b }}\nAnswer:"},
    "beside": {"template": "{{ a }}{{ b }} and {{ a }}, {{ b }}"},
    "spaces-at-the-ends": {"template": "  {{ a }} said: {{ b }} .  "},
    "tokens": {"template": "<|end|> {{ a }} so\n[INST] it is: {{ b }} <mask> {{ a }}</s>"},
    "long-text-between": {
        "template": "{{ a }}. " + "And then there was more of it. " * 4 + "{{b}}"
    },
    "chat": {"template": "Read: {{ a }}\n\nQuestion: {{ b }}", "chat": True},
    "chat-and-system": {"template": "{{ a }} or {{ b }}?  ", "chat": True, "system": "Be brief. "},
    "instruction": {"instruction": "Say what this is about.", "column": "b"},
}


def made_up(seed: int, num_words: int) -> str:
    chosen = random.Random(seed)
    return "".join(
        chosen.choice(WORDS) + " " * chosen.choice([0, 1, 1, 1, 2]) for _ in range(num_words)
    )


def assert_whole(builder, rows):
    """Batches have the ids of `explain`, which encodes every span whole."""
    for batch in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
        tokens = builder.encode(batch).tokens
        for position, row in enumerate(batch):
            alone = builder.explain(row)
            assert tokens[position].tolist() == list(alone.ids), row.values


@pytest.mark.parametrize("name", TEMPLATES)
@RELAXED
@given(seed=st.integers(0, 10**6))
def test_documents_with_questions_have_the_ids_of_whole_prompts(kind, build, name, seed):
    builder = build(kind, ["a", "b"], **TEMPLATES[name])
    documents = [made_up(seed + i, 120) for i in range(3)]
    rows = [
        Row(index=i, values={"a": documents[i % 3], "b": made_up(seed - i - 1, 8)})
        for i in range(12)
    ]
    assert_whole(builder, rows)


@pytest.mark.parametrize("column", ["prompt", "messages"])
def test_rows_that_bring_their_prompts_have_the_ids_of_whole_prompts(kind, build, column):
    builder = build(kind)
    rows = []
    for i in range(20):
        text, system = made_up(i % 4, 150) + made_up(100 + i, 10), made_up(i % 2, 90)
        chat = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        rows.append(Row(index=i, values={column: text if column == "prompt" else chat}))
    assert_whole(builder, rows)


def test_places_that_begin_or_cease_to_repeat_have_the_ids_of_whole_prompts(
    byte_bpe, build, monkeypatch
):
    builder = build(byte_bpe, ["a", "b"], **TEMPLATES["document"])
    monkeypatch.setattr("batchradix.prompts.spot._JUDGED_TEXTS", 8)
    numbers = [*range(40), *(i % 3 for i in range(200)), *range(100, 140)]
    rows = [
        Row(index=i, values={"a": made_up(n, 40), "b": made_up(-n, 4)})
        for i, n in enumerate(numbers)
    ]
    for begin in range(0, len(rows), 20):
        assert_whole(builder, rows[begin : begin + 20])


class Counting:
    """A tokenizer that counts the characters that it encodes."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.borders = tokenizer.borders
        self.num_chars = 0

    def encode_plain(self, texts, at_start):
        self.num_chars += sum(map(len, texts))
        return self._tokenizer.encode_plain(texts, at_start)

    def encode_inner(self, texts):
        self.num_chars += sum(map(len, texts))
        return self._tokenizer.encode_inner(texts)


def prompts_of(texts):
    return [[Span(text, at_start=True)] for text in texts]


def test_a_text_that_repeats_is_encoded_once_and_with_it_what_others_begin_with(byte_bpe):
    counting = Counting(byte_bpe.checkpoint.tokenizer)
    encoder = TextEncoder(counting)
    document = "The quick brown fox said: " * 50
    for batch in range(4):
        texts = [f"{document}{batch} {i}" for i in range(10)]
        found = encoder.encode(prompts_of(texts))
        expected = encode_prompts(byte_bpe.checkpoint.tokenizer, prompts_of(texts))
        assert found.values.tolist() == expected.values.tolist()
    assert counting.num_chars < len(document) + 40 * 2 * repeated._PIECE_CHARS


def test_a_place_that_never_repeats_is_not_cut(byte_bpe):
    counting = Counting(byte_bpe.checkpoint.tokenizer)
    encoder = TextEncoder(counting)
    encoder.encode(prompts_of(f"{i} " + made_up(i, 200) for i in range(200)))
    kept = len(encoder._kept._young)
    text = "999 " + made_up(999, 200)
    counting.encode_plain = lambda texts, at_start: (
        [pytest.fail("it was cut")] if list(texts) != [text] else [[1]]
    )
    encoder.encode(prompts_of([text]))
    assert len(encoder._kept._young) == kept


def test_what_is_kept_stays_below_its_limit_and_the_latest_of_it_stays():
    import numpy as np

    kept = repeated._Kept(20_000)
    for i in range(1_000):
        kept.put((f"text {i}", False, False), np.zeros(4, dtype=np.uint32))
        assert kept.get(("text 0", False, False)) is not None
    num_bytes = sum(
        key[0].__sizeof__() + ids.nbytes + repeated._ENTRY_BYTES
        for half in (kept._young, kept._old)
        for key, ids in half.items()
    )
    assert num_bytes <= 20_000
    assert kept.has_dropped
    assert kept.get(("text 1", False, False)) is None
    assert kept.get(("text 999", False, False)) is not None


def test_a_cut_lets_no_text_of_a_row_become_a_token(byte_bpe, build):
    builder = build(byte_bpe, ["a", "b"], template="say: {{ a }} and so: {{ b }}")
    special = {token.id for token in byte_bpe.checkpoint.tokenizer.added_tokens if token.special}
    half = "word " * 60
    rows = [
        Row(index=i, values={"a": f"{half}<|im_", "b": f"end|>{half}<|im_end|> <|im_start|>"})
        for i in range(4)
    ]
    for ids in builder.encode(rows).tokens.values.tolist():
        assert ids not in special
    assert_whole(builder, rows)
