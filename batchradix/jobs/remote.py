"""Files behind an address (``s3://``, ``gs://``, ``hf://``, ``https://``...), through fsspec."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from batchradix.errors import InputError
from batchradix.jobs.files import InputFile, first_line

# What tells one content of a file from another. (The rest of what file systems say, such as the
# time it was last read, may change while it stays the same.)
_TAGS = (
    "ETag",
    "etag",
    "VersionId",
    "generation",
    "md5Hash",
    "content_md5",
    "blob_id",
    "LastModified",
    "last_modified",
    "mtime",
    "updated",
    "modified",
    "created",
)
_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "http": "aiohttp",
    "https": "aiohttp",
}


@dataclass(frozen=True, slots=True)
class RemoteFile(InputFile):
    """A file of an fsspec file system; its size and ``tag`` (ETag, checksum or time, whatever the
    file system has) tell whether it changed, without reading it."""

    system: Any
    key: str
    tag: str

    @classmethod
    def of(cls, system: Any, key: str, name: str | None = None) -> RemoteFile:
        """Raises `InputError` when the file is missing or may not be read."""
        name = name or str(system.unstrip_protocol(key))
        size_bytes, tag = _state(system, key, name)
        path = PurePosixPath(urlsplit(key).path if key.startswith("http") else key)
        return cls(path, name, size_bytes, 0, system, key, tag)

    def check_unchanged(self) -> None:
        """Raises `InputError` when the file is no longer the one that was opened."""
        with reached(self.name):
            self.system.invalidate_cache(self.key)
        if _state(self.system, self.key, self.name) != (self.size_bytes, self.tag):
            raise self._changed()

    def open(self) -> io.BufferedReader:
        """The bytes of the file as they are."""
        self.check_unchanged()
        return io.BufferedReader(_RemoteBytes(self), 1 << 20)

    def parquet_source(self) -> Any:
        """What `pyarrow.parquet.ParquetFile` opens; to be closed where it can be."""
        # One request a read: it is read at many places in turn, where reading ahead is wasted.
        return _RemoteBytes(self, cache_type="none")


def file_system(address: str) -> tuple[Any, str]:
    """The fsspec file system of an address, and the path there.

    Raises `InputError` when there is none for its protocol, or a package is missing.
    """
    import fsspec

    protocol = address.rpartition("::")[2].partition("://")[0]
    with reached(address):
        try:
            return fsspec.core.url_to_fs(address)  # type: ignore[no-any-return]
        except ImportError as error:
            package = _PACKAGES.get(protocol)
            remedy = f"`pip install {package}`" if package else first_line(error)
            raise InputError(
                f"{address} cannot be read: {protocol}:// needs a package that is not installed: "
                f"{remedy}"
            ) from None
        except ValueError as error:
            raise InputError(
                f"{address} is no address that can be read: {first_line(error)}"
            ) from None


@contextlib.contextmanager
def reached(name: str) -> Iterator[None]:
    """Turns whatever a file system raises into an `InputError`."""
    try:
        yield
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"there is no file {name}; check the address") from None
    except PermissionError as error:
        raise InputError(
            f"{name} may not be read: {first_line(error)}; check the credentials"
        ) from None
    except Exception as error:  # each file system has errors of its own
        raise InputError(
            f"{name} cannot be read: {type(error).__name__}: {first_line(error)}"
        ) from None


def _state(system: Any, key: str, name: str) -> tuple[int, str]:
    """The file's size in bytes (0 where the server does not tell) and its tag."""
    with reached(name):
        info = system.info(key)
        tags = [f"{field}={info[field]}" for field in _TAGS if info.get(field)]
        return int(info.get("size") or 0), " ".join(tags) or str(system.ukey(key))


class _RemoteBytes(io.RawIOBase):
    """An open remote file, whose errors are `InputError`s wherever it is read from."""

    def __init__(self, file: RemoteFile, **options: Any) -> None:
        self._name = file.name
        with reached(self._name):
            self._stream = file.system.open(file.key, "rb", **options)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with reached(self._name):
            data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with reached(self._name):
            return int(self._stream.seek(offset, whence))

    def tell(self) -> int:
        return int(self._stream.tell())

    def close(self) -> None:
        if not self.closed:
            with contextlib.suppress(Exception):
                self._stream.close()
        super().close()
