"""Regular expressions that a whole answer matches: in plain words, and as a check of text.

The check walks the states that the expression can be in, so it takes a time that grows with
the text alone, whatever the expression; Python's ``re`` may take for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

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

MAX_STATES = 20_000
_SURROGATES = (0xD800, 0xDFFF)
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\f": "\\f", "\v": "\\v"}
_SIGNS = frozenset("\\.[]{}()*+?^$|/-")


def whole_pattern(text: str) -> Expression:
    """The expression of a pattern that a whole text must match; has no anchors left.

    Anchors at the ends say what holds anyway. Raises `UnsupportedPattern` for anchors elsewhere
    and for what is not regular: lookarounds, back references, word boundaries, flags.
    """
    return _checked(_without_ends(parse_pattern(text)))


def _without_ends(node: Expression) -> Expression:
    if isinstance(node, Alt):
        return Alt(tuple(_without_ends(branch) for branch in node.branches))
    parts = node.parts if isinstance(node, Concat) else (node,)
    if len(parts) == 1 and isinstance(parts[0], Alt):
        return _without_ends(parts[0])
    if parts and parts[0] == Anchor("^"):
        parts = parts[1:]
    if parts and parts[-1] == Anchor("$"):
        parts = parts[:-1]
    return parts[0] if len(parts) == 1 else Concat(parts)


def _checked(node: Expression) -> Expression:
    """The expression without characters that no text holds. Raises `UnsupportedPattern`."""
    if isinstance(node, Anchor):
        raise UnsupportedPattern("an anchor in the middle")
    if isinstance(node, Chars):
        ranges = tuple(part for given in node.ranges for part in _without_surrogates(*given))
        if not ranges:
            raise UnsupportedPattern("half of a surrogate pair")
        return Chars(ranges)
    if isinstance(node, Repeat):
        return Repeat(_checked(node.item), node.least, node.most)
    if isinstance(node, Alt):
        return Alt(tuple(map(_checked, node.branches)))
    return Concat(tuple(map(_checked, node.parts)))


def _without_surrogates(low: int, high: int) -> Iterable[tuple[int, int]]:
    first, last = _SURROGATES
    if low < first:
        yield low, min(high, first - 1)
    if high > last:
        yield max(low, last + 1), high


def plain_pattern(node: Expression) -> str:
    """The expression as a pattern that the grammar library and `parse_pattern` read alike.

    ``node`` as `whole_pattern` returns it: no anchors, no classes with names, no lazy repetitions.
    """
    if isinstance(node, Chars):
        (low, high), *others = node.ranges
        if low == high and not others:
            return _code(low)
        return f"[{''.join(_class_range(low, high) for low, high in node.ranges)}]"
    if isinstance(node, Concat):
        return "".join(map(plain_pattern, node.parts))
    if isinstance(node, Alt):
        return f"({'|'.join(map(plain_pattern, node.branches))})"
    assert isinstance(node, Repeat)
    least, most, item = node.least, node.most, node.item
    if most == 0:
        return ""
    inner = plain_pattern(item)
    if not isinstance(item, Chars | Alt):
        inner = f"({inner})"
    if (least, most) == (1, 1):
        return inner
    if (least, most) == (0, 1):
        # Not (...)?: xgrammar 0.2.9 loses the first characters of what ends in {2,3} there.
        return f"({inner}|)"
    if most is None and least <= 1:
        return f"{inner}{'+' if least else '*'}"
    return f"{inner}{{{least},{'' if most is None else most}}}"


def _class_range(low: int, high: int) -> str:
    return _code(low) if low == high else f"{_code(low)}-{_code(high)}"


def _code(code: int) -> str:
    char = chr(code)
    if char in _ESCAPES:
        return _ESCAPES[char]
    if code < 0x20 or 0x7F <= code < 0xA0:
        return f"\\x{code:02x}"
    if char in "\u2028\u2029\ufeff":
        return f"\\u{code:04x}"
    return f"\\{char}" if char in _SIGNS else char


@dataclass(slots=True)
class PatternCheck:
    """Whether texts match an expression as a whole.

    State ``i`` reads a character of ``chars[i]`` and goes to ``targets[i][0]``, or reads nothing
    and goes to any of ``targets[i]``. Raises `UnsupportedPattern` when it has too many states.
    """

    expression: Expression
    chars: list[Chars | None] = field(default_factory=list)
    targets: list[list[int]] = field(default_factory=list)
    start: int = 0

    def __post_init__(self) -> None:
        end = self._state(None, [])
        self.start = self._before(self.expression, end)

    def matches(self, text: str) -> bool:
        current = self._closure([self.start])
        for char in map(ord, text):
            current = self._closure(
                self.targets[state][0]
                for state in current
                if (chars := self.chars[state]) is not None
                and any(low <= char <= high for low, high in chars.ranges)
            )
            if not current:
                return False
        return 0 in current

    def _closure(self, states: Iterable[int]) -> set[int]:
        found: set[int] = set()
        waiting = list(states)
        while waiting:
            state = waiting.pop()
            if state not in found:
                found.add(state)
                if self.chars[state] is None:
                    waiting += self.targets[state]
        return found

    def _state(self, chars: Chars | None, targets: list[int]) -> int:
        if len(self.chars) >= MAX_STATES:
            raise UnsupportedPattern("repetitions that are too large")
        self.chars.append(chars)
        self.targets.append(targets)
        return len(self.chars) - 1

    def _before(self, node: Expression, after: int) -> int:
        """The state from which ``node`` leads to the state ``after``."""
        if isinstance(node, Chars):
            return self._state(node, [after])
        if isinstance(node, Concat):
            for part in reversed(node.parts):
                after = self._before(part, after)
            return after
        if isinstance(node, Alt):
            return self._state(None, [self._before(branch, after) for branch in node.branches])
        assert isinstance(node, Repeat)
        if node.most is None:
            loop = self._state(None, [after])
            self.targets[loop].append(self._before(node.item, loop))
            after = loop
        else:
            for _ in range(node.most - node.least):
                after = self._state(None, [after, self._before(node.item, after)])
        for _ in range(node.least):
            after = self._before(node.item, after)
        return after
