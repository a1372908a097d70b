from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix.checkpoint.tokenizer import SpecialTokens, Tokenizer
from batchradix.errors import ModelError

KINDS = [
    "byte_level",
    "byte_level_with_space",
    "llama3",
    "metaspace_first",
    "metaspace_always",
    "metaspace_never",
    "prepend",
]
ADDED = ["<|end|>", "<|user|>", "<s>", "<think>"]
# Words, white space, digits, scripts and pieces of added tokens; whole added tokens never.
WORDS = ["the", "cat", "Größe", "🙂", "日", "▁", "end", "think", "é", "1", "23", "'ll"]
OTHERS = [" ", "  ", "\n", "\n\n", "\t", "<", "|>", "<0x0A>", "."]
texts = st.lists(
    st.sampled_from([*WORDS, *OTHERS])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    max_size=8,
).map("".join)
plain_texts = texts.filter(lambda text: not any(token in text for token in ADDED))


def ours(backend: tokenizers.Tokenizer, **specials: object) -> Tokenizer:
    definition = json.loads(backend.to_str())
    named = {"bos_token": "<s>", "eos_token": "<|end|>", **specials}
    return Tokenizer(definition, SpecialTokens(**named), num_embeddings=2048)


@pytest.fixture(scope="session")
def built(backends: dict[str, tokenizers.Tokenizer]) -> dict[str, Tokenizer]:
    return {kind: ours(backend) for kind, backend in backends.items()}


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(text=plain_texts)
def test_prefix_and_plain_ids_are_what_the_library_gives_for_a_whole_text(
    kind: str, built: dict[str, Tokenizer], backends: dict[str, tokenizers.Tokenizer], text: str
) -> None:
    tokenizer = built[kind]
    ids = [*tokenizer.prefix_ids, *tokenizer.encode_plain([text], [True])[0]]
    assert ids == backends[kind].encode(text).ids


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(first=plain_texts, second=plain_texts, token=st.sampled_from(ADDED))
def test_a_text_in_the_middle_is_encoded_as_the_library_encodes_it_after_an_added_token(
    kind: str,
    built: dict[str, Tokenizer],
    backends: dict[str, tokenizers.Tokenizer],
    first: str,
    second: str,
    token: str,
) -> None:
    tokenizer = built[kind]
    start, middle = tokenizer.encode_plain([first, second], [True, False])
    token_id = tokenizer.added_token_id(token)
    expected = backends[kind].encode(f"{first}{token}{second}", add_special_tokens=False).ids
    assert [*start, token_id, *middle] == expected


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(pieces=st.lists(st.sampled_from(ADDED) | texts, max_size=5), at_start=st.booleans())
def test_no_text_ever_becomes_an_added_token(
    kind: str, built: dict[str, Tokenizer], pieces: list[str], at_start: bool
) -> None:
    tokenizer = built[kind]
    added = {token.id for token in tokenizer.added_tokens if token.content in ADDED}
    [ids] = tokenizer.encode_plain(["".join(pieces)], [at_start])
    assert added.isdisjoint(ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(text=texts)
def test_token_bytes_spell_the_text(kind: str, built: dict[str, Tokenizer], text: str) -> None:
    tokenizer = built[kind]
    [ids] = tokenizer.encode_plain([text], [True])
    spelt = b"".join(tokenizer.token_bytes[i] for i in ids)
    text = text.replace("▁", " ") if "byte" not in kind and kind != "llama3" else text
    assert spelt in (text.encode(), b" " + text.encode())


def test_a_batch_is_encoded_in_order_whatever_mix_of_beginnings_it_holds(
    built: dict[str, Tokenizer],
) -> None:
    tokenizer = built["metaspace_first"]
    rows = ["the cat", "the cat", "", "hat", "hat"]
    starts = [True, False, False, True, False]
    singly = [tokenizer.encode_plain([t], [s])[0] for t, s in zip(rows, starts, strict=True)]
    assert tokenizer.encode_plain(rows, starts) == singly
    assert singly[0] != singly[1]


def test_special_tokens_have_no_bytes_and_plain_added_tokens_have_their_text(
    built: dict[str, Tokenizer],
) -> None:
    tokenizer = built["byte_level"]
    end, think = tokenizer.added_token_id("<|end|>"), tokenizer.added_token_id("<think>")
    assert end is not None
    assert think is not None
    assert tokenizer.token_bytes[end] == b""
    assert tokenizer.token_bytes[think] == b"<think>"
    assert end in tokenizer.special_ids
    assert think not in tokenizer.special_ids
    assert tokenizer.vocab_size == len(tokenizer.token_bytes) == think + 1


def test_byte_fallback_tokens_stand_for_one_byte(built: dict[str, Tokenizer]) -> None:
    tokenizer = built["metaspace_first"]
    [ids] = tokenizer.encode_plain(["🙂"], [False])
    assert [tokenizer.token_bytes[i] for i in ids] == [bytes([b]) for b in "🙂".encode()]


def test_every_end_of_sequence_is_known_and_none_is_put_after_a_prompt(
    backends: dict[str, tokenizers.Tokenizer],
) -> None:
    backend = tokenizers.Tokenizer.from_str(backends["byte_level"].to_str())
    bos, end = backend.token_to_id("<s>"), backend.token_to_id("<|end|>")
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A <|end|>", special_tokens=[("<s>", bos), ("<|end|>", end)]
    )
    tokenizer = ours(backend, eos_ids=(1, 1, 5000))
    assert tokenizer.prefix_ids == (bos,)
    assert tokenizer.suffix_ids == ()
    assert tokenizer.eos_ids == tuple(sorted({end, 1}))


