"""Texts cut at borders have the ids of the whole, whatever tokenizer says where borders are."""

from __future__ import annotations

import json
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.trainers import BpeTrainer, UnigramTrainer

from batchradix.checkpoint.gguf_tokenizer import _LLAMA3_SPLIT, _QWEN2_SPLIT, _TEKKEN_SPLIT
from batchradix.checkpoint.split_pattern import read_pattern
from batchradix.checkpoint.tokenizer import SpecialTokens, Tokenizer

CL100K = _LLAMA3_SPLIT.replace(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"'(?i:[sdmt]|ll|ve|re)")
O200K = _TEKKEN_SPLIT.replace(r"]*|\p{N}|", r"]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|")
DEEPSEEK = [
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CORPUS = [
    "The answer is forty two, said the quick brown fox. Name: Ada Lovelace, city: London.\n\n",
    'Grüße aus München, 東京から、привет! 12345 67890 3.14159 {"answer": 1} [1, 2, 3]\r\n',
    "one two  three   four\n\nfive\tsix; it's we'll don't I'D 'Tis .foo(bar) a/b/c //\n-- ==> x\n",
    "def f(x):\n    return x + 1  # 25% of <b>it</b>\n\n\n\tQ: why?\nA: because...:\u00e9:\u00e9\n",
]


def byte_level(*splits: str, behavior: str = "isolated", normalizer=None, **options) -> Backend:
    backend = Backend(models.BPE(**options))
    steps = [
        pre_tokenizers.Split(Regex(split), behavior, invert=behavior == "removed")
        for split in splits
    ]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splits)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, level])
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    return backend


def spaced() -> Backend:
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return backend


def unsplit() -> Backend:
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return backend


def digits(*, each: bool) -> Backend:
    backend = byte_level()
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = pre_tokenizers.Digits(individual_digits=each)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    return backend


def sentencepiece(normalizer, pre_tokenizer, model=None) -> Backend:
    backend = Backend(model or models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.Metaspace()
    return backend


UNDERLINED = normalizers.Replace(" ", "▁")
PREPENDED = normalizers.Sequence([normalizers.Prepend("▁"), UNDERLINED])
KINDS = {
    "gpt2": byte_level,
    "gpt2-with-a-space-in-front": spaced,
    "gpt2-nfc": lambda: byte_level(normalizer=normalizers.NFC()),
    "cl100k": lambda: byte_level(CL100K),
    "o200k": lambda: byte_level(O200K, behavior="removed"),
    "llama3": lambda: byte_level(_LLAMA3_SPLIT, ignore_merges=True),
    "qwen2": lambda: byte_level(_QWEN2_SPLIT, normalizer=normalizers.NFC()),
    "deepseek": lambda: byte_level(*DEEPSEEK),
    "deepseek-nfc": lambda: byte_level(*DEEPSEEK, normalizer=normalizers.NFC()),
    "tekken": lambda: byte_level(_TEKKEN_SPLIT),
    "letters-nfc": lambda: byte_level(r"[a-z]+|[^a-z]+", normalizer=normalizers.NFC()),
    "words-alone": lambda: byte_level(r"\p{N}+|\p{L}+", behavior="removed"),
    "smollm": lambda: digits(each=True),
    "digits-together": lambda: digits(each=False),
    "bytes-unsplit": unsplit,
    "llama2": lambda: sentencepiece(PREPENDED, None),
    "llama2-gguf": lambda: sentencepiece(
        None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    ),
    "gemma": lambda: sentencepiece(UNDERLINED, pre_tokenizers.Split(" ", "merged_with_previous")),
    "metaspace-always": lambda: sentencepiece(
        None, pre_tokenizers.Metaspace(prepend_scheme="always")
    ),
    "unigram-words": lambda: sentencepiece(
        None, pre_tokenizers.Metaspace(prepend_scheme="always"), models.Unigram()
    ),
}
WITHOUT_BORDERS = {
    "lowercase": lambda: byte_level(normalizer=normalizers.Lowercase()),
    "possessive": lambda: byte_level(_LLAMA3_SPLIT.replace(r"\p{L}+", r"\p{L}++")),
    "looking-back": lambda: byte_level(r"(?<=a) |\S+|\s+"),
    "unigram-unsplit": lambda: sentencepiece(
        None, pre_tokenizers.Metaspace(prepend_scheme="always", split=False), models.Unigram()
    ),
    "whole-words-by-vocabulary": lambda: sentencepiece(
        UNDERLINED, None, models.BPE(ignore_merges=True, unk_token="<unk>")
    ),
}


@cache
def tokenizer(name: str) -> Tokenizer:
    backend = (KINDS | WITHOUT_BORDERS)[name]()
    is_bytes = isinstance(backend.decoder, decoders.ByteLevel)
    alphabet = pre_tokenizers.ByteLevel.alphabet() if is_bytes else []
    if isinstance(backend.model, models.Unigram):
        trainer = UnigramTrainer(vocab_size=200, unk_token="<unk>", show_progress=False)
    else:
        specials = [] if is_bytes else ["<unk>", *(f"<0x{b:02X}>" for b in range(256))]
        trainer = BpeTrainer(
            vocab_size=700, initial_alphabet=alphabet, special_tokens=specials, show_progress=False
        )
    backend.train_from_iterator(CORPUS * 4, trainer)
    definition = json.loads(backend.to_str())
    definition["added_tokens"] = []
    return Tokenizer(definition, SpecialTokens(), num_embeddings=1_000)


PIECES = [
    *" \n\t.:,;!?'\"()[]{}<>=/-#%_01 9aeMsTé", "  ", "   ", "\n\n", "\r\n", " \n", "\n ", "'s",
    "'LL", "'re", "the", " answer", "Name", ": ", "...", "12345", "東京", "。", "\u0301",
    "\u0338", "\u3000", "\u00a0", "\u2028", "\x00", "\x1f", "\x85", "ſ", "K", "👩\u200d👧",
    "▁", "Ġ", "\ufdd0", " -", "//\n",
]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES), max_size=24).map("".join)


