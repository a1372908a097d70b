"""Text to token ids and back to bytes, built on the `tokenizers` library alone.

A `Tokenizer` never matches added tokens in text: `encode_plain` encodes what a row says as
ordinary text, whatever it says, and the caller places added tokens by id. That is what keeps
text from a row from ever becoming a control token.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import tokenizers

from batchradix.checkpoint.borders import Borders
from batchradix.errors import ModelError

_SECRET = secrets.token_hex(16)
"""Part of the spelling under which special tokens hide in the vocabulary of this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedToken:
    """A token that stands outside the tokenizer's model and is matched whole in a template.

    ``lstrip`` and ``rstrip`` swallow the white space beside it, ``single_word`` matches only
    between word boundaries, ``normalized`` matches in normalised text.
    """

    id: int
    content: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    single_word: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """What stands beside ``tokenizer.json``: the texts and ids that files around it name.

    ``named`` are further texts that are special wherever the vocabulary has them (padding,
    unknown, ...); ``extra`` added tokens that only ``tokenizer_config.json`` lists. ``add_bos``
    stands in for the post-processor, which a GGUF file has not.
    """

    bos_token: str = ""
    eos_token: str = ""
    eos_ids: tuple[int, ...] = ()
    add_bos: bool | None = None
    named: tuple[str, ...] = ()
    extra: tuple[AddedToken, ...] = ()


class Tokenizer:
    """A model's tokenizer; immutable and safe to share between threads.

    ``vocab_size``: ids ``[0, vocab_size)`` are the ones it knows (the largest id plus one).
    ``token_bytes``: for every id the bytes it stands for, ``b""`` for special tokens and holes.
    ``prefix_ids`` and ``suffix_ids``: what the post-processor puts around a single raw text;
    an end of sequence put after it is left out, since prompts are there to be continued.
    ``eos_ids``: every id that ends an answer, sorted.
    """

    vocab_size: int
    added_tokens: tuple[AddedToken, ...]
    token_bytes: tuple[bytes, ...]
    special_ids: frozenset[int]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    borders: Borders
    """Where texts may be cut; what stands behind a border is for `encode_inner`."""

    def __init__(
        self, definition: Mapping[str, Any], specials: SpecialTokens, *, num_embeddings: int
    ) -> None:
        """Builds the tokenizer from the content of a ``tokenizer.json``.

        ``num_embeddings`` is the model's vocabulary: an added token beyond it (often a padding
        token nobody trained) does not exist for the model and is left out. Raises `ModelError`
        when the definition is malformed, of a kind that cannot be run, or of another model.
        """
        words = _vocabulary(definition)
        listed = _added_tokens(definition, specials)
        added_ids = {token.id for token in listed}
        last = max((i for i in words.values() if i not in added_ids), default=-1)
        if last >= num_embeddings:
            raise ModelError(
                f"the tokenizer has ids up to {last}, the model only {num_embeddings} embeddings; "
                f"the tokenizer belongs to another model"
            )
        self.added_tokens = tuple(token for token in listed if token.id < num_embeddings)
        self._added_ids = {token.content: token.id for token in self.added_tokens}
        self._plain = _plain_tokenizer(definition, listed)
        self._middle = _without_first_space(self._plain, definition)
        self._inner = _without_prepending(self._middle, definition)
        spelt = {chr(byte): char for char, byte in byte_of_character().items() if byte < 128}
        self.borders = Borders(definition, spelt)
        vocab = {s: i for s, i in words.items() if i < num_embeddings} | self._added_ids
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.special_ids = frozenset(t.id for t in self.added_tokens if t.special)
        self.token_bytes = _token_bytes(definition, vocab, self.vocab_size, self.added_tokens)
        self.bos_id = vocab.get(specials.bos_token) if specials.bos_token else None
        eos_id = vocab.get(specials.eos_token) if specials.eos_token else None
        eos_ids = {*specials.eos_ids, *(() if eos_id is None else (eos_id,))}
        self.eos_ids = tuple(sorted(i for i in eos_ids if 0 <= i < num_embeddings))
        prefix, suffix = _surroundings(self._plain)
        if specials.add_bos is not None:
            prefix = (self.bos_id,) if specials.add_bos and self.bos_id is not None else ()
            suffix = ()
        self.prefix_ids = prefix
        while suffix and suffix[-1] in self.eos_ids:
            suffix = suffix[:-1]
        self.suffix_ids = suffix

    def encode_plain(self, texts: Sequence[str], at_start: Sequence[bool]) -> list[list[int]]:
        """Token ids of each text, as ordinary text: no added token is matched, none is added.

        ``at_start[i]`` is False for a text that follows an added token; it is then encoded just
        as the tokenizer encodes such a stretch of a longer text, without the space that some
        tokenizers put at the beginning. The texts are shared among the library's threads
        (``RAYON_NUM_THREADS``); they must not hold lone surrogates.
        """
        if self._middle is self._plain or all(at_start):
            return self._encode(self._plain, texts)
        starts = [i for i, start in enumerate(at_start) if start]
        middles = [i for i, start in enumerate(at_start) if not start]
        rows: list[list[int]] = [[] for _ in texts]
        for backend, indices in ((self._plain, starts), (self._middle, middles)):
            encoded = self._encode(backend, [texts[i] for i in indices])
            for i, ids in zip(indices, encoded, strict=True):
                rows[i] = ids
        return rows

    def encode_inner(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts that go on behind one of `borders`, otherwise as `encode_plain`."""
        return self._encode(self._inner, texts)

    def added_token_id(self, content: str) -> int | None:
        """The id of the added token spelt ``content``, or None where there is no such token."""
        return self._added_ids.get(content)

    @staticmethod
    def _encode(backend: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
        batch = backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in batch]


def _vocabulary(definition: Mapping[str, Any]) -> dict[str, int]:
    """Spelling to id of the model's own vocabulary, without added tokens."""
    vocab = definition["model"]["vocab"]
    if isinstance(vocab, Mapping):
        return dict(vocab)
    return {entry[0]: i for i, entry in enumerate(vocab)}  # Unigram: [spelling, score] in order


def _added_tokens(definition: Mapping[str, Any], specials: SpecialTokens) -> tuple[AddedToken, ...]:
    """Every added token by id: those of the definition, the extra ones, and the named ones."""
    fields = ("special", "lstrip", "rstrip", "normalized", "single_word")
    found: dict[str, AddedToken] = {}
    for entry in definition.get("added_tokens") or ():
        flags = {name: bool(entry.get(name, False)) for name in fields}
        found[entry["content"]] = AddedToken(id=entry["id"], content=entry["content"], **flags)
    for token in specials.extra:
        found.setdefault(token.content, token)
    vocab = _vocabulary(definition)
    named = {specials.bos_token, specials.eos_token, *specials.named}
    ordinary = _ordinary(definition["model"], {text for text in named if text not in found})
    for text in named:
        if text in found:
            found[text] = replace(found[text], special=True)
        elif text in vocab and text not in ordinary:  # a word used for padding stays a word
            found[text] = AddedToken(id=vocab[text], content=text, special=True)
    return tuple(sorted(found.values(), key=lambda token: token.id))


def _plain_tokenizer(
    definition: Mapping[str, Any], added: Sequence[AddedToken]
) -> tokenizers.Tokenizer:
    """The tokenizer with no added token, none of which its model can produce from text."""
    kind = definition["model"].get("type")
    if kind not in (None, "BPE", "Unigram"):
        raise ModelError(
            f"the tokenizer is of kind {kind}, which no supported model has; "
            f"use a model with a BPE or Unigram tokenizer"
        )
    plain = {
        **definition,
        "added_tokens": [],
        "truncation": None,
        "padding": None,
        "model": _model_without(definition["model"], added),
    }
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(plain, ensure_ascii=False))
    except Exception as error:  # the library raises bare Exception for a malformed definition
        raise ModelError(
            f"the tokenizer cannot be built: {error}; fetch the model again or use another"
        ) from error


