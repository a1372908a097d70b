"""The shortest way to the end of a regular expression, from any beginning of a match."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from batchradix.schema.pattern_parser import (
    Alt,
    Anchor,
    Chars,
    Concat,
    Expression,
    Range,
    Repeat,
    UnsupportedPattern,
    parse_pattern,
)

_MAX_STATES = 50_000
# Plain characters are taken where there is a choice.
_PREFERRED = tuple(map(ord, "a0-. A"))


class PatternWalk:
    """A pattern as a graph whose every state knows how far the end is.

    A match covers the whole text. Built once a pattern; raises `UnsupportedPattern` for one that
    is not regular or needs more than 50,000 states.
    """

    def __init__(self, pattern: str) -> None:
        self._free: list[list[int]] = []
        self._steps: list[list[tuple[tuple[Range, ...], int]]] = []
        self.is_finite = True
        """Whether every match is of bounded length."""
        self._start = self._state()
        self._end = self._build(_unanchored(parse_pattern(pattern)), self._start)
        self._left: dict[int, int] = {}
        self._order: dict[int, int] = {}
        self._measure()

    def shortest_rest(self, beginning: str, next_codes: Range | None = None) -> str | None:
        """The shortest text after ``beginning`` that completes a match; None without one.

        ``next_codes``: code points of which the first character of the rest must be one (a
        UTF-8 character whose first bytes are written).
        """
        states = self._reached({self._start})
        for char in beginning:
            states = self._reached(self._after(states, ord(char), ord(char)))
            if not states:
                return None
        rest = ""
        if next_codes is not None:
            code = self._first_step(states, next_codes)
            if code is None:
                return None
            rest = chr(code)
            states = self._reached(self._after(states, code, code))
        best = min(states, key=lambda state: self._left.get(state, _MAX_STATES * 2), default=None)
        if best is None or best not in self._left:
            return None
        return rest + self._downhill(best)

    def _downhill(self, state: int) -> str:
        text = []
        while state != self._end:
            for code, target in self._onward(state):
                if self._left.get(target, -1) == self._left[state] - (code is not None):
                    if code is not None:
                        text.append(chr(code))
                    state = target
                    break
        return "".join(text)

    def _onward(self, state: int) -> Iterable[tuple[int | None, int]]:
        for ranges, target in self._steps[state]:
            yield _chosen(ranges), target
        for target in self._free[state]:
            if self._order.get(target, _MAX_STATES) < self._order[state]:
                yield None, target

    def _first_step(self, states: set[int], codes: Range) -> int | None:
        best: tuple[int, int] | None = None
        for state in states:
            for ranges, target in self._steps[state]:
                for low, high in ranges:
                    code = max(low, codes[0])
                    if code <= min(high, codes[1]) and target in self._left:
                        best = min(best or (1 << 60, 0), (self._left[target], code))
        return None if best is None else best[1]

    def _after(self, states: set[int], low: int, high: int) -> set[int]:
        return {
            target
            for state in states
            for ranges, target in self._steps[state]
            if any(first <= high and low <= last for first, last in ranges)
        }

    def _reached(self, states: set[int]) -> set[int]:
        waiting = list(states)
        found = set(states)
        while waiting:
            for target in self._free[waiting.pop()]:
                if target not in found:
                    found.add(target)
                    waiting.append(target)
        return found

    def _state(self) -> int:
        if len(self._free) >= _MAX_STATES:
            raise UnsupportedPattern("too many states")
        self._free.append([])
        self._steps.append([])
        return len(self._free) - 1

    def _build(self, node: Expression, begin: int) -> int:
        """Adds the states of ``node`` after ``begin``; returns the one where it ends."""
        if isinstance(node, Chars):
            end = self._state()
            if node.ranges:
                self._steps[begin].append((node.ranges, end))
            return end
        if isinstance(node, Concat):
            for part in node.parts:
                begin = self._build(part, begin)
            return begin
        if isinstance(node, Alt):
            end = self._state()
            for branch in node.branches:
                entry = self._state()
                self._free[begin].append(entry)
                self._free[self._build(branch, entry)].append(end)
            return end
        if isinstance(node, Anchor):
            raise UnsupportedPattern("an anchor in the middle")
        for _ in range(node.least):
            begin = self._build(node.item, begin)
        return self._optional(node, begin)

    def _optional(self, node: Repeat, begin: int) -> int:
        end = self._state()
        self._free[begin].append(end)
        if node.most is None:
            self.is_finite = False
            entry = self._state()
            self._free[begin].append(entry)
            last = self._build(node.item, entry)
            self._free[last] += [entry, end]
            return end
        for _ in range(node.most - node.least):
            entry = self._state()
            self._free[begin].append(entry)
            begin = self._build(node.item, entry)
            self._free[begin].append(end)
        return end

    def _measure(self) -> None:
        """Characters from each state to the end (``_left``); states that do not lead there are
        left out. ``_order`` ranks the states as they were settled, so that among equals a way
        by rank leads to the end without a loop.
        """
        back: dict[int, list[tuple[int, int]]] = {}
        for state, targets in enumerate(self._free):
            for target in targets:
                back.setdefault(target, []).append((state, 0))
        for state, steps in enumerate(self._steps):
            for _, target in steps:
                back.setdefault(target, []).append((state, 1))
        queue = [(0, 0, self._end)]
        pushed = 0
        while queue:
            distance, _, state = heapq.heappop(queue)
            if state in self._left:
                continue
            self._left[state] = distance
            self._order[state] = len(self._order)
            for before, cost in back.get(state, ()):
                if before not in self._left:
                    pushed += 1
                    heapq.heappush(queue, (distance + cost, pushed, before))


def _unanchored(node: Expression) -> Expression:
    """The expression without ``^`` at its beginning and ``$`` at its end."""
    if isinstance(node, Alt):
        return Alt(tuple(_unanchored(branch) for branch in node.branches))
    parts = node.parts if isinstance(node, Concat) else (node,)
    parts = parts[1:] if parts and parts[0] == Anchor("^") else parts
    parts = parts[:-1] if parts and parts[-1] == Anchor("$") else parts
    if len(parts) == 1 and isinstance(parts[0], Alt):
        return _unanchored(parts[0])
    return Concat(parts)


def _chosen(ranges: tuple[Range, ...]) -> int:
    for code in _PREFERRED:
        if any(low <= code <= high for low, high in ranges):
            return code
    return ranges[0][0]
