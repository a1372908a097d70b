"""A finite set of strings as grammar rules that share every prefix and every suffix.

xgrammar spells an enum as one alternative a value, which takes tens of seconds to compile at
twenty thousand values. The rules here accept exactly the same strings: they are the minimal
acyclic automaton of the set (its trie with equal subtrees merged), chains written as one
literal.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

_END = -1


def enum_rules(values: Iterable[str], rule: str) -> list[str]:
    """EBNF rules ``rule``, ``rule_0``, ... whose strings are the JSON spellings of ``values``.

    A spelling is compact, non-ASCII text written as itself. No spelling is a prefix of another
    (each ends in its only bare quote), so every path ends where the graph does. ``values``
    holds at least one string, none with a lone surrogate (UnicodeEncodeError otherwise).
    """
    children: list[dict[str, int]] = [{}]
    for value in values:
        spelling = json.dumps(value, ensure_ascii=False)
        spelling.encode("utf-8")
        node = 0
        for char in spelling:
            following = children[node].get(char)
            if following is None:
                following = children[node][char] = len(children)
                children.append({})
            node = following
    # A child is made after its parent, so backwards every child comes first. `label[n]` and
    # `target[n]` say what leads on from node n: a literal, then a shared rule or the end.
    label = [""] * len(children)
    target = [_END] * len(children)
    shared: dict[tuple[tuple[str, int], ...], int] = {}
    rules: list[str] = []
    for node in range(len(children) - 1, -1, -1):
        edges = tuple(sorted((c + label[k], target[k]) for c, k in children[node].items()))
        if len(edges) == 1:
            label[node], target[node] = edges[0]
        elif edges:
            number = shared.get(edges)
            if number is None:
                number = shared[edges] = len(rules)
                alternatives = " | ".join(_sequence(s, t, rule) for s, t in edges)
                rules.append(f"{rule}_{number} ::= {alternatives}")
            target[node] = number
    return [f"{rule} ::= {_sequence(label[0], target[0], rule)}", *rules]


def _sequence(literal: str, target: int, rule: str) -> str:
    parts = ['"' + "".join(map(_escaped, literal)) + '"'] if literal else []
    if target != _END:
        parts.append(f"{rule}_{target}")
    return "(" + " ".join(parts) + ")"


def _escaped(char: str) -> str:
    if char.isascii() and (char.isalnum() or char in " _-"):
        return char
    code = ord(char)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
