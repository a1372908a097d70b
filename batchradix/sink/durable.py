"""Files that are either wholly there or not there at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_durably(data: bytes | memoryview, partial: Path, target: Path) -> None:
    """Puts ``data`` at ``target``: written to ``partial``, synced, renamed, folder synced.

    Both paths lie on one file system. Raises `OSError`; ``partial`` is removed then and
    ``target`` is what it was before.
    """
    view = memoryview(data)
    try:
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(partial, target)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def publish(partial: Path, target: Path) -> None:
    """Syncs the finished file ``partial`` and renames it to ``target``. Raises `OSError`."""
    sync_path(partial)
    os.replace(partial, target)
    sync_folder(target.parent)


def sync_path(path: Path) -> None:
    """Waits until the file's bytes are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(path: Path) -> None:
    """Makes renames inside the folder last; file systems that cannot are left alone."""
    fd = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)
