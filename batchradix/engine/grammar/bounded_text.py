"""Strings with a length bound, as rules whose masks are known once the grammar is compiled.

xgrammar counts characters by repeating a rule. Such a rule cannot hold escapes and stay fast: as
soon as it has two alternatives every mask inside the string is worked out anew, token by token,
which takes longer than a step of the model. Here each number of characters that are left is a
rule of its own, shared by all strings of the schema, so that every mask is worked out once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from batchradix.schema.keywords import EXACT_LENGTH

# What xgrammar makes of a string with a length bound: the repeated rule, and where it stands. Of
# one character at most it makes a rule that is not repeated, of exactly one no rule at all.
_CHARACTER = r"\[\^\\\"\\\\\\r\\n\]"
_RULE = re.compile(rf"^(\w+_characters) ::= \(\({_CHARACTER}\)\)$", re.MULTILINE)
_USE = re.compile(r'"\\"" (\w+_characters)\{(\d+), (-?\d+)\} "\\""')
_OPTIONAL_RULE = re.compile(rf'^(\w+) ::= \("" \| \({_CHARACTER}\)\)$', re.MULTILINE)
_OPTIONAL_USE = re.compile(r'"\\"" (\w+) "\\""')
_SINGLE = re.compile(rf'"\\"" {_CHARACTER} "\\""')

_PLAIN = r"[^\0-\x1f\"\\]"
_HEX = "[A-Fa-f0-9]"
# An escape counts as the one character it stands for, so those of half a surrogate pair, of
# which JSON Schema counts two as one, are left out: such characters can be written themselves.
_ESCAPE = (
    r'text_escape ::= (("\\" [\"\\/bfnrt])'
    rf' | ("\\u" [0-9A-CEFa-cef] {_HEX} {_HEX} {_HEX}) | ("\\u" [Dd] [0-7] {_HEX} {_HEX}))'
)


def with_bounded_text(printed: str) -> str:
    """A grammar as xgrammar prints it, with its bounded strings as said above.

    They hold escapes (quotes, line ends) and no raw control characters, which JSON forbids. Where
    more than `EXACT_LENGTH` characters may be left out, a string with an escape is not bounded
    after it; nor may the first characters be escapes where more than that are required.
    """
    counted, optional = set(_RULE.findall(printed)), set(_OPTIONAL_RULE.findall(printed))
    if not counted and not optional and _SINGLE.search(printed) is None:
        return printed
    rules = _Rules()

    def replaced(match: re.Match[str]) -> str:
        if match[1] not in counted:
            return match[0]
        most = int(match[3])
        return rules.text(int(match[2]), None if most < 0 else most)

    text = _USE.sub(replaced, printed)
    text = _OPTIONAL_USE.sub(lambda m: rules.text(0, 1) if m[1] in optional else m[0], text)
    text = _SINGLE.sub(lambda _: rules.text(1, 1), text)
    text = _OPTIONAL_RULE.sub("", _RULE.sub("", text)).rstrip("\n")
    return "\n".join([text, *rules.written.values(), _ESCAPE]) + "\n"


@dataclass(slots=True)
class _Rules:
    """The rules needed so far, by name."""

    written: dict[str, str] = field(default_factory=dict)

    def text(self, least: int, most: int | None) -> str:
        """What stands for a string of that many characters, its quotes included."""
        rest = self._left(None if most is None else most - least)
        if least > EXACT_LENGTH:
            return rf'"\"" {self._plain()}{{{least}, {least}}} {rest}'
        return rf'"\"" {self._required(least, rest)}'

    def _required(self, count: int, rest: str) -> str:
        """``count`` characters and then ``rest``."""
        following = rest
        for left in range(1, count + 1):
            following = self._rule(
                f"{rest}_after_{left}", f"({_PLAIN} {following}) | (text_escape {following})"
            )
        return following

    def _left(self, most: int | None) -> str:
        """At most ``most`` characters and the closing quote."""
        if most is None:
            return self._open()
        if most > EXACT_LENGTH:
            ends = self._rule("text_end", rf'("\"") | (text_escape {self._open()})')
            return self._rule(f"text_long_{most}", f"({self._plain()}{{0, {most}}} {ends})")
        name = self._rule("text_left_0", r'("\"")')
        for left in range(1, most + 1):
            name = self._rule(
                f"text_left_{left}", rf'("\"") | ({_PLAIN} {name}) | (text_escape {name})'
            )
        return name

    def _open(self) -> str:
        return self._rule("text_open", rf'("\"") | ({_PLAIN} text_open) | (text_escape text_open)')

    def _plain(self) -> str:
        return self._rule("text_plain", f"({_PLAIN})")

    def _rule(self, name: str, body: str) -> str:
        self.written.setdefault(name, f"{name} ::= ({body})")
        return name
