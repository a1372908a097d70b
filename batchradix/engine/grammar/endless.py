"""Finds grammars that allow texts to begin which can never end.

A schema that requires itself (``{"a": {"a": {"a": …``) is such a grammar: what must come next is
then text without end. It is told from the printed form of xgrammar's grammars: a rule can end
when one of its alternatives is made of things that can.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_RULE = re.compile(r"^([A-Za-z_][\w.-]*) ::= (.*)$", re.MULTILINE)
_PART = re.compile(
    r"""
    (?P<terminal> "(?:[^"\\]|\\.)*" | \[(?:[^\]\\]|\\.)*\] )
  | (?P<call> [A-Za-z_]\w*\((?:"(?:[^"\\]|\\.)*"|[^"()])*\) )
  | (?P<name> [A-Za-z_][\w.-]* )
  | (?P<repeat> \{\s*(?P<least>\d+)[^}]*\} | [*+?] )
  | (?P<mark> \(= | [()|] )
  | (?P<space> \s+ )
    """,
    re.VERBOSE,
)

_Parts = Sequence[tuple[str, str]]


def endless_rules(printed: str) -> frozenset[str]:
    """The rules of a grammar, as xgrammar prints it, from which no finite text follows.

    A form that is not understood is taken for one that ends.
    """
    rules = {match[1]: _parts(match[2]) for match in _RULE.finditer(printed)}
    known = {name: parts for name, parts in rules.items() if parts is not None}
    ending = set(rules) - set(known)
    waiting = list(known)
    while waiting:
        rest = [name for name in reversed(waiting) if not _ends(known[name], ending, known)]
        if len(rest) == len(waiting):
            break
        ending.update(set(waiting) - set(rest))
        waiting = rest
    return frozenset(waiting)


def _parts(body: str) -> list[tuple[str, str]] | None:
    """Kind and text of each part of a rule's body; None when something is not understood."""
    parts = []
    place = 0
    while place < len(body):
        match = _PART.match(body, place)
        if match is None:
            return None
        kind = match.lastgroup if match["repeat"] is None else "repeat"
        if kind == "repeat":
            least = match["least"] or ("1" if match[0] == "+" else "0")
            parts.append(("repeat", least))
        elif kind in ("name", "mark"):
            parts.append((str(kind), match[0]))
        elif kind != "space":
            parts.append(("terminal", match[0]))
        place = match.end()
    return parts


def _ends(parts: _Parts, ending: set[str], rules: Mapping[str, object]) -> bool:
    """Whether a body has an alternative made of terminals and ``ending`` rules only."""
    # Of every open bracket: whether an earlier alternative can end, and this one so far.
    stack = [[False, True]]
    last = True  # whether the last thing alone can end
    for place, (kind, text) in enumerate(parts):
        repeated = place + 1 < len(parts) and parts[place + 1] == ("repeat", "0")
        if kind == "terminal":
            last = True
        elif kind == "name":
            last = text in ending or text not in rules
        elif kind == "mark" and text in ("(", "(="):
            # What is only looked ahead for takes no text.
            stack.append([text == "(=", True])
            continue
        elif kind == "mark" and text == "|":
            stack[-1] = [stack[-1][0] or stack[-1][1], True]
            continue
        elif kind == "mark":
            earlier, this = stack.pop()
            last = earlier or this
            if not stack:
                return True  # brackets that do not match: not understood
        else:
            continue
        if not (last or repeated):
            stack[-1][1] = False
    return any(stack[0])
