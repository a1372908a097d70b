"""Texts that are cut or parted: every token is there, in order, and the template is untouched."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from batchradix.checkpoint.checkpoint import Checkpoint, open_checkpoint
from batchradix.config import PromptOptions
from batchradix.prompts.build import PromptBuilder
from batchradix.prompts.overflow import GAP, Cutter, longest_text, part_bounds
from batchradix.prompts.template import Place
from batchradix.types import Row

ALPHABET = "ab é\n🙂 <|end|> 漢字 e\u0301\t"


@pytest.fixture(scope="module")
def checkpoint(tiny_model_folder: Any) -> Checkpoint:
    return open_checkpoint(str(tiny_model_folder("markov")))


def texts(seed: int, count: int = 40) -> list[str]:
    chance = random.Random(seed)
    return ["".join(chance.choices(ALPHABET, k=chance.randint(1, 60))) for _ in range(count)]


def test_parts_cover_all_tokens_in_order_with_the_overlap_asked_for() -> None:
    chance = random.Random(1)
    for _ in range(500):
        num_tokens, size = chance.randint(1, 200), chance.randint(1, 40)
        overlap = chance.randrange(size)
        bounds = part_bounds(num_tokens, size, overlap)
        assert bounds[0][0] == 0
        assert bounds[-1][1] == num_tokens
        assert all(0 < end - begin <= size for begin, end in bounds)
        assert all(end - begin == size for begin, end in bounds[:-1])
        for (_, end), (begin, _) in pairwise(bounds):
            assert end - begin == overlap


def test_parts_of_a_text_hold_all_of_it_and_are_cut_between_characters(
    checkpoint: Checkpoint,
) -> None:
    tokenizer = checkpoint.tokenizer
    for number, text in enumerate(texts(2)):
        cutter = Cutter(text, tokenizer)
        ids = tokenizer.encode_plain([text], [False])[0]
        assert cutter.num_tokens == len(ids)
        size = number % 7 + 2
        bounds = part_bounds(cutter.num_tokens, size, 0)
        spans = [cutter.span(*each) for each in bounds]
        assert cutter.parts(size, 0) == [text[start:stop] for start, stop in spans]
        assert (spans[0][0], spans[-1][1]) == (0, len(text))
        for (_, stop), (start, _) in pairwise(spans):
            assert stop - 1 <= start <= stop  # a character of several tokens may be in both
        for (begin, end), (start, stop) in zip(bounds, spans, strict=True):
            part = b"".join(tokenizer.token_bytes[i] for i in ids[begin:end])
            assert part in text[start:stop].encode()


def test_a_truncated_text_keeps_its_end_or_both_ends(checkpoint: Checkpoint) -> None:
    cutter = Cutter("0123456789", checkpoint.tokenizer)
    assert cutter.shortened(4, "truncate-left") == "6789"
    assert cutter.shortened(4, "truncate-middle") == f"01{GAP}89"
    assert cutter.shortened(1, "truncate-middle") == f"0{GAP}"


@pytest.mark.parametrize("chat", [False, True])
def test_cutting_a_text_leaves_the_tokens_of_the_template_as_they_are(
    checkpoint: Checkpoint, chat: bool
) -> None:
    options = PromptOptions(template="Read <|tool|>: {{ text }} -- and say {{ what }}.", chat=chat)
    builder = PromptBuilder(checkpoint, options, columns=["text", "what"])
    for text in texts(3):
        row = Row(index=0, values={"text": f"x{text}x" * 3, "what": "y"})
        long = longest_text(row, builder.places)
        assert long is not None
        assert long.text == row.values["text"]
        whole, empty = (builder.encode([one]).tokens[0].tolist() for one in (row, long.put("x")))
        at = empty.index(ord("x"))
        before, after = empty[:at], empty[at + 1 :]
        cut = (
            builder.encode(
                [long.put(Cutter(long.text, checkpoint.tokenizer).shortened(5, "truncate-left"))]
            )
            .tokens[0]
            .tolist()
        )
        for ids in (whole, cut):
            assert ids[: len(before)] == before
            assert ids[-len(after) :] == after


def test_of_messages_the_longest_of_the_users_is_cut() -> None:
    messages = [
        {"role": "system", "content": "the longest of all of them"},
        {"role": "user", "content": [{"type": "text", "text": "longer"}]},
        {"role": "user", "content": "long"},
    ]
    long = longest_text(Row(index=0, values={"messages": messages}), None)
    assert long is not None
    assert long.text == "longer"
    put = long.put("cut").values["messages"]
    assert put[1] == {"role": "user", "content": [{"type": "text", "text": "cut"}]}
    assert [put[0], put[2]] == [messages[0], messages[2]]
    assert messages[1]["content"] == [{"type": "text", "text": "longer"}]


def test_a_nested_value_is_cut_at_its_place() -> None:
    row = Row(index=0, values={"doc": {"pages": ["a", "long page"]}, "id": "b"})
    long = longest_text(row, [Place("doc", ("pages", "1")), Place("id")])
    assert long is not None
    assert long.put("p").values == {"doc": {"pages": ["a", "p"]}, "id": "b"}
    assert longest_text(row, [Place("missing")]) is None


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m"])
def test_real_tokens_are_covered_as_well(name: str) -> None:
    tokenizer = open_checkpoint(name).tokenizer
    text = Path(__file__).read_text(encoding="utf-8")
    parts = Cutter(text, tokenizer).parts(50, 0)
    assert "".join(parts) == text or all(part in text for part in parts)
