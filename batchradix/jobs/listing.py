"""Which files an input names: those below a folder, those that a pattern matches, here or remote.

What folders named ``key=value`` say of their files (Hive's way of parting a table) stands in
`InputFile.partition`: folders below the one that was named, or from a pattern's first wildcard on.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import unquote

from batchradix.errors import InputError
from batchradix.jobs.files import InputFile
from batchradix.jobs.remote import RemoteFile, file_system, reached

FORMAT_OF_SUFFIX = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
_COMPRESSED = (".gz", ".zst", ".zstd")
_WORK_SUFFIX = ".batchradix"  # of the folder beside an output
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"


def named_format(path: PurePath) -> str | None:
    """The format that a file's ending says, None where it says none that is known."""
    suffixes = [s.lower() for s in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return FORMAT_OF_SUFFIX.get(suffixes[-1]) if suffixes else None


def folder_files(folder: Path) -> list[InputFile]:
    """The files of known endings below a folder, in order of their paths; see `is_part`.

    Links are followed, and a folder or file that is reached twice is taken once. Raises
    `InputError` when there is none, or a folder or a file may not be read.
    """
    files = _distinct(_below(folder))
    if not files:
        raise _no_files(f"the folder {folder}")
    return _opened(files, len(folder.parts))


def pattern_files(pattern: str) -> list[InputFile]:
    """The files that a pattern matches, and those below the folders that it matches, by path.

    What is no part of the data (`is_part`) is matched by a pattern alone in which a name begins
    with ``.`` or ``_``. Raises `InputError` as `folder_files`.
    """
    root, escaped = _fixed_part(Path(pattern))
    shown = _names_hidden(Path(pattern).parts[len(root.parts) :])
    found: list[Path] = []
    for path in map(Path, sorted(glob.glob(escaped, recursive=True))):
        if not (shown or is_part(path.relative_to(root).parts)):
            continue
        if path.is_dir():
            found += _below(path)
        elif _may_be_file(path):
            found.append(path)
    files = _distinct(found)
    if not files:
        raise InputError(f"no file matches {pattern}")
    return _opened(files, len(root.parts))


def remote_files(address: str) -> list[InputFile] | str:
    """The files behind an address: one, a folder's or a pattern's, as for local ones.

    A local path where the address is but that of one. Raises `InputError`.
    """
    from fsspec.implementations.local import LocalFileSystem

    system, key = file_system(address)
    if isinstance(system, LocalFileSystem):
        return key
    is_pattern = glob.has_magic(key)
    try:
        with reached(address):
            kind = system.info(key)["type"]
    except InputError:
        if not is_pattern:
            raise
        kind = "pattern"
    if kind == "file":
        return [RemoteFile.of(system, key, address)]
    find = _remote_below if kind == "directory" else _remote_matches
    with reached(address):
        found = find(system, key)
    if not found:
        raise (
            _no_files(address) if kind == "directory" else InputError(f"no file matches {address}")
        )
    parts = PurePath(key).parts
    num_fixed = len(parts) if kind == "directory" else _num_fixed(parts)
    files = [RemoteFile.of(system, one) for one in sorted(found)]
    return _with_partitions(files, num_fixed)


def is_part(parts: Iterable[str]) -> bool:
    """Whether a file with these folders and this name belongs to the data: none of them begins
    with ``.`` or ``_`` (as ``_SUCCESS`` does; ``_key=value`` may), or is the work folder of an
    output."""
    return not any(
        part.startswith(".")
        or (part.startswith("_") and "=" not in part)
        or part.endswith(_WORK_SUFFIX)
        for part in parts
    )


def is_below(folder: Path, path: Path) -> bool:
    """Whether a file at this path would be among `folder_files`."""
    try:
        inner = PurePath(os.path.realpath(path)).relative_to(os.path.realpath(folder))
    except ValueError:
        return False
    return named_format(inner) is not None and is_part(inner.parts)


def _below(folder: Path) -> list[Path]:
    def fail(error: OSError) -> None:
        raise InputError(f"the folder {error.filename} cannot be read: {error.strerror}")

    found: list[Path] = []
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True, onerror=fail):
        real = os.path.realpath(place)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if is_part([name]))
        files = (Path(place, name) for name in names if is_part([name]))
        found += [path for path in files if named_format(path) and _may_be_file(path)]
    return sorted(found)