def _model_without(model: Mapping[str, Any], added: Sequence[AddedToken]) -> Mapping[str, Any]:
    """The tokenizer's model with added tokens spelt so that no text can reach them.

    Their ids stay in the vocabulary. An added token that is not special and is an ordinary word
    of the vocabulary as well stays one, and so does a single character, without which text
    would lose it.
    """
    vocab = model["vocab"]
    hidden = {t.content: t for t in added if len(t.content) > 1}
    if not isinstance(vocab, Mapping):
        renamed = [[_hide(s, i) if s in hidden else s, *r] for i, (s, *r) in enumerate(vocab)]
        return {**model, "vocab": renamed}
    inside = {content for content in hidden if content in vocab}
    ordinary = _ordinary(model, inside)
    away = {c: _hide(c, vocab[c]) for c in inside if hidden[c].special or c not in ordinary}
    if not away:
        return model
    changed = {**model, "vocab": {away.get(spelling, spelling): i for spelling, i in vocab.items()}}
    if model.get("unk_token") in away:
        changed["unk_token"] = away[model["unk_token"]]
    if away.keys() & ordinary:
        merges = [m for m in _merges(model) if not away.keys() & {*m, "".join(m)}]
        changed["merges"] = merges
    return changed


def _ordinary(model: Mapping[str, Any], spellings: set[str]) -> set[str]:
    """Those spellings that BPE reaches from text: single characters and results of merges."""
    if not spellings:
        return set()
    merged = {"".join(merge) for merge in _merges(model)}
    return {s for s in spellings if len(s) == 1 or s in merged}


def _merges(model: Mapping[str, Any]) -> list[list[str]]:
    """The merges as pairs; older files write a pair as one text with a space in the middle."""
    return [m.split(" ") if isinstance(m, str) else list(m) for m in model.get("merges") or ()]


def _hide(spelling: str, token_id: int) -> str:
    """A spelling that no text has once it reaches the model: spaces are spelt otherwise there."""
    return f"\ufdd0 {token_id} {spelling}"


