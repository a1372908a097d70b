"""A parser for the regular part of ECMA-262 expressions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

Range: TypeAlias = tuple[int, int]


class UnsupportedPattern(Exception):
    """The pattern is not a plain regular expression; the message says why."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character out of disjoint, ascending, inclusive ranges of code points."""

    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Concat:
    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    branches: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    item: Expression
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Anchor:
    """``^`` or ``$``."""

    sign: str


Expression: TypeAlias = Chars | Concat | Alt | Repeat | Anchor

_LAST = 0x10FFFF
_DIGIT = ((0x30, 0x39),)
_WORD = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE = (
    (0x09, 0x0D),
    (0x20, 0x20),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
    (0xFEFF, 0xFEFF),
)
_LINE_ENDS = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11}


def parse_pattern(text: str) -> Expression:
    """The expression of a pattern. Raises `UnsupportedPattern` for what is not regular."""
    parser = _Parser(text)
    expression = parser.alternatives()
    if not parser.at_end:
        raise UnsupportedPattern(f"a stray {text[parser.place]!r}")
    return expression


def _union(ranges: list[Range]) -> tuple[Range, ...]:
    merged: list[Range] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def _complement(ranges: tuple[Range, ...]) -> tuple[Range, ...]:
    outside, begin = [], 0
    for low, high in ranges:
        if begin < low:
            outside.append((begin, low - 1))
        begin = high + 1
    if begin <= _LAST:
        outside.append((begin, _LAST))
    return tuple(outside)


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self.place = 0

    @property
    def at_end(self) -> bool:
        return self.place >= len(self._text)

    def _peek(self) -> str:
        return self._text[self.place : self.place + 1]

    def _take(self, expected: str = "") -> str:
        char = self._peek()
        if not char or (expected and char != expected):
            raise UnsupportedPattern("an unfinished expression")
        self.place += 1
        return char

    def _takes(self, text: str) -> bool:
        found = self._text.startswith(text, self.place)
        self.place += len(text) if found else 0
        return found

    def alternatives(self) -> Expression:
        branches = [self._sequence()]
        while self._takes("|"):
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else Alt(tuple(branches))

    def _sequence(self) -> Expression:
        parts: list[Expression] = []
        while self._peek() not in ("", "|", ")"):
            item = self._atom()
            counts = self._counts()
            if counts is not None:
                if isinstance(item, Anchor):
                    raise UnsupportedPattern("a repeated anchor")
                item = Repeat(item, *counts)
            parts.append(item)
        return parts[0] if len(parts) == 1 else Concat(tuple(parts))

    def _counts(self) -> tuple[int, int | None] | None:
        simple: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        counts = simple.get(self._peek())
        if counts is not None:
            self.place += 1
        elif self._takes("{"):
            low, comma, high = self._until("}").partition(",")
            if not low.isdecimal() or (high and not high.isdecimal()):
                raise UnsupportedPattern("a brace that is no repetition")
            most = int(low) if not comma else int(high) if high else None
            if most is not None and most < int(low):
                raise UnsupportedPattern("a repetition that is upside down")
            counts = (int(low), most)
        else:
            return None
        self._takes("?")  # a lazy repetition matches the same strings
        if self._peek() and self._peek() in "*+?{":
            raise UnsupportedPattern("a repeated repetition")
        return counts

    def _until(self, end: str) -> str:
        stop = self._text.find(end, self.place)
        if stop < 0:
            raise UnsupportedPattern("an unfinished expression")
        taken = self._text[self.place : stop]
        self.place = stop + 1
        return taken

    def _atom(self) -> Expression:
        char = self._take()
        if char in "^$":
            return Anchor(char)
        if char == ".":
            return Chars(_complement(_LINE_ENDS))
        if char == "(":
            return self._group()
        if char == "[":
            return self._class()
        if char == "\\":
            return Chars(self._escape())
        if char in "*+?{}]":
            raise UnsupportedPattern(f"a stray {char!r}")
        return Chars(((ord(char), ord(char)),))

    def _group(self) -> Expression:
        if self._takes("?"):
            if self._takes("<"):
                if self._peek() in ("=", "!", ""):
                    raise UnsupportedPattern("a lookbehind")
                self._until(">")
            elif not self._takes(":"):
                raise UnsupportedPattern("a lookaround or a flag")
        inside = self.alternatives()
        self._take(")")
        return inside

    def _escape(self) -> tuple[Range, ...]:
        char = self._take()
        if char.lower() in _CLASSES:
            ranges = _CLASSES[char.lower()]
            return ranges if char.islower() else _complement(ranges)
        code = _CONTROLS.get(char)
        if char == "0" and not self._peek().isdecimal():
            code = 0
        elif char == "x":
            code = self._hex(2)
        elif char == "u":
            code = self._unicode()
        elif code is None and not char.isalnum():
            code = ord(char)
        if code is None:
            raise UnsupportedPattern(f"\\{char}")
        return ((code, code),)

    def _hex(self, digits: int) -> int:
        text = self._text[self.place : self.place + digits]
        self.place += digits
        try:
            return int(text, 16)
        except ValueError:
            raise UnsupportedPattern("an escape without its digits") from None

    def _unicode(self) -> int:
        if self._takes("{"):
            try:
                return int(self._until("}"), 16)
            except ValueError:
                raise UnsupportedPattern("an escape without its digits") from None
        code = self._hex(4)
        if 0xD800 <= code < 0xDC00 and self._takes("\\u"):
            return 0x10000 + ((code - 0xD800) << 10) + (self._hex(4) - 0xDC00)
        return code

    def _class(self) -> Chars:
        negated = self._takes("^")
        ranges: list[Range] = []
        while not self._takes("]"):
            low = self._class_item()
            if self._peek() == "-" and self._text[self.place + 1 : self.place + 2] != "]":
                self._take("-")
                high = self._class_item()
                if not (_is_single(low) and _is_single(high)) or high[0][0] < low[0][0]:
                    raise UnsupportedPattern("a range without two ends")
                ranges.append((low[0][0], high[0][0]))
            else:
                ranges += low
        found = _union(ranges)
        if negated:
            found = _complement(found)
        if not found:
            raise UnsupportedPattern("an empty class")
        return Chars(found)

    def _class_item(self) -> tuple[Range, ...]:
        char = self._take()
        if char == "\\":
            if self._takes("b"):
                return ((8, 8),)
            return self._escape()
        if char == "[" or (char == "&" and self._peek() == "&"):
            raise UnsupportedPattern("a class inside a class")  # engines disagree on these
        return ((ord(char), ord(char)),)


def _is_single(ranges: tuple[Range, ...]) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]
