"""An input file as it was when the job was opened, and the temporary copy of a pipe."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import IO, Any

from batchradix.errors import InputError

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_SKIPPABLE_FRAME_MAGIC = b"\x2a\x4d\x18"  # behind a byte from 0x50 to 0x5f
_BUFFER_BYTES = 1 << 20
_PIECE_BYTES = 1 << 14

Partition = Mapping[str, int | str | None]
"""What folders named ``key=value`` say of all rows of a file."""


@dataclass(frozen=True, slots=True)
class InputFile:
    """A local regular file with its size and time, so that a change between passes is seen.

    `RemoteFile` is one elsewhere. The suffixes of ``path`` say the format, ``name`` is what
    messages call the file.
    """

    path: PurePath
    name: str
    size_bytes: int
    mtime_ns: int
    partition: Partition = field(default_factory=dict, kw_only=True)

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
            raise self._changed()

    def _changed(self) -> InputError:
        return InputError(
            f"{self.name} changed while the job was reading it; "
            f"start again once nothing writes to it"
        )

    def head(self, num_bytes: int = 4096, *, decompress: bool = False) -> bytes:
        """The first bytes of the file, or of what it decompresses to; fewer where it is damaged."""
        found = b""
        with readable(self.name), self.open_stream() if decompress else self.open() as stream:
            try:
                while data := stream.read1(num_bytes - len(found)):
                    found += data
            except (EOFError, zlib.error, OSError):
                if not found:
                    raise
        return found

    def open(self) -> io.BufferedReader:
        """The bytes of the file as they are."""
        self.check_unchanged()
        with readable(self.name):
            return io.BufferedReader(io.FileIO(self.path), _BUFFER_BYTES)

    def open_stream(self) -> io.BufferedReader:
        """The bytes of the file, decompressed when it begins like gzip or Zstandard."""
        stream = self.open()
        with readable(self.name):
            magic = stream.read(4)
            stream.seek(0)
        if magic[:2] == GZIP_MAGIC:
            read = gzip.GzipFile(fileobj=stream).read1
        elif is_zstandard(magic):
            import pyarrow as pa

            read = pa.CompressedInputStream(pa.PythonFile(stream, "r"), "zstd").read
        else:
            return stream
        return io.BufferedReader(_Decompressed(read, stream), _BUFFER_BYTES)

    def parquet_source(self) -> Any:
        """What `pyarrow.parquet.ParquetFile` opens; to be closed where it can be."""
        return str(self.path)


class _Decompressed(io.RawIOBase):
    """A decompressor's output, up to the very byte where it fails; closes the compressed file."""

    def __init__(self, read: Callable[[int], bytes], compressed: IO[bytes]) -> None:
        self._read = read
        self._compressed = compressed

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._read(min(len(buffer), _PIECE_BYTES))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        super().close()
        self._compressed.close()


def is_zstandard(head: bytes) -> bool:
    """Whether bytes begin like Zstandard; parallel and seekable writers put a frame first that
    readers skip."""
    return head[:4] == ZSTD_MAGIC or (
        head[1:4] == _SKIPPABLE_FRAME_MAGIC and 0x50 <= head[0] <= 0x5F
    )


@contextlib.contextmanager
def readable(name: str, place: Callable[[], str] = str) -> Iterator[None]:
    """Turns what the operating system or a decompressor says into an `InputError`; ``place``
    says where in the file reading was, as `` after line 3``."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"there is no file {name}; check the path") from None
    except PermissionError:
        raise InputError(f"{name} may not be read: permission denied") from None
    except IsADirectoryError:
        raise InputError(f"{name} is a folder, not a file") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _damaged(name, place(), error) from None
    except OSError as error:
        if error.strerror is None:  # from a decompressor, not from the operating system
            raise _damaged(name, place(), error) from None
        raise InputError(f"{name} cannot be read: {error.strerror}") from None


def _damaged(name: str, place: str, error: Exception) -> InputError:
    return InputError(
        f"{name} is damaged or cut short{place}: {first_line(error)}; make or fetch it again"
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without a closing full stop."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def pieces_of(pipe: IO[bytes]) -> Iterator[bytes]:
    """The bytes of a pipe until its end."""
    while data := pipe.read(_BUFFER_BYTES):
        yield data


class Spool:
    """A temporary copy of what can be read once only, in pieces; `close` deletes it.

    ``suffix`` ends the name of the copy. Raises `InputError` where reading fails, or writing.
    """

    def __init__(self, pieces: Iterable[Any], name: str, suffix: str = "") -> None:
        self._file = tempfile.NamedTemporaryFile(  # noqa: SIM115
            prefix="batchradix-input-", suffix=suffix
        )
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
