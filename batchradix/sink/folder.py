"""The work folder beside an output: who holds it, whose job it is, whether it is done.

``<output name>.batchradix/`` holds

- ``lock``: a ``flock`` held in the kernel for the run's life; it dies with its holder, so the
  file itself never blocks anyone. Its text (pid, host) is only what others are told;
- ``run.json``: the job's fingerprint, in words what its digests are of and, once finished, size
  and time of the output;
- ``shards/``: the committed results, which are the resume state (see `sink.shards`);
- ``tmp/``: what is being written; ``bad/``: damaged shards that were set aside;
- ``trace/``: where it was asked for, the steps of the runs (see `report.trace`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from batchradix.errors import OptionError, OutputHeldError, OutputMismatchError, SinkError
from batchradix.sink.durable import write_durably
from batchradix.sink.formats import output_format

WORK_SUFFIX = ".batchradix"
TRACE_FOLDER = "trace"
RUN_FILE = "run.json"
_HOLDER_WAIT_S = 0.5  # a holder needs a moment between taking the lock and writing its name


class RunFolder:
    """The work folder of one output, held by this process until `close`.

    ``output`` is the path results go to with links resolved, ``path`` the work folder,
    ``shown`` the output as the user wrote it. ``job`` is the digest of the fingerprint, which
    every shard carries; it is set by `check_fingerprint`. ``names``, set by whoever holds the
    folder, says in words what those entries of the fingerprint are that are digests.
    ``killed``: process and host of the holder before, where it did not come to its end.
    ``errors``, set likewise: the file beside the output that takes what failed, where there is one.
    """

    def __init__(
        self, output: Path, shown: str, path: Path, lock_fd: int, killed: str | None = None
    ) -> None:
        self.output = output
        self.shown = shown
        self.path = path
        self.job: str | None = None
        self.names: Mapping[str, str] = {}
        self.errors: Path | None = None
        self.killed = killed
        self._lock_fd: int | None = lock_fd
        _drop_lock_in_forks(self)

    @property
    def shards(self) -> Path:
        return self.path / "shards"

    @property
    def tmp(self) -> Path:
        return self.path / "tmp"

    @property
    def bad(self) -> Path:
        return self.path / "bad"

    @property
    def trace(self) -> Path:
        return self.path / TRACE_FOLDER

    @property
    def run_file(self) -> Path:
        return self.path / RUN_FILE

    @property
    def begun_s(self) -> int:
        """When this job was begun here, in seconds since 1970; 0 where that is not known."""
        begun = (_read_run(self.run_file) or {}).get("begun")
        return begun if isinstance(begun, int) else 0

    def close(self) -> None:
        """Lets the output go; idempotent. A folder in which nothing was begun is removed."""
        if self._lock_fd is None:
            return
        begun = self.run_file.exists() or any(self.shards.glob("*")) or self.bad.exists()
        if not begun:
            shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.ftruncate(self._lock_fd, 0)  # whoever finds a name in it finds a holder that died
        self._close_lock()

    def _close_lock(self) -> None:
        if self._lock_fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._lock_fd)
            self._lock_fd = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _drop_lock_in_forks(folder: RunFolder) -> None:
    """A forked child shares the lock and could outlive us with it; it closes its copy."""
    reference = weakref.ref(folder)

    def drop() -> None:
        held = reference()
        if held is not None:
            held._close_lock()

    os.register_at_fork(after_in_child=drop)


def check_output(path: str | os.PathLike[str]) -> Path:
    """The output's path with links resolved, if results can be written there.

    Raises `OptionError`: unknown extension, a folder of that name, or the folder it is to lie
    in is missing or not writable.
    """
    shown = os.fspath(path)
    try:
        output = Path(os.path.realpath(shown))
    except FileNotFoundError:
        raise OptionError(
            f"the output {shown} cannot be written: the current folder is gone; change to another"
        ) from None
    try:
        os.fspath(output).encode()
    except UnicodeEncodeError:  # Arrow opens no such file
        raise OptionError(
            f"the output {shown!a} has a path that is not UTF-8; choose another name or folder"
        ) from None
    if output.is_dir():
        raise OptionError(f"the output {shown} is a folder; give the name of a file in it")
    output_format(shown)
    parent = output.parent
    if not parent.is_dir():
        raise OptionError(
            f"the output {shown} cannot be written: there is no folder {parent}; create it first"
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        raise OptionError(
            f"the output {shown} cannot be written: the folder {parent} is not writable"
        )
    return output


def acquire(path: str | os.PathLike[str]) -> RunFolder:
    """Takes the output ``path`` for this process and makes its work folder.

    Raises `OptionError` as `check_output` does, and within a second `OutputHeldError` with pid
    and host when another run holds the output.
    """
    shown = os.fspath(path)
    output = check_output(path)
    work = output.with_name(output.name + WORK_SUFFIX)
    deadline = time.monotonic() + _HOLDER_WAIT_S
    killed: str | None = None
    while True:
        try:
            work.mkdir(exist_ok=True)
            fd = os.open(work / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # its last holder has just removed the folder
            if time.monotonic() < deadline:
                continue
            raise OptionError(f"the work folder {work} keeps vanishing") from None
        except (FileExistsError, NotADirectoryError):
            raise OptionError(
                f"the output {shown} cannot be written: {work}, the folder of its work, is a file; "
                f"move that file away or choose another output"
            ) from None
        except OSError as e:
            raise OptionError(
                f"the output {shown} cannot be written: {e.strerror or e} ({work})"
            ) from e
        try:
            if _take(fd, work / "lock", shown):
                killed = _holder(work / "lock")
                _sign(fd)
                break
            if time.monotonic() >= deadline:
                raise _held(work / "lock", shown)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        time.sleep(0.02)
    folder = RunFolder(output, shown, work, fd, killed)
    try:
        for part in (folder.shards, folder.tmp):
            part.mkdir(exist_ok=True)
    except OSError as e:
        folder.close()
        raise OptionError(f"the output {shown} cannot be written: {e.strerror or e}") from e
    return folder


def _take(fd: int, lock: Path, shown: str) -> bool:
    """Whether the lock is ours now; the file must still be the one others will open."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
            return False
        raise OptionError(
            f"the file system of the output {shown} has no file locks ({e.strerror}); "
            f"write to another one"
        ) from e
    try:
        current = os.stat(lock)
    except FileNotFoundError:
        return False
    ours = os.fstat(fd)
    return (current.st_dev, current.st_ino) == (ours.st_dev, ours.st_ino)