def borders_of(text: str, cut: Tokenizer) -> list[int]:
    found, at = [], cut.borders.next(text, 0, len(text))
    while at is not None:
        found.append(at)
        at = cut.borders.next(text, at + 1, len(text))
    return found


@pytest.mark.parametrize("name", [*KINDS, *WITHOUT_BORDERS])
@settings(deadline=None, max_examples=60)
@given(text=texts)
@example(text=":e\u0301 a=\u0338 9<\u0338s")
@example(text="why:\n\nBecause   .  \n it's 12345678 \r\n'LL")
def test_parts_between_borders_have_the_ids_of_the_whole(name, text):
    cut = tokenizer(name)
    places = borders_of(text, cut)
    for chosen in (places, *([at] for at in places)):
        parts = [text[a:b] for a, b in zip([0, *chosen], [*chosen, len(text)], strict=True)]
        for at_start in (True, False):
            ids = cut.encode_plain(parts[:1], [at_start])[0]
            ids += [i for part in cut.encode_inner(parts[1:]) for i in part]
            assert ids == cut.encode_plain([text], [at_start])[0], (parts, at_start)


@pytest.mark.parametrize("name", KINDS)
def test_known_kinds_have_borders_in_plain_prose(name):
    prose = "Document: it is said. Question: why is that?\n\nAnswer: because"
    assert borders_of(prose, tokenizer(name))


@pytest.mark.parametrize("name", WITHOUT_BORDERS)
def test_what_is_not_understood_has_no_borders(name):
    assert not tokenizer(name).borders.pairs


def test_the_last_border_is_found_from_the_end():
    cut = tokenizer("gpt2")
    text = "Name: the answer, said"
    assert cut.borders.last(text, 0, len(text)) == max(borders_of(text, cut))
    assert cut.borders.last(text, 0, 2) is None


# -- the reader of patterns ------------------------------------------------------------------

SETS = [
    "a", "b", " ", r"\n", r"\s", r"\S", r"\d", r"\w", r"\p{L}", r"\P{L}", r"\p{Lu}", r"[^\s\p{L}]",
    "[ab]", "[^a]", "[a-c.]", r"[\r\n]", r"\.", r"[\p{P}\-]", "(?i:'s|b)",
]  # fmt: skip
atoms = st.sampled_from(SETS)
parts = st.recursive(
    st.builds(str.__add__, atoms, st.sampled_from(["", "?", "*", "+", "{2}", "{1,3}", "+?"])),
    lambda inner: st.builds(
        lambda some, mark: f"(?:{'|'.join(some)}){mark}",
        st.lists(inner, min_size=1, max_size=3),
        st.sampled_from(["", "?", "*", "+", "{2,}"]),
    ),
    max_leaves=6,
)
branches = st.builds(
    lambda some, ahead: "".join(some) + ahead,
    st.lists(parts, min_size=1, max_size=3),
    st.sampled_from(["", "", r"(?!\S)", "(?=a)"]),
)
patterns = st.lists(branches, min_size=1, max_size=4).map("|".join)


@settings(deadline=None, max_examples=400)
@given(
    source=patterns,
    text=st.lists(st.sampled_from([*"abcB.- \n1'sé\u0301", "  "]), min_size=2, max_size=10).map(
        "".join
    ),
)
def test_what_a_pattern_is_said_to_do_between_two_characters_is_what_it_does(source, text):
    pattern = read_pattern(source)
    if pattern is None:
        return
    split = pre_tokenizers.Split(Regex(source), "isolated")

    def pieces(part: str) -> list[str]:
        return [piece for piece, _ in split.pre_tokenize_str(part)]

    for at in range(1, len(text)):
        before, after = text[at - 1], text[at]
        if not (before + after).isascii() or pattern.joins(before, after):
            continue
        if pattern.looks_past(before):
            continue
        left, right = pieces(text[:at]), pieces(text[at:])
        joined = [*left[:-1], left[-1] + right[0], *right[1:]]
        is_parted = pattern.covers(before) or pattern.covers(after)
        assert pieces(text) in ([left + right] if is_parted else [left + right, joined])


@pytest.mark.parametrize(
    "source", ["a*", r"\bword", "^a|b", "a|b$", "(?<!a)b", r"(a)\1", "[a&&b]", "[[:alpha:]]", "a++",
               "(?>a)b", r"\p{Han}", "(?!a)b", "a(?!bc)", "(?i:[^a])", "(?#x)a", "a{,2", "("]
)  # fmt: skip
def test_patterns_that_are_not_understood_are_not_read(source):
    assert read_pattern(source) is None
