"""The header of a GGUF file: its metadata and where its tensors lie.

Format: version 2 and 3 of the GGUF specification of ggml, little-endian. The ``gguf`` package
reads the same but makes an array object of every token of the vocabulary, which takes seconds.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchradix.errors import ModelError

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """One tensor; ``shape`` is in the order of numpy (slowest first), ``offset`` in the file."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """``metadata`` by key (numbers, strings, lists); ``tensors`` by name."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    header_bytes: int


def read_gguf_header(path: Path) -> GgufHeader:
    """Reads the header and checks that the file is as long as its tensors need.

    Raises `ModelError` naming the file when it is no GGUF file, is cut short or damaged, or
    holds tensors in a quantisation that cannot be read.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelError(f"{path} is not a GGUF file; give a .gguf file or a model folder")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).header()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    except (struct.error, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise ModelError(_damaged(path, "its header breaks off or is garbled")) from error


def _damaged(path: Path, what: str) -> str:
    return f"{path} is damaged: {what}; fetch the file again"


class _Reader:
    """Walks through the header; ``at`` is the next byte."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 4

    def header(self) -> GgufHeader:
        version = self._unpack("I")
        if version not in (2, 3):
            what = "big-endian" if version & 0xFFFF == 0 else f"of version {version}"
            raise ModelError(
                f"{self.path} is a GGUF file {what}, which cannot be read; "
                f"convert it to little-endian GGUF version 3"
            )
        num_tensors, num_pairs = self._unpack("Q"), self._unpack("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string()
            metadata[key] = self._value(self._unpack("I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(_damaged(self.path, f"its alignment is {alignment!r}"))
        header_bytes = self.at + -self.at % alignment
        tensors = {}
        for name, dims, ggml_type, offset in infos:
            num_bytes = _num_bytes(self.path, name, dims, ggml_type)
            start = header_bytes + offset
            if start + num_bytes > len(self.data):
                raise ModelError(
                    _damaged(
                        self.path,
                        f"it has {len(self.data):,} bytes, but tensor {name} ends at "
                        f"{start + num_bytes:,}",
                    )
                )
            tensors[name] = GgufTensor(
                name=name,
                shape=tuple(reversed(dims)),
                ggml_type=ggml_type,
                offset_bytes=start,
                num_bytes=num_bytes,
            )
        return GgufHeader(metadata=metadata, tensors=tensors, header_bytes=header_bytes)

    def _unpack(self, code: str) -> Any:
        code = "<" + code
        value = struct.unpack_from(code, self.data, self.at)[0]
        self.at += struct.calcsize(code)
        return value

    def _string(self) -> str:
        length = self._unpack("Q")
        end = self.at + length
        if end > len(self.data):
            raise struct.error
        text = self.data[self.at : end].decode()
        self.at = end
        return text

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._unpack(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth > 3:
            raise ModelError(_damaged(self.path, f"it holds a value of unknown type {kind}"))
        item_kind, count = self._unpack("I"), self._unpack("Q")
        if item_kind in _SCALARS:
            code = f"<{count}{_SCALARS[item_kind]}"
            if struct.calcsize(f"<{_SCALARS[item_kind]}") * count > len(self.data) - self.at:
                raise struct.error
            values = struct.unpack_from(code, self.data, self.at)
            self.at += struct.calcsize(code)
            return list(values)
        if count * 8 > len(self.data) - self.at:  # a string takes 8 bytes at least
            raise struct.error
        if item_kind == _STRING:
            return self._strings(count)
        return [self._value(item_kind, depth + 1) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """As ``count`` calls of `_string`; vocabularies are what opening a file spends time on."""
        data, at, size = self.data, self.at, len(self.data)
        unpack = struct.Struct("<Q").unpack_from
        texts = []
        for _ in range(count):
            end = at + 8 + unpack(data, at)[0]
            if end > size:
                raise struct.error
            texts.append(data[at + 8 : end].decode())
            at = end
        self.at = at
        return texts

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._unpack("I")
        if num_dims > 8:
            raise ModelError(_damaged(self.path, f"tensor {name} has {num_dims} dimensions"))
        dims = tuple(self._unpack("Q") for _ in range(num_dims))
        if 0 in dims:
            raise ModelError(_damaged(self.path, f"tensor {name} has no elements"))
        return name, dims, self._unpack("I"), self._unpack("Q")


def _num_bytes(path: Path, name: str, dims: tuple[int, ...], ggml_type: int) -> int:
    """Bytes of a tensor whose fastest dimension is ``dims[0]``."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(ggml_type)]
    except (ValueError, KeyError):
        raise ModelError(
            f"{path}: tensor {name} is stored in ggml type {ggml_type}, which is unknown here; "
            f"use a file in another quantisation, such as Q8_0 or Q4_K_M"
        ) from None
    num_elements = 1
    for size in dims:
        num_elements *= size
    if dims and dims[0] % block:
        raise ModelError(
            _damaged(path, f"tensor {name} has rows of {dims[0]} in blocks of {block}")
        )
    return num_elements // int(block) * int(block_bytes)
