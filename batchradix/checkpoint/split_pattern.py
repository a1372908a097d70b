"""What a pre-tokenizer's regular expression can do between two characters.

A pattern becomes the positions of Glushkov's automaton: each takes one character of a set, and the
automaton knows which may follow which. Two characters that no two such positions take one after the
other are never in one match, whatever stands around them. Quantifiers, alternatives and groups are
read exactly or as more than they allow; what is not understood makes no `SplitPattern` at all.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

_ASCII = tuple(map(chr, range(128)))
_ALL = (1 << 128) - 1  # a set of ASCII characters is an int, a bit for each
_SPACE = "\t\n\v\f\r "
_ESCAPED = {"r": "\r", "n": "\n", "t": "\t", "v": "\v", "f": "\f"}
_MOST_REPEATS = 2  # of which copies differ in what may follow them


class _Unread(Exception):
    """The pattern has something that is not understood."""


@dataclass(frozen=True, slots=True)
class SplitPattern:
    """A pattern that was read. All questions are about ASCII characters.

    Matches are found from left to right, each from the end of the one before, and nothing in the
    pattern looks back.
    """

    _joined: tuple[int, ...]
    _covered: int
    _looking: int

    def joins(self, before: str, after: str) -> bool:
        """Whether some match may hold ``before`` with ``after`` right behind it."""
        return bool(self._joined[ord(before)] >> ord(after) & 1)

    def looks_past(self, char: str) -> bool:
        """Whether some match may look at what stands right behind ``char``."""
        return bool(self._looking >> ord(char) & 1)

    def covers(self, char: str) -> bool:
        """Whether each ``char`` in a text is sure to be in some match."""
        return bool(self._covered >> ord(char) & 1)


@cache
def read_pattern(source: str) -> SplitPattern | None:
    """The pattern ``source`` as Oniguruma reads it; None where it cannot be told what it does."""
    try:
        return _Reader(source).read()
    except _Unread:
        return None


@dataclass(frozen=True, slots=True)
class _Node:
    """A part of the pattern: where its matches begin and end, and whether one may be empty.

    ``looks``: it is a look ahead, which takes nothing.
    """

    first: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()
    empty: bool = True
    looks: bool = False


@dataclass(slots=True)
class _Reader:
    source: str
    at: int = 0
    folds_case: bool = False
    sets: list[int] = field(default_factory=list)
    follow: set[tuple[int, int]] = field(default_factory=set)
    looks: set[int] = field(default_factory=set)
    never_alone: set[int] = field(default_factory=set)

    def read(self) -> SplitPattern:
        node = self._choice()
        if self.at != len(self.source) or node.empty:
            raise _Unread
        joined = [0] * 128
        for before, after in self.follow:
            for code in range(128):
                if self.sets[before] >> code & 1:
                    joined[code] |= self.sets[after]
        alone = (node.first & node.last) - self.never_alone - self.looks
        return SplitPattern(tuple(joined), self._union(alone), self._union(self.looks))

    def _union(self, positions: Iterable[int]) -> int:
        chars = 0
        for position in positions:
            chars |= self.sets[position]
        return chars

    def _peek(self) -> str:
        return self.source[self.at : self.at + 1]

    def _take(self, text: str) -> bool:
        found = self.source.startswith(text, self.at)
        self.at += len(text) if found else 0
        return found

    def _next(self) -> str:
        char = self._peek()
        if not char:
            raise _Unread
        self.at += 1
        return char

    def _choice(self) -> _Node:
        node = self._sequence()
        while self._take("|"):
            other = self._sequence()
            node = _Node(node.first | other.first, node.last | other.last, node.empty | other.empty)
        return node

    def _sequence(self) -> _Node:
        node = _Node()
        while self._peek() not in ("", "|", ")"):
            node = self._joined(node, self._repeated())
        return node

    def _joined(self, left: _Node, right: _Node) -> _Node:
        if right.looks:
            if left.empty:  # it might look at the very place where a match begins
                raise _Unread
            self.looks |= left.last
            return left
        self.follow |= {(p, q) for p in left.last for q in right.first}
        return _Node(
            left.first | right.first if left.empty else left.first,
            right.last | left.last if right.empty else right.last,
            left.empty and right.empty,
        )

    def _repeated(self) -> _Node:
        before = len(self.sets)
        node = self._atom()
        least, most = self._quantifier()
        if (least, most) == (1, 1):
            return node
        if node.looks:
            raise _Unread
        if most > 1:
            self.follow |= {(p, q) for p in node.last for q in node.first}
        if least > 1:
            self.never_alone |= set(range(before, len(self.sets)))
        return _Node(node.first, node.last, node.empty or least == 0)

    def _quantifier(self) -> tuple[int, int]:
        """How often, at least and at most (no more than ``_MOST_REPEATS`` is told apart)."""
        simple = {"?": (0, 1), "*": (0, _MOST_REPEATS), "+": (1, _MOST_REPEATS)}
        char = self._peek()
        if char in simple and char:
            self.at += 1
            counts = simple[char]
        elif char == "{":
            end = self.source.find("}", self.at)
            least, comma, most = self.source[self.at + 1 : end].partition(",")
            if end < 0 or not least.isdecimal() or (most and not most.isdecimal()):
                raise _Unread
            self.at = end + 1
            counts = int(least), int(most or _MOST_REPEATS) if comma else int(least)
        else:
            return 1, 1
        self._take("?")  # the shortest first: the same matches are possible
        if self._peek() in ("+", "*", "?", "{"):  # possessive ones give nothing back
            raise _Unread
        return counts

    def _atom(self) -> _Node:
        if self._take("("):
            return self._group()
        return self._position(self._set())

    def _position(self, chars: int) -> _Node:
        self.sets.append(chars)
        here = frozenset({len(self.sets) - 1})
        return _Node(here, here, False)

    def _group(self) -> _Node:
        folded = self.folds_case
        if self._take("?!") or self._take("?="):
            self._set()  # a single character; more might be looked at further on
            node = _Node(looks=True)
        else:
            if self._take("?i:"):
                self.folds_case = True
            elif not self._take("?:") and self._peek() == "?":
                raise _Unread
            node = self._choice()
        if not self._take(")"):
            raise _Unread
        self.folds_case = folded
        return node

    def _set(self) -> int:
        char = self._next()
        if self.folds_case and (char == "\\" or (char == "[" and self._peek() == "^")):
            raise _Unread  # what is left out might come in again by its other case
        chars = self._one_of(char)
        if not self.folds_case:
            return chars
        both = (c.swapcase() for c in _ASCII if chars >> ord(c) & 1)
        return chars | _of(both)

    def _one_of(self, char: str) -> int:
        if char == "[":
            return self._bracket()
        if char == "\\":
            return self._escape()
        if char in "^$.()|?*+{":
            raise _Unread
        return _of(char)

    def _escape(self) -> int:
        char = self._next()
        if char in "pP":
            return self._property(negated=char == "P")
        classes = {
            "s": _of(_SPACE),
            "d": _of(filter(str.isdecimal, _ASCII)),
            "w": _of(c for c in _ASCII if c.isalnum() or c == "_"),
        }
        if char.lower() in classes:
            return classes[char.lower()] ^ (_ALL if char.isupper() else 0)
        if char in _ESCAPED:
            return _of(_ESCAPED[char])
        if char.isalnum():
            raise _Unread
        return _of(char)

    def _property(self, *, negated: bool) -> int:
        if not self._take("{"):
            raise _Unread
        name, brace, _ = self.source[self.at :].partition("}")
        self.at += len(name) + 1
        negated ^= name.startswith("^")
        name = name.removeprefix("^")
        if not brace or not (name in "LMNPSZC" or (len(name) == 2 and name[0] in "LMNPSZC")):
            raise _Unread
        chars = _of(c for c in _ASCII if unicodedata.category(c).startswith(name))
        return chars ^ (_ALL if negated else 0)

    def _bracket(self) -> int:
        negated = self._take("^")
        members = 0
        while not self._take("]"):
            start = self._next()
            if start == "[" or (start == "&" and self._peek() == "&"):
                raise _Unread
            if start == "\\":
                start = _ESCAPED.get(self._peek(), self._peek())
                is_class = start.isalnum()  # which begins no range
                members |= self._escape()
                if is_class:
                    continue
            members |= _of(start)
            if self._peek() == "-" and self.source[self.at + 1 : self.at + 2] != "]":
                self.at += 1
                stop = self._next()
                if stop in "\\[":
                    raise _Unread
                members |= _of(c for c in _ASCII if start <= c <= stop)
        return members ^ (_ALL if negated else 0)


def _of(chars: Iterable[str]) -> int:
    """The ASCII characters among ``chars``."""
    found = 0
    for char in chars:
        found |= 1 << ord(char) if char < "\x80" else 0
    return found
