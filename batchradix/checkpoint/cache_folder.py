"""Where fetched models are kept."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from batchradix.errors import ModelError


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """The cache folder; it need not exist yet.

    ``BATCHRADIX_CACHE``, else ``XDG_CACHE_HOME/batchradix``, else ``~/.cache/batchradix``, else,
    without a home folder, one of this user's own under the system's folder for temporary files.
    """
    environ = os.environ if environ is None else environ  # datasets puts another object there
    if chosen := environ.get("BATCHRADIX_CACHE"):
        return Path(chosen).expanduser().absolute()
    if chosen := environ.get("XDG_CACHE_HOME"):
        return Path(chosen).absolute() / "batchradix"
    home = environ.get("HOME")
    if home and Path(home).is_dir():
        return Path(home) / ".cache" / "batchradix"
    return Path(tempfile.gettempdir()) / f"batchradix-{os.getuid()}"


def make_cache_folder(folder: Path) -> None:
    """Creates the folder. Raises `ModelError` when it cannot be, or is another user's."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if folder.parent == Path(tempfile.gettempdir()):
            _require_private(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ModelError(
            f"the cache folder {folder} cannot be written ({error.strerror or error}); "
            f"set BATCHRADIX_CACHE to a folder that can"
        ) from error


@contextmanager
def replacing(target: Path, *, prefix: str = "", suffix: str = "") -> Iterator[BinaryIO]:
    """A file to write that takes the place of ``target`` at the end, if nothing is raised before.

    There is never half of it under its name, and it is this user's alone. Until then its own name
    has ``prefix`` and ``suffix``, by which what a kill left behind is known. Raises `OSError`.
    """
    number, name = tempfile.mkstemp(dir=target.parent, prefix=prefix, suffix=suffix)
    try:
        with os.fdopen(number, "wb") as file:
            yield file
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def is_own_file(info: os.stat_result) -> bool:
    """Whether a file is this user's or the administrator's, and nobody else may write it."""
    return (
        stat.S_ISREG(info.st_mode) and info.st_uid in (0, os.getuid()) and not info.st_mode & 0o022
    )


def _require_private(folder: Path) -> None:
    """Under a folder that all users may write to, another could have put it there first."""
    info = folder.lstat()
    private = stat.S_ISDIR(info.st_mode) and not info.st_mode & 0o022
    if not private or info.st_uid != os.getuid():
        raise ModelError(
            f"the cache folder {folder} belongs to another user or is open to others; "
            f"set BATCHRADIX_CACHE to a folder of your own"
        )
