"""Regular expressions of JSON Schema, rewritten for a grammar over JSON text.

A JSON Schema ``pattern`` (ECMA-262) finds a match anywhere in the *decoded* string. The
grammar matches the whole *encoded* string. So unanchored ends are opened, characters that JSON
must escape become their escapes, and length bounds, which the grammar does not combine with a
pattern, are worked into the repetitions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from batchradix.schema.pattern_parser import (
    Alt,
    Anchor,
    Chars,
    Concat,
    Expression,
    Repeat,
    UnsupportedPattern,
    parse_pattern,
)

_ANY = Chars(((0, 0x10FFFF),))
_ANYTHING = Repeat(_ANY, 0, None)
# More alternatives than this for the ways to split a length, and the bound is loosened instead.
_MAX_SPLITS = 64
_SHORT_ESCAPES = {0x22: '"', 0x5C: "\\\\", 8: "b", 12: "f", 10: "n", 13: "r", 9: "t"}
_META = frozenset("\\.[]{}()*+?^$|/-")

Bounds: TypeAlias = tuple[int, int | None]


@dataclass(frozen=True, slots=True)
class GrammarPattern:
    """A pattern for the grammar: matches the whole encoded string.

    ``is_exact`` is false when length bounds are only approximated (never too narrowly).
    """

    text: str
    is_exact: bool


def grammar_pattern(
    pattern: str, min_length: int = 0, max_length: int | None = None
) -> GrammarPattern | None:
    """Rewrites a pattern together with length bounds in characters of the decoded string.

    None when no string can match. Raises `UnsupportedPattern` for lookarounds, back
    references, word boundaries, Unicode properties, flags and anchors in the middle.
    """
    whole = _whole_match(parse_pattern(pattern))
    bounder = _Bounder()
    bounded = bounder.bound(whole, min_length, max_length)
    if bounded is None:
        return None
    return GrammarPattern(f"^{_emit(bounded)}$", bounder.is_exact)


def _whole_match(node: Expression) -> Expression:
    """The expression that matches a whole string exactly when ``node`` is found in it."""
    if isinstance(node, Alt):
        return Alt(tuple(_whole_match(branch) for branch in node.branches))
    parts = node.parts if isinstance(node, Concat) else (node,)
    if len(parts) == 1 and isinstance(parts[0], Alt):
        return _whole_match(parts[0])
    starts = bool(parts) and parts[0] == Anchor("^")
    parts = parts[1:] if starts else parts
    ends = bool(parts) and parts[-1] == Anchor("$")
    parts = parts[:-1] if ends else parts
    before = () if starts else (_ANYTHING,)
    after = () if ends else (_ANYTHING,)
    return Concat((*before, *parts, *after))


def _width(node: Expression) -> Bounds:
    """Fewest and most characters that ``node`` matches; None for no limit."""
    if isinstance(node, Chars):
        return 1, 1
    if isinstance(node, Anchor):
        raise UnsupportedPattern("an anchor in the middle")
    if isinstance(node, Repeat):
        low, high = _width(node.item)
        most = None if high is None or node.most is None else high * node.most
        return low * node.least, 0 if high == 0 else most
    widths = [_width(p) for p in (node.parts if isinstance(node, Concat) else node.branches)]
    highs = [high for _, high in widths if high is not None]
    endless = len(highs) < len(widths)
    if isinstance(node, Concat):
        return sum(low for low, _ in widths), None if endless else sum(highs)
    return min(low for low, _ in widths), None if endless else max(highs)


class _Bounder:
    """Narrows an expression to the strings whose length lies in a range."""

    def __init__(self) -> None:
        self.is_exact = True

    def bound(self, node: Expression, low: int, high: int | None) -> Expression | None:
        """None when no string of that length matches; sets ``is_exact`` false where it gives in."""
        low = max(low, 0)
        least, most = _width(node)
        if high is not None and (least > high or low > high):
            return None
        if most is not None and most < low:
            return None
        if least >= low and (high is None or (most is not None and most <= high)):
            return node
        if isinstance(node, Alt):
            branches = [self.bound(branch, low, high) for branch in node.branches]
            kept = tuple(branch for branch in branches if branch is not None)
            return Alt(kept) if kept else None
        if isinstance(node, Repeat):
            return self._repeat(node, low, high)
        assert isinstance(node, Concat)
        return self._concat(node, low, high)

    def _repeat(self, node: Repeat, low: int, high: int | None) -> Expression | None:
        narrow, wide = _width(node.item)
        least, most = node.least, node.most
        if wide is not None and wide > 0:
            least = max(least, -(-low // wide))
        if high is not None:
            fits = high // narrow if narrow else max(high, least)
            most = fits if most is None else min(most, fits)
        if narrow != wide:
            self.is_exact = False
        item = self.bound(node.item, 0, high) if high is not None else node.item
        if item is None:
            return Concat(()) if least == 0 else None
        return None if most is not None and least > most else Repeat(item, least, most)

    def _concat(self, node: Concat, low: int, high: int | None) -> Expression | None:
        widths = [_width(part) for part in node.parts]
        free = [i for i, (least, most) in enumerate(widths) if least != most]
        others = sum(least for least, _ in widths)
        first = free[0]
        fewest, most = widths[first]
        rest_fewest = others - fewest
        if len(free) == 1:
            part = self.bound(
                node.parts[first], low - rest_fewest, None if high is None else high - rest_fewest
            )
            return None if part is None else self._replaced(node, first, part)
        longest = None if high is None else high - rest_fewest
        if most is not None:
            longest = most if longest is None else min(longest, most)
        if longest is not None and (longest - fewest + 1) ** (len(free) - 1) <= _MAX_SPLITS:
            return self._split(node, first, range(fewest, longest + 1), low, high)
        self.is_exact = False
        loosened: Concat = node
        for index in free:
            room = None if high is None else high - (others - widths[index][0])
            part = self.bound(node.parts[index], 0, room)
            if part is None:
                return None
            loosened = self._replaced(loosened, index, part)
        return loosened

    def _split(
        self, node: Concat, first: int, lengths: range, low: int, high: int | None
    ) -> Expression | None:
        """One alternative for each length of the first free part."""
        branches = []
        for length in lengths:
            head = self.bound(node.parts[first], length, length)
            tail = self.bound(
                Concat(node.parts[:first] + node.parts[first + 1 :]),
                low - length,
                None if high is None else high - length,
            )
            if head is not None and tail is not None:
                parts = tail.parts if isinstance(tail, Concat) else (tail,)
                if len(parts) != len(node.parts) - 1:  # the tail became alternatives itself
                    inner = self._spread(tail, first, head)
                    branches.append(inner)
                else:
                    branches.append(Concat((*parts[:first], head, *parts[first:])))
        return Alt(tuple(branches)) if branches else None

    def _spread(self, tail: Expression, first: int, head: Expression) -> Expression:
        if isinstance(tail, Alt):
            return Alt(tuple(self._spread(branch, first, head) for branch in tail.branches))
        assert isinstance(tail, Concat)
        return Concat((*tail.parts[:first], head, *tail.parts[first:]))

    @staticmethod
    def _replaced(node: Concat, index: int, part: Expression) -> Concat:
        return Concat((*node.parts[:index], part, *node.parts[index + 1 :]))


def _emit(node: Expression) -> str:
    if isinstance(node, Chars):
        return _emit_chars(node)
    if isinstance(node, Concat):
        return "".join(_emit(part) for part in node.parts)
    if isinstance(node, Alt):
        return "(" + "|".join(_emit(branch) for branch in node.branches) + ")"
    assert isinstance(node, Repeat)
    if (node.least, node.most) == (1, 1):
        return _emit(node.item)
    if node.most == 0:
        return ""
    if (node.least, node.most) == (0, 1) and not isinstance(node.item, Chars):
        # Not (...)?: xgrammar 0.2.9 loses the first characters of what ends in {2,3} there.
        return f"({_emit(node.item)}|)"
    counts = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((node.least, node.most))
    if counts is None:
        most = "" if node.most is None else str(node.most)
        counts = f"{{{node.least}}}" if node.least == node.most else f"{{{node.least},{most}}}"
    item = _emit(node.item)
    is_atom = isinstance(node.item, Chars | Alt) and not _is_escape(item)
    return (item if is_atom else f"({item})") + counts


def _is_escape(text: str) -> bool:
    """Whether the text of a single character is an escape of several (backslash and letter)."""
    return text.startswith("\\\\")


def _emit_chars(node: Chars) -> str:
    plain, escaped = [], []
    for low, high in node.ranges:
        escaped += [f"\\\\{letter}" for c, letter in _SHORT_ESCAPES.items() if low <= c <= high]
        begin = max(low, 0x20)
        for cut in (0x22, 0x5C):
            if begin <= cut <= high:
                if begin < cut:
                    plain.append((begin, cut - 1))
                begin = cut + 1
        if begin <= high:
            plain.append((begin, high))
    if not plain and not escaped:  # control characters alone
        codes = [c for low, high in node.ranges for c in range(low, high + 1)]
        escaped = [f"\\\\u{code:04x}" for code in codes]
    choices = ([_emit_ranges(plain)] if plain else []) + escaped
    return choices[0] if len(choices) == 1 else "(" + "|".join(choices) + ")"


def _emit_ranges(ranges: list[tuple[int, int]]) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _literal(ranges[0][0])
    text = ""
    for low, high in ranges:
        text += _literal(low) if low == high else f"{_literal(low)}-{_literal(high)}"
    return f"[{text}]"


def _literal(code: int) -> str:
    return f"\\{chr(code)}" if chr(code) in _META else chr(code)
