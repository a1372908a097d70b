"""Where a text may be cut so that its parts have, one after the other, the ids of the whole.

A border is a place between two ASCII characters, the first of which is not white space. It is one
only if the tokenizer's own definition says so for these two whatever stands around them:

- the normalizer changes each side as it would alone (ASCII is its own normal form and joins with
  nothing before it; what marks behind it may turn into another character is left out);
- each step of the pre-tokenizer cuts each side as it would alone, and one of them cuts between the
  two; the steps behind it and the model then work on one piece at a time;
- or, where no step cuts there, the model is a BPE in which no token holds the two side by side, so
  that nothing is ever merged across.

What is not known here makes no border.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

from batchradix.checkpoint.split_pattern import SplitPattern, read_pattern

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_BEFORE = tuple(map(chr, range(0x21, 0x7F)))
_AFTER = ("\t", "\n", "\r", *map(chr, range(0x20, 0x7F)))
_UNDERLINE = "▁"
_NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")


class _Unknown(Exception):
    """The tokenizer has a part whose doings are not known here."""


class _Cut(Enum):
    """What a step makes of two characters side by side."""

    MIXED = auto()  # what it does on one side may depend on the other
    APART = auto()  # each side as if alone, and perhaps in one piece
    PARTED = auto()  # each side as if alone, and in two pieces


_Step = tuple[Callable[[str, str], _Cut], Mapping[str, str]]
"""What it makes of two characters, and what it spells otherwise for the steps behind it."""


class Borders:
    """The borders of one tokenizer.

    ``definition``: the content of its ``tokenizer.json``. ``bytes_spelt``: how byte-level BPE
    spells what is not spelt as itself, for ASCII.
    """

    def __init__(self, definition: Mapping[str, Any], bytes_spelt: Mapping[str, str]) -> None:
        self._model = definition["model"]
        self._steps: tuple[_Step, ...] | None
        try:
            steps = (
                *_normalizer(definition.get("normalizer")),
                *_pre_tokenizer(definition.get("pre_tokenizer"), bytes_spelt),
            )
        except _Unknown:
            self._steps = None
        else:
            self._steps = steps

    @cached_property
    def pairs(self) -> frozenset[str]:
        """Pairs of characters that have a border between them wherever they stand."""
        if self._steps is None:
            return frozenset()
        return frozenset(a + b for a in _BEFORE for b in _AFTER if self._parts(a, b))

    def next(self, text: str, start: int, stop: int) -> int | None:
        """The first border of ``text`` in ``[start, stop)``, None where there is none."""
        pairs = self.pairs
        for at in range(max(1, start), min(stop, len(text)) if pairs else 0):
            if text[at - 1 : at + 1] in pairs:
                return at
        return None

    def last(self, text: str, start: int, stop: int) -> int | None:
        """The last border of ``text`` in ``[start, stop)``, None where there is none."""
        pairs = self.pairs
        for at in range(min(stop, len(text)) - 1 if pairs else 0, max(1, start) - 1, -1):
            if text[at - 1 : at + 1] in pairs:
                return at
        return None

    def _parts(self, before: str, after: str) -> bool:
        for cut_of, spelt in self._steps or ():
            cut = cut_of(before, after)
            if cut is not _Cut.APART:
                return cut is _Cut.PARTED
            before, after = spelt.get(before, before), spelt.get(after, after)
        words = self._unmerged
        return words is not None and {before, after} <= words[0] and before + after not in words[1]

    @cached_property
    def _unmerged(self) -> tuple[frozenset[str], frozenset[str]] | None:
        """The characters that are tokens, and all pairs side by side in tokens, of a BPE that
        merges by rank and by nothing else."""
        model = self._model
        marks = ("dropout", "ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")
        if "merges" not in model or any(model.get(mark) for mark in marks):
            return None
        vocab = model["vocab"]
        pairs = {a + b for token in vocab for a, b in pairwise(token)}
        return frozenset(token for token in vocab if len(token) == 1), frozenset(pairs)


def _normalizer(part: Mapping[str, Any] | None) -> Iterator[_Step]:
    if part is None:
        return
    kind = part["type"]
    if kind == "Sequence":
        for child in part["normalizers"]:
            yield from _normalizer(child)
    elif kind == "Replace" and part["pattern"] == {"String": " "} and len(part["content"]) == 1:
        yield _apart, {" ": part["content"]}
    elif kind in _NORMAL_FORMS:
        yield _composed, {}
    elif kind != "Prepend":  # what is put before a text is put there once
        raise _Unknown


def _pre_tokenizer(
    part: Mapping[str, Any] | None, bytes_spelt: Mapping[str, str]
) -> Iterator[_Step]:
    if part is None:
        return
    kind = part["type"]
    if kind == "Sequence":
        for child in part["pretokenizers"]:
            yield from _pre_tokenizer(child, bytes_spelt)
    elif kind == "ByteLevel":
        if part.get("add_prefix_space", True):
            yield _spaced, {}
        if part.get("use_regex", True):
            yield _split(_GPT2_SPLIT, keeps_gaps=True), {}
        yield _apart, bytes_spelt
    elif kind == "Metaspace":
        if part.get("prepend_scheme", "always") == "always":
            yield _spaced, {}
        yield (_before_space if part.get("split", True) else _apart), {" ": _UNDERLINE}
    elif kind == "Digits":
        yield partial(_digits, part.get("individual_digits", False)), {}
    elif kind == "Split":
        yield _splits(part), {}
    else:
        raise _Unknown


def _splits(part: Mapping[str, Any]) -> Callable[[str, str], _Cut]:
    pattern, behavior, inverted = part["pattern"], part["behavior"], part.get("invert", False)
    if "Regex" in pattern and behavior == "Isolated":
        return _split(pattern["Regex"], keeps_gaps=True)
    if "Regex" in pattern and behavior == "Removed" and inverted:
        return _split(pattern["Regex"], keeps_gaps=False)
    if len(pattern.get("String", "")) == 1 and behavior == "MergedWithPrevious" and not inverted:
        return partial(_behind, pattern["String"])
    raise _Unknown


def _apart(before: str, after: str) -> _Cut:
    return _Cut.APART


def _composed(before: str, after: str) -> _Cut:
    """Letters and these signs become other characters with a mark behind them."""
    return _Cut.MIXED if after.isalpha() or after in "<=>" else _Cut.APART


def _spaced(before: str, after: str) -> _Cut:
    """A space is put before what does not begin with one."""
    return _Cut.APART if after == " " else _Cut.MIXED


def _before_space(before: str, after: str) -> _Cut:
    return _Cut.PARTED if after == " " else _Cut.APART


def _behind(char: str, before: str, after: str) -> _Cut:
    return _Cut.PARTED if before == char else _Cut.APART


def _digits(each: bool, before: str, after: str) -> _Cut:
    if before.isdecimal() and after.isdecimal():
        return _Cut.PARTED if each else _Cut.MIXED
    return _Cut.PARTED if before.isdecimal() or after.isdecimal() else _Cut.APART


def _split(source: str, *, keeps_gaps: bool) -> Callable[[str, str], _Cut]:
    """Matches are pieces, and what lies between matches is one as well where gaps are kept."""
    pattern = read_pattern(source)
    if pattern is None:
        raise _Unknown
    return partial(_matched, pattern, keeps_gaps)


def _matched(pattern: SplitPattern, keeps_gaps: bool, before: str, after: str) -> _Cut:
    known = (before + after).isascii()
    if not known or pattern.joins(before, after) or pattern.looks_past(before):
        return _Cut.MIXED
    in_one_gap = keeps_gaps and not (pattern.covers(before) or pattern.covers(after))
    return _Cut.APART if in_one_gap else _Cut.PARTED
