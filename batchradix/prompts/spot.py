"""Whether the texts of one place in a job's prompts repeat enough to be looked up."""

from __future__ import annotations

_JUDGED_TEXTS = 128
# What encoding a piece by itself takes beyond its characters, and looking it up, in characters.
_NEW_PIECE_CHARS = 20


class Spot:
    """Counts what looking texts up saves, and judges by the last texts."""

    __slots__ = ("_found_chars", "_num_new", "_texts", "looks_up")

    def __init__(self) -> None:
        self.looks_up = True
        """Whether texts are to be cut into pieces, looked up and kept."""
        self._texts = self._found_chars = self._num_new = 0

    def note(self, found_chars: int, num_new: int) -> None:
        """A text of which ``found_chars`` need no encoding, in ``num_new`` pieces the rest."""
        self._texts += 1
        self._found_chars += found_chars
        self._num_new += num_new
        if self._texts == _JUDGED_TEXTS:
            self.looks_up = self._found_chars > _NEW_PIECE_CHARS * self._num_new
            self._texts = self._found_chars = self._num_new = 0
