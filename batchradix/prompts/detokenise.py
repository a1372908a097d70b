"""Token ids of an answer back to text, as they come."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class IncrementalDetokenizer:
    """Decodes answers token by token; implements `types.Detokenizer`.

    ``token_bytes``: the bytes of every id, as `Tokenizer.token_bytes` has them; special tokens
    are empty and so yield nothing. The text is that of the bytes: unlike a tokenizer's own
    decoder it keeps a space that begins the answer.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes

    def start(self) -> IncrementalState:
        """The state of one answer."""
        return IncrementalState(self._token_bytes)


class IncrementalState:
    """Incremental UTF-8 decoding of one answer; implements `types.DetokenizerState`."""

    __slots__ = ("_decoder", "_token_bytes")

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Text that became certain with this token: whole characters, and U+FFFD for bytes that
        no further byte can make one. An id beyond the tokenizer's yields nothing."""
        if not 0 <= token_id < len(self._token_bytes):
            return ""
        return self._decoder.decode(self._token_bytes[token_id])

    def finish(self) -> str:
        """What is left; an unfinished character is U+FFFD."""
        return self._decoder.decode(b"", final=True)
