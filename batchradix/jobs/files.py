"""An input file as it was when the job was opened, and the temporary copy of a pipe."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

from batchradix.errors import InputError

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class InputFile:
    """A local regular file with its size and time, so that a change between passes is seen."""

    path: Path
    name: str
    size_bytes: int
    mtime_ns: int

    @classmethod
    def at(cls, path: Path, name: str | None = None) -> InputFile:
        """Raises `InputError` when the file is missing or may not be read."""
        name = name or str(path)
        with readable(name), open(path, "rb") as stream:
            stat = os.fstat(stream.fileno())
        return cls(path, name, stat.st_size, stat.st_mtime_ns)

    def check_unchanged(self) -> None:
        """Raises `InputError` when the file is no longer the one that was opened."""
        with readable(self.name):
            stat = os.stat(self.path)
        if (stat.st_size, stat.st_mtime_ns) != (self.size_bytes, self.mtime_ns):
            raise InputError(
                f"{self.name} changed while the job was reading it; "
                f"start again once nothing writes to it"
            )

    def head(self, num_bytes: int = 4096, *, decompress: bool = False) -> bytes:
        """The first bytes of the file, or of what it decompresses to."""
        with readable(self.name), self.open_stream() if decompress else self.open() as stream:
            return stream.read(num_bytes)

    def open(self) -> IO[bytes]:
        """The bytes of the file as they are."""
        self.check_unchanged()
        with readable(self.name):
            return open(self.path, "rb", buffering=_BUFFER_BYTES)

    def open_stream(self) -> IO[bytes]:
        """The bytes of the file, decompressed when it begins like gzip or Zstandard."""
        stream = self.open()
        with readable(self.name):
            magic = stream.read(4)
            stream.seek(0)
        if magic[:2] == GZIP_MAGIC:
            stream.close()
            return io.BufferedReader(gzip.open(self.path, "rb"), _BUFFER_BYTES)
        if magic == ZSTD_MAGIC:
            import pyarrow as pa

            stream.close()
            raw = pa.CompressedInputStream(pa.OSFile(str(self.path), "rb"), "zstd")
            return io.BufferedReader(raw, _BUFFER_BYTES)
        return stream


@contextlib.contextmanager
def readable(name: str) -> Iterator[None]:
    """Turns what the operating system or a decompressor says into an `InputError`."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"there is no file {name}; check the path") from None
    except PermissionError:
        raise InputError(f"{name} may not be read: permission denied") from None
    except IsADirectoryError:
        raise InputError(f"{name} is a folder, not a file") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{name} is damaged or cut short: {error}") from None
    except OSError as error:
        if error.strerror is None:  # from a decompressor, not from the operating system
            raise InputError(f"{name} is damaged or cut short: {first_line(error)}") from None
        raise InputError(f"{name} cannot be read: {error.strerror}") from None


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without a closing full stop."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def pieces_of(pipe: BinaryIO) -> Iterator[bytes]:
    """The bytes of a pipe until its end."""
    while data := pipe.read(_BUFFER_BYTES):
        yield data


class Spool:
    """A temporary copy of what can be read once only, in pieces; `close` deletes it.

    Raises `InputError` where reading fails, or writing.
    """

    def __init__(self, pieces: Iterable[Any], name: str) -> None:
        self._file = tempfile.NamedTemporaryFile(prefix="batchradix-input-")  # noqa: SIM115
        try:
            with readable(name):
                self._copy(pieces, name)
            self.file = InputFile.at(Path(self._file.name), name)
        except BaseException:
            self.close()
            raise

    def _copy(self, pieces: Iterable[Any], name: str) -> None:
        for data in pieces:
            try:
                self._file.write(data)
                self._file.flush()
            except OSError as error:
                raise InputError(
                    f"{name} is copied to the folder {tempfile.gettempdir()} first, and that "
                    f"failed: {error.strerror or error}; free some space or set TMPDIR to another "
                    f"folder"
                ) from None

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk may refuse what is still buffered
            self._file.close()
