"""Any text as a terminal may show it: nothing in it moves, hides or colours anything."""

from __future__ import annotations

import unicodedata

_UNSEEN = ("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp")


def visible(text: str) -> str:
    """The text with control characters made visible; line breaks stay. The brackets ⟦ and ⟧, which
    mark special tokens, are spelt out."""
    return "".join(map(_visible_character, text))


def one_line(text: str, most: int | None = None) -> str:
    """As `visible`, with line breaks as ⏎, and cut to ``most`` characters."""
    begun = text if most is None else text[: most + 1]
    shown = visible(begun).replace("\n", "⏎")
    return shown if most is None or len(shown) <= most else f"{shown[: max(0, most - 1)]}…"


def _visible_character(char: str) -> str:
    code = ord(char)
    if char == "\n":
        return char
    if code < 0x20:
        return chr(0x2400 + code)  # control pictures
    if code == 0x7F:
        return "␡"
    if char in "⟦⟧" or unicodedata.category(char) in _UNSEEN:
        return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return char