def _components(part: Any) -> Iterator[Mapping[str, Any]]:
    """The leaves of a normalizer, pre-tokenizer or decoder definition."""
    if not isinstance(part, Mapping):
        return
    children = [
        child
        for name in ("normalizers", "pretokenizers", "decoders", "processors")
        for child in part.get(name) or ()
    ]
    if not children:
        yield part
    for child in children:
        yield from _components(child)


def _without_first_space(
    plain: tokenizers.Tokenizer, definition: Mapping[str, Any]
) -> tokenizers.Tokenizer:
    """The tokenizer for text in the middle: ``plain`` itself where the beginning is not special.

    Of all parts only Metaspace with ``prepend_scheme: first`` asks where in a text it is; what
    the others put before a stretch of text they put before every one.
    """
    part = definition.get("pre_tokenizer") or {}
    leaves = list(_components(part)) if part else []
    if not any(p["type"] == "Metaspace" and p.get("prepend_scheme") == "first" for p in leaves):
        return plain
    middle = tokenizers.Tokenizer(plain.model)  # shares the vocabulary, copies nothing
    if plain.normalizer is not None:
        middle.normalizer = plain.normalizer
    middle.pre_tokenizer = _component("pre_tokenizer", _never_first(part))
    return middle


def _without_prepending(
    middle: tokenizers.Tokenizer, definition: Mapping[str, Any]
) -> tokenizers.Tokenizer:
    """The tokenizer for text that goes on: ``middle`` itself where nothing is put before texts."""
    part = definition.get("normalizer") or {}
    leaves = list(_components(part)) if part else []
    if not any(leaf["type"] == "Prepend" for leaf in leaves):
        return middle
    kept = [leaf for leaf in leaves if leaf["type"] != "Prepend"]
    inner = tokenizers.Tokenizer(middle.model)
    inner.normalizer = _component("normalizer", {"type": "Sequence", "normalizers": kept})
    if middle.pre_tokenizer is not None:
        inner.pre_tokenizer = middle.pre_tokenizer
    return inner


def _never_first(part: Mapping[str, Any]) -> dict[str, Any]:
    changed = dict(part)
    if changed["type"] == "Metaspace":
        changed.update(prepend_scheme="never", add_prefix_space=False)
    if "pretokenizers" in changed:
        changed["pretokenizers"] = [_never_first(child) for child in changed["pretokenizers"]]
    return changed


def _component(name: str, part: Mapping[str, Any]) -> Any:
    """A normalizer or pre-tokenizer from its definition; the library reads one only inside a
    tokenizer."""
    model = {"type": "BPE", "vocab": {}, "merges": []}
    shell = {"version": "1.0", "added_tokens": [], name: part, "model": model}
    return getattr(tokenizers.Tokenizer.from_str(json.dumps(shell)), name)


def _surroundings(plain: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids that the post-processor puts before and after a text."""
    encoding = plain.encode("a", add_special_tokens=True)
    mask, ids = encoding.special_tokens_mask, encoding.ids
    if all(mask):  # nothing of the text itself is left; all that is there stands before it
        return tuple(ids), ()
    first = mask.index(0)
    last = len(mask) - mask[::-1].index(0)
    return tuple(ids[:first]), tuple(ids[last:])


@cache
def byte_of_character() -> Mapping[str, int]:
    """The alphabet of byte-level BPE (GPT-2): each of 256 printable characters to its byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table


def _token_bytes(
    definition: Mapping[str, Any],
    vocab: Mapping[str, int],
    vocab_size: int,
    added: Sequence[AddedToken],
) -> tuple[bytes, ...]:
    """The bytes of every id; see `Tokenizer.token_bytes`."""
    parts = [p for key in ("decoder", "pre_tokenizer") for p in _components(definition.get(key))]
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        spell = _byte_level_bytes
    elif kinds & {"ByteFallback", "Metaspace"} or _replaces_underline(parts):
        spell = _sentencepiece_bytes
    else:
        raise ModelError(
            "the tokenizer's tokens cannot be turned into bytes: it is neither byte-level BPE "
            "nor of the SentencePiece kind; use a model with one of these"
        )
    table = [b""] * vocab_size
    for spelling, token_id in vocab.items():
        table[token_id] = spell(spelling)
    for token in added:
        table[token.id] = b"" if token.special else token.content.encode()
    return tuple(table)


def _replaces_underline(parts: Sequence[Mapping[str, Any]]) -> bool:
    return any(p["type"] == "Replace" and p.get("pattern") == {"String": "▁"} for p in parts)


def _byte_level_bytes(spelling: str) -> bytes:
    table = byte_of_character()
    try:
        return bytes([table[character] for character in spelling])
    except KeyError:  # a word outside the alphabet, which only a mislabelled vocabulary has
        return spelling.encode()


def _sentencepiece_bytes(spelling: str) -> bytes:
    if len(spelling) == 6 and spelling.startswith("<0x") and spelling.endswith(">"):
        try:
            return bytes([int(spelling[3:5], 16)])
        except ValueError:
            pass
    return spelling.replace("▁", " ").encode()