def _sign(fd: int) -> None:
    holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
    with contextlib.suppress(OSError):  # a full disk must not keep a finished run from its end
        os.ftruncate(fd, 0)
        os.pwrite(fd, holder, 0)


def _holder(lock: Path) -> str | None:
    """Who wrote its name into a lock and did not take it out; None where nobody can be read."""
    try:
        holder = json.loads(lock.read_text())
        return f"process {holder['pid']} on host {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _held(lock: Path, shown: str) -> OutputHeldError:
    who = _holder(lock) or "another process"
    return OutputHeldError(
        f"the output {shown} is held by {who}; wait until that run ends, "
        f"or give this one another output"
    )


def fingerprint_digest(fingerprint: Mapping[str, Any]) -> str:
    """Hex digest of a fingerprint; equal for equal JSON, whatever the order of its keys."""
    text = json.dumps(fingerprint, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def check_fingerprint(
    folder: RunFolder,
    fingerprint: Mapping[str, Any],
    *,
    restart: bool = False,
    remedy: Callable[[frozenset[str]], str] = lambda changed: (
        "give another output, or --restart to throw those results away"
    ),
) -> None:
    """Makes the folder this job's, or refuses one that holds another job's results.

    ``fingerprint`` is a JSON object; entries are compared one by one. With ``restart`` the
    folder is emptied first. A damaged ``run.json`` is written anew when every shard carries
    this job's digest, and that of a job which was stopped before its first result makes way.
    ``remedy`` says what can be done where the results are those of a job that differs in these
    entries.
    Raises `OutputMismatchError` naming what changed, or that a file of the output's name
    exists which no job of this folder wrote.
    """
    wanted: dict[str, Any] = json.loads(json.dumps(fingerprint))
    digest = fingerprint_digest(wanted)
    if restart:
        _empty(folder)
    state = _read_run(folder.run_file)
    if state is None:
        _check_unknown(folder, digest, restart=restart)
        _begin(folder, wanted)
    elif state["fingerprint"] != wanted and not _has_results(folder):
        _begin(folder, wanted)
    elif state["fingerprint"] != wanted:
        raise OutputMismatchError(
            f"{folder.shown} holds the results of another job ("
            + "; ".join(_changes(state, wanted, folder.names))
            + f"); {remedy(changed_entries(state['fingerprint'], wanted))}"
        )
    folder.job = digest


def other_job(
    output: Path, fingerprint: Mapping[str, Any], names: Mapping[str, str]
) -> tuple[frozenset[str], str]:
    """What tells the job whose results an output holds from that of a fingerprint: the entries,
    and in words (``names`` as in `RunFolder`); nothing where it is the same, or there are no
    results. Takes no lock and writes nothing."""
    try:
        state = json.loads((output.with_name(output.name + WORK_SUFFIX) / "run.json").read_bytes())
        found = state["fingerprint"]
        wanted = json.loads(json.dumps(fingerprint))
        return changed_entries(found, wanted), "; ".join(_changes(state, wanted, names))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return frozenset(), ""


def read_fingerprint(folder: RunFolder) -> dict[str, Any] | None:
    """The fingerprint of the job whose results the folder holds; None where it has none, or
    its ``run.json`` is damaged. Raises `SinkError` when it cannot be read."""
    state = _read_run(folder.run_file)
    if state is None or not _has_results(folder):
        return None
    found: dict[str, Any] = state["fingerprint"]
    return found


def adopt(folder: RunFolder, fingerprint: Mapping[str, Any]) -> None:
    """Makes the folder that of another job, unfinished. Raises `SinkError`."""
    wanted: dict[str, Any] = json.loads(json.dumps(fingerprint))
    _begin(folder, wanted)
    folder.job = fingerprint_digest(wanted)


def changed_entries(old: Mapping[str, Any], new: Mapping[str, Any]) -> frozenset[str]:
    """The entries in which two fingerprints differ."""
    wanted = json.loads(json.dumps(new))
    missing = object()
    return frozenset(
        key
        for key in old.keys() | wanted.keys()
        if old.get(key, missing) != wanted.get(key, missing)
    )


def _has_results(folder: RunFolder) -> bool:
    """Whether a mistaken option would throw away anything: a shard, or a finished output."""
    return any(folder.shards.iterdir()) or folder.bad.exists() or folder.output.exists()


def _empty(folder: RunFolder) -> None:
    try:
        for entry in folder.path.iterdir():
            if entry.name == "lock":
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        folder.shards.mkdir()
        folder.tmp.mkdir()
    except OSError as e:
        raise SinkError(
            f"the work folder {folder.path} cannot be emptied: {e.strerror or e}"
        ) from e


def _check_unknown(folder: RunFolder, digest: str, *, restart: bool) -> None:
    """No readable run.json: the shards' own digests decide, then a foreign output file."""
    from batchradix.sink.shards import shard_jobs

    jobs = shard_jobs(folder)
    if jobs - {digest}:
        raise OutputMismatchError(
            f"{folder.shown} holds the results of another job and its {folder.run_file.name} "
            f"is missing or damaged; give another output, or --restart to throw them away"
        )
    for path, shown in ((folder.output, folder.shown), (folder.errors, str(folder.errors))):
        if jobs or restart or path is None or not path.exists() or not path.stat().st_size:
            continue
        raise OutputMismatchError(
            f"{shown} exists already and {folder.path.name} beside it says nothing of "
            f"this job; give another output, or --restart to replace the file at the end"
        )


def _changes(
    state: Mapping[str, Any], new: Mapping[str, Any], names: Mapping[str, str]
) -> list[str]:
    """What tells the job of a ``run.json`` from the fingerprint ``new``, an entry each."""
    old, old_names = state["fingerprint"], state.get("names")
    if not isinstance(old_names, dict):
        old_names = {}
    changed = []
    for key in sorted(old.keys() | new.keys()):
        if key in names and key in old and old[key] != new[key]:
            before, now = _named(old_names.get(key), old[key]), _named(names[key], new[key])
            changed.append(f"{key}: {before} → {now}")
        elif key not in old:
            changed.append(f"{key}: none → {_short(new[key])}")
        elif key not in new:
            changed.append(f"{key}: {_short(old[key])} → none")
        elif old[key] != new[key]:
            changed.append(f"{key}: {_differing(old[key], new[key])}")
    return changed


def _named(name: str | None, digest: str) -> str:
    """A digest in words; a run.json of an earlier version has none for it."""
    return f"{name or 'another one'} (content {digest[:8]})"


def _differing(old: Any, new: Any, limit: int = 60) -> str:
    """Both values, shortened around the place where they first differ."""
    a, b = (x if isinstance(x, str) else json.dumps(x, ensure_ascii=False) for x in (old, new))
    if len(a) <= limit and len(b) <= limit:
        return f"{_short(old)} → {_short(new)}"
    start = max(0, _num_common(a, b) - 15)
    return f"{_short(a, limit, start)} → {_short(b, limit, start)}"


def _num_common(a: str, b: str) -> int:
    """Characters two texts have in common from their beginning on."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def _short(value: Any, limit: int = 60, start: int = 0) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    cut = text[start : start + limit]
    shown = ("…" if start else "") + cut + ("…" if start + limit < len(text) else "")
    return json.dumps(shown, ensure_ascii=False) if isinstance(value, str) else shown


def _read_run(run_file: Path) -> dict[str, Any] | None:
    """What run.json says, or None when it is missing or damaged."""
    try:
        state = json.loads(run_file.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    except OSError as e:
        raise SinkError(f"{run_file} cannot be read: {e.strerror or e}") from e
    if not isinstance(state, dict) or not isinstance(state.get("fingerprint"), dict):
        return None
    return state


def _begin(folder: RunFolder, fingerprint: Mapping[str, Any]) -> None:
    _write_run(
        folder,
        {
            "fingerprint": fingerprint,
            "names": dict(folder.names),
            "begun": int(time.time()),
            "finished": False,
        },
    )


def _write_run(folder: RunFolder, state: Mapping[str, Any]) -> None:
    data = json.dumps(state, ensure_ascii=False, indent=1).encode("utf-8", "backslashreplace")
    try:
        write_durably(data, folder.tmp / "run.json", folder.run_file)
    except OSError as e:
        raise SinkError(f"{folder.run_file} cannot be written: {e.strerror or e}") from e


def came_to_its_end(work: Path) -> bool:
    """Whether the last run in a work folder finished its output. Raises `SinkError`."""
    state = _read_run(work / RUN_FILE)
    return state is not None and state.get("finished") is True


def mark_finished(folder: RunFolder, metadata: Mapping[str, str]) -> None:
    """Notes that the output is complete, with its size and time. Raises `SinkError`."""
    state = _read_run(folder.run_file) or {"fingerprint": {}}
    state["finished"] = True
    state["output"] = _stamp(folder.output)
    state["errors"] = _stamp(folder.errors)
    state["metadata"] = dict(metadata)
    _write_run(folder, state)


def mark_unfinished(folder: RunFolder) -> None:
    """Notes that the output no longer says what is committed. Raises `SinkError`."""
    state = _read_run(folder.run_file)
    if state is not None and state.get("finished"):
        _write_run(folder, {**state, "finished": False})


def is_finished(
    folder: RunFolder,
    fingerprint: Mapping[str, Any],
    output: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> bool:
    """Whether ``output`` is this job's finished file, untouched since it was written.

    Where ``metadata`` is given, the file must have been written with the same.
    """
    state = _read_run(folder.run_file)
    if state is None or state.get("finished") is not True:
        return False
    if state["fingerprint"] != json.loads(json.dumps(fingerprint)):
        return False
    if metadata is not None and state.get("metadata") != dict(metadata):
        return False
    found = _stamp(output)
    if found is None or state.get("output") != found:
        return False
    return bool(state.get("errors") == _stamp(folder.errors))


def _stamp(path: str | os.PathLike[str] | None) -> dict[str, int] | None:
    """What tells that a file was not touched since; None where there is none."""
    try:
        stat = None if path is None else os.stat(path)
    except OSError:
        stat = None
    return None if stat is None else {"size_bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
