"""Byte strings through a pipe: eight bytes of length, then the bytes."""

from __future__ import annotations

import struct
from typing import BinaryIO

_LENGTH = struct.Struct(">Q")


def write_frame(pipe: BinaryIO, content: bytes) -> None:
    pipe.write(_LENGTH.pack(len(content)))
    pipe.write(content)
    pipe.flush()


def read_frame(pipe: BinaryIO) -> bytes:
    """The next frame. Raises `EOFError` where the other side ended before it was whole."""
    (length,) = _LENGTH.unpack(_read(pipe, _LENGTH.size))
    return _read(pipe, length)


def _read(pipe: BinaryIO, size: int) -> bytes:
    content = pipe.read(size)
    if len(content) < size:
        raise EOFError("the other process ended")
    return content
