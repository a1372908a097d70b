"""Lone surrogates: half characters that JSON can spell and no encoding can write."""

from __future__ import annotations


def clean_text(text: str) -> str:
    """``text`` with surrogate pairs joined and every lone surrogate replaced by U+FFFD.

    Clean text is returned as the same object, so ``is`` tells whether anything was replaced.
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
