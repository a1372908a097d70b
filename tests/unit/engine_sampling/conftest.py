"""A byte vocabulary: token id = byte value, then eight special tokens, as tiny models have it."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from batchradix.engine.grammar.compiler import CompiledGrammar, GrammarCompiler
from batchradix.engine.sampling import SamplingBatch
from batchradix.types import GrammarSpec, RowSettings

VOCAB_SIZE = 264
EOS_IDS = frozenset({258, 263})


@dataclass(frozen=True)
class ByteTokens:
    token_bytes: tuple[bytes, ...]

    def encode_plain(self, texts: list[str], at_start: list[bool]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]


class ByteDetokenizer:
    """Incremental UTF-8, the plain way."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(bytes([token_id]) if token_id < 256 else b"")

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def byte_compiler() -> GrammarCompiler:
    return make_compiler()


def make_compiler(
    eos_ids: frozenset[int] = EOS_IDS, vocab_size: int = VOCAB_SIZE, **options: Any
) -> GrammarCompiler:
    tokens = ByteTokens(tuple(bytes([i]) for i in range(256)) + (b"",) * 8)
    return GrammarCompiler(tokens, vocab_size, eos_ids, **options)


@pytest.fixture(scope="session")
def new_compiler() -> Callable[..., GrammarCompiler]:
    return make_compiler


@pytest.fixture(scope="session")
def new_detokenizer() -> Callable[[], ByteDetokenizer]:
    return ByteDetokenizer


@pytest.fixture(scope="session")
def compile_schema(byte_compiler: GrammarCompiler) -> Callable[[Any], CompiledGrammar]:
    def compile_(schema: Any) -> CompiledGrammar:
        source = json.dumps(schema, ensure_ascii=False)
        return byte_compiler.compile(GrammarSpec(kind="json_schema", source=source))

    return compile_


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., SamplingBatch]:
    def make(settings: list[RowSettings], **parts: Any) -> SamplingBatch:
        n = len(settings)
        return SamplingBatch(
            settings=settings,
            rng_key=parts.get("rng_key", np.arange(n, dtype=np.uint64)),
            num_generated=parts.get("num_generated", np.zeros(n, dtype=np.int64)),
            prompt_ids=parts.get("prompt_ids", [np.zeros(0, dtype=np.uint32)] * n),
            generated_ids=parts.get("generated_ids", [[]] * n),
            bitmask=parts.get("bitmask"),
            masked_rows=parts.get("masked_rows", np.zeros(n, dtype=np.bool_)),
        )

    return make
