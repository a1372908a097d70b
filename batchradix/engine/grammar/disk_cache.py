"""Compiled grammars kept on disk for the next run.

An entry is one file: a line with the SHA-256 of the rest, a line of JSON, then the compiled
grammar as xgrammar serialises it (JSON), compressed. Nothing in it is executed. What is not
whole, not ours or of another version is as good as absent, and a folder that cannot be
written means no more than that nothing is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import zlib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import xgrammar

from batchradix.checkpoint.cache_folder import is_own_file, make_cache_folder, replacing
from batchradix.engine.grammar import (
    bounded_text,
    build,
    endless,
    json_grammar,
    tool_calls,
    word_graph,
)
from batchradix.engine.grammar.child import Serialised
from batchradix.errors import ModelError
from batchradix.schema import keywords, tool_styles
from batchradix.types import GrammarSpec

MAX_BYTES = 256 * 2**20
_MAX_ENTRY_BYTES = MAX_BYTES // 4
_ABANDONED_S = 3600.0
_SUFFIX = ".grammar"
_MADE_BY = (
    bounded_text,
    build,
    endless,
    json_grammar,
    keywords,
    tool_calls,
    tool_styles,
    word_graph,
)


class GrammarDiskCache:
    """``folder``: the cache folder, in which ``grammars`` is made when something is kept.

    The least recently used entries go when all take more than ``max_bytes``. Safe to use from
    several processes at once.
    """

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._base = folder
        self._folder = folder / "grammars"
        self._max_bytes = max_bytes

    def load(self, key: str) -> Serialised | None:
        """The entry of a key, None where there is none to be trusted."""
        path = self._folder / f"{key}{_SUFFIX}"
        try:
            with path.open("rb") as file:
                if not is_own_file(os.fstat(file.fileno())):
                    return None
                digest, _, rest = file.read(_MAX_ENTRY_BYTES + 1).partition(b"\n")
            if digest.decode() != hashlib.sha256(rest).hexdigest():
                return None
            head, _, packed = rest.partition(b"\n")
            facts = json.loads(head)
            if facts["key"] != key:
                return None
            found = Serialised(
                native=zlib.decompress(packed),
                always_ends=bool(facts["always_ends"]),
                notices=tuple(map(str, facts["notices"])),
            )
            os.utime(path)
        except (OSError, ValueError, KeyError, TypeError, zlib.error):
            return None
        return found

    def store(self, key: str, grammar: Serialised) -> None:
        """Keeps an entry, unless it is too large or the folder cannot be written."""
        facts = {"key": key, "always_ends": grammar.always_ends, "notices": grammar.notices}
        rest = json.dumps(facts).encode() + b"\n" + zlib.compress(grammar.native, 1)
        content = hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest
        if len(content) > min(_MAX_ENTRY_BYTES, self._max_bytes):
            return
        try:
            make_cache_folder(self._base)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            with replacing(self._folder / f"{key}{_SUFFIX}", suffix=".tmp") as file:
                file.write(content)
            self._shrink()
        except (OSError, ModelError):
            return

    def _shrink(self) -> None:
        entries: list[tuple[float, int, Path]] = []
        for path in self._folder.iterdir():
            try:
                info = path.stat()
                if path.suffix == _SUFFIX:
                    entries.append((info.st_mtime, info.st_size, path))
                elif path.suffix == ".tmp" and time.time() - info.st_mtime > _ABANDONED_S:
                    path.unlink()
            except OSError:  # another process was faster
                continue
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self._max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size


class GrammarKeys:
    """Names entries by all that a compiled grammar depends on."""

    def __init__(
        self, token_bytes: Sequence[bytes], vocab_size: int, stop_ids: Sequence[int]
    ) -> None:
        digest = hashlib.sha256()
        for token in token_bytes[:vocab_size]:
            digest.update(len(token).to_bytes(4, "big") + token)
        for module in _MADE_BY:  # our rewriting: a version number could be forgotten
            digest.update(Path(str(module.__file__)).read_bytes())
        facts = [vocab_size, list(stop_ids), _xgrammar_version()]
        digest.update(json.dumps(facts).encode())
        self._common = digest.digest()

    def key(self, spec: GrammarSpec) -> str:
        text = json.dumps([spec.kind, spec.source]).encode()
        return hashlib.sha256(self._common + text).hexdigest()


def _xgrammar_version() -> str:
    return f"{version('xgrammar')} {xgrammar.get_serialization_version()}"
