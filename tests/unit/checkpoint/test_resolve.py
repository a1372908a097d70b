from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchradix.checkpoint import download, hub
from batchradix.checkpoint.checkpoint import open_checkpoint
from batchradix.checkpoint.hub import choose_gguf
from batchradix.checkpoint.resolve import locate
from batchradix.errors import ModelError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Calls = list[tuple[Any, ...]]


def silent(line: str) -> None:
    pass


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What the hub and the package index are asked for; they answer with a path."""
    made: Calls = []
    place = tmp_path / "hub" / "snapshots" / COMMIT

    def answer(kind: str) -> Callable[..., Path]:
        def asked(*args: Any, local_only: bool = False) -> Path:
            assert not local_only
            made.append((kind, *(a for a in args if not callable(a))))
            return place / "m.gguf" if kind == "gguf" else place

        return asked

    monkeypatch.setattr(hub, "fetch_snapshot", answer("snapshot"))
    monkeypatch.setattr(hub, "fetch_gguf", answer("gguf"))
    monkeypatch.setattr(download, "fetch_listed", answer("listed"))
    return made


@pytest.mark.parametrize(
    ("name", "revision", "call"),
    [
        ("owner/repo", None, ("snapshot", "owner/repo", None)),
        ("owner/re.po-1_x@v1.0", None, ("snapshot", "owner/re.po-1_x", "v1.0")),
        ("owner/repo", "abc", ("snapshot", "owner/repo", "abc")),
        ("owner/repo@abc", "abc", ("snapshot", "owner/repo", "abc")),
        ("owner/repo@refs/pr/1", None, ("snapshot", "owner/repo", "refs/pr/1")),
        ("owner/repo:Q4_K_M", None, ("gguf", "owner/repo", "Q4_K_M", None)),
        ("owner/repo@v1:q8_0", None, ("gguf", "owner/repo", "q8_0", "v1")),
    ],
)
def test_hub_names_are_taken_apart(
    calls: Calls, name: str, revision: str | None, call: tuple[Any, ...]
) -> None:
    located = locate(name, revision=revision, notify=silent)
    assert calls == [call]
    assert located.revision == COMMIT


def test_what_exists_on_disk_wins(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("owner/repo", "smollm2-135m"):
        Path(name).mkdir(parents=True)
        assert locate(name, revision=None, notify=silent).path == Path(name)
    assert calls == []


def test_a_listed_name_is_a_demonstration(calls: Calls) -> None:
    assert locate("smollm2-135m", revision=None, notify=silent).is_demonstration
    assert calls[0][0] == "listed"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("./nothing", "no file or folder ./nothing"),
        ("/nothing/here", "no file or folder"),
        ("~/nothing-here", "no file or folder"),
        ("a/b/c", "no file or folder"),
        ("model.gguf", "no file or folder"),
        ("owner/model.gguf", "no file or folder"),
        ("", "empty"),
        ("  ", "empty"),
        ("smolm2-135m", "did you mean smollm2-135m"),
        ("gpt-4", "listed name"),
        ("owner/repo:", "listed name"),
        ("a b/c d", "listed name"),
        ("nul\0l", "no model"),
        ("x" * 5000, "no model"),
    ],
)
def test_a_name_that_means_nothing_says_what_could_be_given(
    calls: Calls, name: str, says: str
) -> None:
    with pytest.raises(ModelError, match=says):
        open_checkpoint(name)
    assert calls == []


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"not a \.gguf file"):
        open_checkpoint(str(tmp_path / "model.bin"))


def test_a_revision_is_for_models_on_the_hub(tmp_path: Path, calls: Calls) -> None:
    for name in (str(tmp_path), "smollm2-135m"):
        with pytest.raises(ModelError, match="revision"):
            open_checkpoint(name, revision="v1")
    with pytest.raises(ModelError, match="another revision"):
        open_checkpoint("owner/repo@v1", revision="v2")


NAMES = [
    "m-Q4_K_M.gguf",
    "m-Q4_K_S.gguf",
    "m.Q8_0.gguf",
    "m-f16.gguf",
    "sub/m-IQ2_XXS.gguf",
    "big-Q6_K-00001-of-00002.gguf",
    "big-Q6_K-00002-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("quantisation", "name"),
    [
        ("Q4_K_M", "m-Q4_K_M.gguf"),
        ("q4_k_s", "m-Q4_K_S.gguf"),
        ("Q8_0", "m.Q8_0.gguf"),
        ("F16", "m-f16.gguf"),
        ("IQ2_XXS", "sub/m-IQ2_XXS.gguf"),
    ],
)
def test_the_file_of_a_quantisation_is_chosen(quantisation: str, name: str) -> None:
    assert choose_gguf("o/r", NAMES, quantisation) == name


def test_a_quantisation_that_is_not_there_lists_those_that_are() -> None:
    with pytest.raises(ModelError, match="F16, IQ2_XXS, Q4_K_M"):
        choose_gguf("o/r", NAMES, "Q5_0")
    with pytest.raises(ModelError, match="2 parts"):
        choose_gguf("o/r", NAMES, "Q6_K")
    with pytest.raises(ModelError, match="no GGUF file at all"):
        choose_gguf("o/r", [], "Q5_0")
