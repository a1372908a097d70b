"""The digest that names a model's content, for resume keys and fingerprints."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from batchradix.errors import ModelError

FULL_HASH_BYTES = 2 * 2**30
_EDGE_BYTES = 2**20
_CHUNK_BYTES = 2**20
_SETTINGS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


def content_hash(
    path: Path, kind: Literal["safetensors", "gguf"], weight_files: tuple[Path, ...]
) -> str:
    """Hex SHA-256 over what decides a model's answers; where it lies does not matter.

    It covers the bytes of the settings, tokenizer and template files and, of every weight file,
    name, size and SHA-256. Weights of more than `FULL_HASH_BYTES` together would take too long:
    then name, size, the safetensors header and the first and last MiB of each file stand for it.
    A GGUF file's name does not count, its content is all there is. Raises `ModelError` when a
    file cannot be read.
    """
    try:
        return _content_hash(path, kind, weight_files)
    except OSError as error:
        name = error.filename or path
        raise ModelError(f"{name} cannot be read: {error.strerror or error}") from error


def _content_hash(
    path: Path, kind: Literal["safetensors", "gguf"], weight_files: tuple[Path, ...]
) -> str:
    digest = hashlib.sha256(b"batchradix model 1\n")
    if kind == "safetensors":
        for name in _SETTINGS:
            if (path / name).is_file():
                digest.update(f"{name} {file_sha256(path / name)}\n".encode())
    whole = sum(file.stat().st_size for file in weight_files) <= FULL_HASH_BYTES
    for file in weight_files:
        name = file.name if kind == "safetensors" else "gguf"
        content = file_sha256(file) if whole else _edges_sha256(file, kind)
        digest.update(f"{name} {file.stat().st_size} {content}\n".encode())
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _edges_sha256(path: Path, kind: str) -> str:
    digest = hashlib.sha256()
    for chunk in _edges(path, kind):
        digest.update(chunk)
    return digest.hexdigest()


def _edges(path: Path, kind: str) -> Iterator[bytes]:
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        head = _EDGE_BYTES
        if kind == "safetensors":
            head = max(head, 8 + int.from_bytes(file.read(8), "little"))
            file.seek(0)
        while head > 0 and (chunk := file.read(min(head, _CHUNK_BYTES))):
            head -= len(chunk)
            yield chunk
        file.seek(max(0, num_bytes - _EDGE_BYTES))
        yield file.read(_EDGE_BYTES)