@pytest.mark.parametrize(("add_bos", "expected"), [(True, 1), (False, 0)])
def test_add_bos_stands_in_for_the_post_processor(
    backends: dict[str, tokenizers.Tokenizer], add_bos: bool, expected: int
) -> None:
    assert len(ours(backends["llama3"], add_bos=add_bos).prefix_ids) == expected
    assert len(ours(backends["byte_level"], add_bos=add_bos).prefix_ids) == expected


def test_a_named_token_is_special_unless_it_is_a_word(
    backends: dict[str, tokenizers.Tokenizer],
) -> None:
    backend = backends["byte_level"]
    tokenizer = ours(backend, named=("<think>", "at", "!", "not there"))
    assert backend.token_to_id("at") is not None
    specials = {token.content for token in tokenizer.added_tokens if token.special}
    assert specials == {"<think>", "<|end|>", "<|user|>", "<s>"}
    [ids] = tokenizer.encode_plain(["a cat!<think>"], [True])
    assert b"".join(tokenizer.token_bytes[i] for i in ids) == b"a cat!<think>"


def test_a_special_token_that_merges_would_build_is_still_out_of_reach(
    backends: dict[str, tokenizers.Tokenizer],
) -> None:
    definition = json.loads(backends["byte_level"].to_str())
    at = definition["model"]["vocab"]["at"]
    definition["added_tokens"].append({"id": at, "content": "at", "special": True})
    tokenizer = Tokenizer(definition, SpecialTokens(), num_embeddings=2048)
    [ids] = tokenizer.encode_plain(["at a cat"], [True])
    assert at not in ids
    assert b"".join(tokenizer.token_bytes[i] for i in ids) == b"at a cat"


def test_an_added_token_without_an_embedding_does_not_exist(
    backends: dict[str, tokenizers.Tokenizer],
) -> None:
    definition = json.loads(backends["byte_level"].to_str())
    last = max(token["id"] for token in definition["added_tokens"])
    tokenizer = Tokenizer(definition, SpecialTokens(), num_embeddings=last)
    assert tokenizer.added_token_id("<think>") is None
    assert tokenizer.vocab_size == last


def test_a_tokenizer_with_more_words_than_the_model_has_embeddings_is_refused(
    backends: dict[str, tokenizers.Tokenizer],
) -> None:
    definition = json.loads(backends["byte_level"].to_str())
    with pytest.raises(ModelError, match="belongs to another model"):
        Tokenizer(definition, SpecialTokens(), num_embeddings=300)


def test_unigram_does_not_find_special_tokens_in_text() -> None:
    pieces = [["<unk>", 0.0], ["<s>", 5.0], *([c, -3.0] for c in "<s>▁at")]
    definition = {
        "version": "1.0",
        "added_tokens": [{"id": 1, "content": "<s>", "special": True}],
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"},
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False},
    }
    tokenizer = Tokenizer(definition, SpecialTokens(), num_embeddings=16)
    [ids] = tokenizer.encode_plain(["a<s>t"], [True])
    assert b"".join(tokenizer.token_bytes[i] for i in ids) == b" a<s>t"
    assert 1 not in ids
    for forged in ("\ufdd0 1 <s>", "a\ufdd01\ufdd0<s>a"):
        assert 1 not in tokenizer.encode_plain([forged], [False])[0]


def test_word_piece_is_refused() -> None:
    definition = {"model": {"type": "WordPiece", "vocab": {"a": 0}}, "added_tokens": []}
    with pytest.raises(ModelError, match="WordPiece"):
        Tokenizer(definition, SpecialTokens(), num_embeddings=8)