def _may_be_file(path: Path) -> bool:
    """Whether it is a regular file, or a link to nothing, which is then refused by name."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return True


def _distinct(paths: Iterable[Path]) -> list[Path]:
    found: dict[str, Path] = {}
    for path in paths:
        found.setdefault(os.path.realpath(path), path)
    return list(found.values())


def _fixed_part(pattern: Path) -> tuple[Path, str]:
    """The folder before a pattern's first wildcard, and the pattern with the brackets and stars
    in that folder's name escaped: a folder may be called ``run[1]``."""
    root = Path()
    parts = list(pattern.parts)
    while parts and (not glob.has_magic(parts[0]) or os.path.lexists(root / parts[0])):
        root /= parts.pop(0)
    return root, os.path.join(glob.escape(str(root)), *parts) if root.parts else str(pattern)


def _num_fixed(parts: Sequence[str]) -> int:
    """How many parts of a remote pattern come before its first wildcard."""
    return [*map(glob.has_magic, parts), True].index(True)


def _names_hidden(parts: Iterable[str]) -> bool:
    """Whether a pattern asks for what `is_part` leaves out."""
    return any(part[:1] in "._" for part in parts)


def _no_files(name: str) -> InputError:
    return InputError(
        f"{name} holds no file of rows (ending in {', '.join(FORMAT_OF_SUFFIX)}); files of other "
        f"names take a pattern such as '*.json'"
    )


def _opened(paths: Sequence[Path], num_fixed: int) -> list[InputFile]:
    return _with_partitions([InputFile.at(path) for path in paths], num_fixed)


def _remote_below(system: Any, folder: str) -> list[str]:
    return [
        key
        for key in system.find(folder)
        if named_format(PurePath(key)) and is_part(PurePath(key.removeprefix(folder)).parts)
    ]


def _remote_matches(system: Any, pattern: str) -> list[str]:
    parts = PurePath(pattern).parts
    num_fixed = _num_fixed(parts)
    shown = _names_hidden(parts[num_fixed:])
    found: dict[str, None] = {}
    for key, info in system.glob(pattern, detail=True).items():
        if not (shown or is_part(PurePath(key).parts[num_fixed:])):
            continue
        if info["type"] == "directory":
            found |= dict.fromkeys(_remote_below(system, key))
        else:
            found[key] = None
    return list(found)


def _with_partitions(files: Sequence[InputFile], num_fixed: int) -> list[InputFile]:
    """The files with what the folders behind the first ``num_fixed`` parts of their paths say:
    integers where all values of a key are (and are written as such, without leading zeros),
    text otherwise."""
    partitions: list[dict[str, int | str | None]] = []
    for file in files:
        folders = (part.partition("=") for part in file.path.parts[num_fixed:-1] if "=" in part)
        values = {unquote(key): unquote(value) for key, _, value in folders if key}
        partitions.append({k: None if v == _NULL_PARTITION else v for k, v in values.items()})
    for key in dict.fromkeys(key for partition in partitions for key in partition):
        having = [p for p in partitions if p.get(key) is not None]
        if all(_is_integer(str(p[key])) for p in having):
            for partition in having:
                partition[key] = int(str(partition[key]))
    return [
        replace(file, partition=partition)
        for file, partition in zip(files, partitions, strict=True)
    ]


def _is_integer(text: str) -> bool:
    is_digits = text.removeprefix("-").isdecimal() and text.isascii() and len(text) <= 20
    return is_digits and str(int(text)) == text and -(2**63) <= int(text) < 2**63
