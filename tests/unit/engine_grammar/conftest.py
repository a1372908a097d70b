"""A vocabulary in which tokens cross the seams of JSON: every byte, then some longer words."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from batchradix.engine.grammar.compiler import GrammarCompiler
from batchradix.engine.grammar.state import GrammarState
from batchradix.types import GrammarSpec

WORDS = (
    b'":', b'":"', b'"s', b'"sp', b'{"', b'","', b"am", b"spam", b'"}', b"kind", b"}x",
    "é".encode(), b"\xa9\"", b"\xc3", b"1,", b"true", b"tr",
)  # fmt: skip
EOS = 256 + len(WORDS)


class WordTokens:
    """Cuts text by the longest word; ``broken`` spells a text that it is given otherwise."""

    def __init__(self, *, first_space: bool = False, upper: bool = False) -> None:
        self.token_bytes = (*(bytes([i]) for i in range(256)), *WORDS, b"")
        self._first_space = first_space
        self._upper = upper

    def encode_plain(self, texts: Sequence[str], at_start: Sequence[bool]) -> list[list[int]]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> list[int]:
        rest = (b" " if self._first_space else b"") + text.encode()
        if self._upper:
            rest = rest.upper()
        ids = []
        while rest:
            fitting = [
                i for i, word in enumerate(self.token_bytes) if word and rest.startswith(word)
            ]
            ids.append(max(fitting, key=lambda i: (len(self.token_bytes[i]), -i)))
            rest = rest[len(self.token_bytes[ids[-1]]) :]
        return ids


def make_compiler(**options: bool) -> GrammarCompiler:
    return GrammarCompiler(WordTokens(**options), EOS + 4, [EOS])


@pytest.fixture(scope="session")
def compiler() -> GrammarCompiler:
    return make_compiler()


@pytest.fixture(scope="session")
def new_compiler() -> Callable[..., GrammarCompiler]:
    return make_compiler


@pytest.fixture(scope="session")
def start(compiler: GrammarCompiler) -> Callable[..., GrammarState]:
    """A state after some text: ``start(schema, '{"a":')``; a str is a regex."""

    def start_(schema: Any, text: str | bytes = "") -> GrammarState:
        spec = (
            GrammarSpec(kind="regex", source=schema)
            if isinstance(schema, str)
            else GrammarSpec(kind="json_schema", source=json.dumps(schema, ensure_ascii=False))
        )
        state = GrammarState(compiler.compile(spec))
        assert not text or state.accept_text(text)
        return state

    return start_


@pytest.fixture(scope="session")
def words() -> tuple[bytes, ...]:
    return WordTokens().token_bytes
