"""What was measured on this machine, kept in the cache folder for later runs.

A table is one JSON file, named by the SHA-256 of its key, which is all that its numbers depend on.
What is not whole, not ours or of another key is as good as absent.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchradix.checkpoint.cache_folder import is_own_file, make_cache_folder, replacing

_MAX_BYTES = 1 << 16

NO_TABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What reading a table raises that is not there or not to be trusted."""


def write_table(folder: Path, kind: str, key: Mapping[str, Any], **content: Any) -> Path:
    """Keeps a table of ``kind`` (a folder in the cache folder) in the place of an older one, and
    returns its file. Raises `ModelError` or `OSError` when the folder cannot be written."""
    make_cache_folder(folder)
    path = _path(folder, kind, key)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with replacing(path, suffix=".tmp") as file:
        file.write(json.dumps({"key": key, **content}, indent=1).encode())
    return path


def read_table(folder: Path, kind: str, key: Mapping[str, Any], name: str) -> Any:
    """What a table holds of that name; raises one of `NO_TABLE`."""
    with _path(folder, kind, key).open("rb") as file:
        if not is_own_file(os.fstat(file.fileno())):
            raise ValueError("other users could have written to it")
        found = json.loads(file.read(_MAX_BYTES))
    if found["key"] != key:
        raise ValueError("it is of another key")
    return found[name]


def _path(folder: Path, kind: str, key: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / kind / f"{digest}.json"
