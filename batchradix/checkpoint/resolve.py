"""From a model's name to its files on disk."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from batchradix.checkpoint.listed import LISTED_MODELS
from batchradix.errors import ModelError

_HUB_NAME = re.compile(
    r"(?P<repo>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[^\s:@]+))?(?::(?P<quantisation>[\w-]+))?"
)
_PATH_STARTS = ("/", "./", "../", "~")
_PATH_ENDS = (".gguf", ".safetensors", ".bin", ".pt", ".json", "/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """A model on disk: ``path`` is a folder or a ``.gguf`` file that exists."""

    path: Path
    revision: str | None = None
    is_demonstration: bool = False


def locate(
    name: str, *, revision: str | None, notify: Callable[[str], None], local_only: bool = False
) -> Located:
    """Finds the model, fetching it if need be; what exists on disk wins over any other meaning.
    ``local_only``: nothing is fetched and no network asked.

    Raises `ModelError` when there is no such model or it cannot be had.
    """
    path = _existing(name)
    if path is not None or name in LISTED_MODELS:
        if revision is not None:
            raise ModelError(
                f"a revision ({revision}) can only be asked of a model on the hub, "
                f"and {name} is none; leave it out"
            )
        return _local(path) if path is not None else _listed(name, notify, local_only)
    match = hub_name(name)
    if revision is not None and match.revision not in (None, revision):
        raise ModelError(f"{name} names another revision than {revision}; give one of the two")
    return _on_hub(match, revision or match.revision, notify, local_only)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """``repo[@revision][:quantisation]``."""

    repo: str
    revision: str | None
    quantisation: str | None


def hub_name(name: str) -> HubName:
    """A name that is neither a listed one nor of anything on disk, as one on the hub.

    Raises `ModelError` where it can be none.
    """
    if not name.strip():
        raise ModelError("the model's name is empty; give a folder, a .gguf file or a name")
    match = _HUB_NAME.fullmatch(name)
    is_deep = name.partition("@")[0].count("/") > 1
    if name.startswith(_PATH_STARTS) or name.endswith(_PATH_ENDS) or is_deep:
        raise ModelError(f"there is no file or folder {name}; check the path of the model")
    if match is None:
        raise _unknown(name)
    return HubName(
        repo=match["repo"], revision=match["revision"], quantisation=match["quantisation"]
    )


def _existing(name: str) -> Path | None:
    if not name.strip():
        return None
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except PermissionError as error:
        raise ModelError(
            f"{name} cannot be looked at: {error.strerror}; let this user read the folder"
        ) from error
    except (OSError, RuntimeError, ValueError):  # too long, no home, a null character
        return None


def _local(path: Path) -> Located:
    if path.is_dir():
        return Located(path=path)
    if path.suffix.lower() != ".gguf":
        raise ModelError(f"{path} is not a .gguf file; give a model folder or a .gguf file")
    return Located(path=path)


def _listed(name: str, notify: Callable[[str], None], local_only: bool) -> Located:
    from batchradix.checkpoint.download import fetch_listed, is_whole, listed_path

    model = LISTED_MODELS[name]
    path = listed_path(model)
    if not local_only:
        path = fetch_listed(model, notify)
    elif not is_whole(path, model):
        raise ModelError(
            f"{name} has not been fetched to this machine; fetch it with `batchradix models pull`"
        )
    return Located(path=path, is_demonstration=model.is_demonstration)


def _on_hub(
    name: HubName, revision: str | None, notify: Callable[[str], None], local_only: bool
) -> Located:
    from batchradix.checkpoint.hub import fetch_gguf, fetch_snapshot

    if name.quantisation is not None:
        path = fetch_gguf(name.repo, name.quantisation, revision, notify, local_only=local_only)
    else:
        path = fetch_snapshot(name.repo, revision, notify, local_only=local_only)
    return Located(path=path, revision=_commit(path) or revision)


def _commit(path: Path) -> str | None:
    """The commit that a file or folder in the hub's cache is of (``snapshots/COMMIT``)."""
    parts = path.parts
    if "snapshots" not in parts:
        return None
    after = parts[len(parts) - parts[::-1].index("snapshots") :]
    return after[0] if after else None


def _unknown(name: str) -> ModelError:
    close = difflib.get_close_matches(name.lower(), list(LISTED_MODELS), n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    return ModelError(
        f"there is no model {name}; {hint}give a folder, a .gguf file, owner/repo on the hub, "
        f"or a listed name ({', '.join(LISTED_MODELS)})"
    )
