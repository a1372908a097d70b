"""Models on the Hugging Face hub, through `huggingface_hub` and its cache.

``HF_TOKEN``, ``HF_HOME``, ``HF_HUB_OFFLINE`` and ``HF_ENDPOINT`` are honoured by that library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchradix.errors import ModelError

_WANTED = ("*.safetensors", "*.json", "*.jinja")
_TIMEOUT_S = 20.0
_UNWANTED = ("*/*", "consolidated*.safetensors")  # other layouts of the same weights
_QUANTISATION = re.compile(r"(?:^|[-._])((?:I?Q|TQ)\d\w*|BF16|F16|F32|MXFP4\w*)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSettings:
    """What a repository says of its model: the ``folder`` has its settings and tokenizer, and
    ``weight_bytes`` is the size of its safetensors on the hub, 0 where there are none."""

    folder: Path
    weight_bytes: int
    has_pickles: bool


def fetch_snapshot(
    repo: str,
    revision: str | None,
    notify: Callable[[str], None],
    *,
    local_only: bool = False,
    wanted: Sequence[str] = _WANTED,
) -> Path:
    """The folder of a repository's safetensors, settings and tokenizer, named by its commit.
    ``local_only``: the hub is not asked. ``wanted``: patterns of the files.

    Raises `ModelError` when it cannot be had, saying whether the hub, the name or the right to
    it is what is missing.
    """
    from huggingface_hub import snapshot_download

    if not local_only:
        notify(f"looking for {repo} on the Hugging Face hub and in its cache")
    with _hub_errors(repo, revision, local_only):
        folder = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(wanted),
            ignore_patterns=list(_UNWANTED),
            local_files_only=local_only,
            tqdm_class=_silent_bar(),
        )
    return Path(folder)


def fetch_settings(
    repo: str, revision: str | None, notify: Callable[[str], None]
) -> RemoteSettings:
    """Fetches all but the weights. Raises `ModelError` as `fetch_snapshot` does."""
    from huggingface_hub import HfApi

    with _hub_errors(repo, revision):
        info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=_TIMEOUT_S)
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or ()}
    weights = [
        size
        for name, size in sizes.items()
        if "/" not in name and name.endswith(".safetensors") and not name.startswith("consolidated")
    ]
    return RemoteSettings(
        folder=fetch_snapshot(repo, revision, notify, wanted=("*.json", "*.jinja")),
        weight_bytes=sum(weights),
        has_pickles=any(name.endswith((".bin", ".pt", ".pth")) for name in sizes),
    )


def cached_repositories() -> dict[str, Path]:
    """Models in the hub's cache: ``owner/repo`` to the snapshot that was fetched last."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = [one for one in scan_cache_dir().repos if one.repo_type == "model"]
    except (CacheNotFound, OSError, ValueError):
        return {}
    return {
        one.repo_id: max(one.revisions, key=lambda each: each.last_modified).snapshot_path
        for one in sorted(repos, key=lambda each: each.repo_id)
        if one.revisions
    }


def fetch_gguf(
    repo: str,
    quantisation: str,
    revision: str | None,
    notify: Callable[[str], None],
    *,
    local_only: bool = False,
) -> Path:
    """The repository's GGUF file of one quantisation (``Q4_K_M``; case does not matter).

    Raises `ModelError` as `fetch_snapshot` does, and when there is no such file or several.
    """
    from huggingface_hub import hf_hub_download

    if local_only:
        names = [name for name in _cached_names(repo, revision) if name.endswith(".gguf")]
        if not names:
            raise _not_here(repo)
    else:
        notify(f"looking for {repo} on the Hugging Face hub and in its cache")
    with _hub_errors(repo, revision, local_only):
        if not local_only:
            names = _gguf_names(repo, revision)
        name = choose_gguf(repo, names, quantisation)
        path = hf_hub_download(
            repo, name, revision=revision, local_files_only=local_only, tqdm_class=_silent_bar()
        )
    return Path(path)


def choose_gguf(repo: str, names: Sequence[str], quantisation: str) -> str:
    """The one file among ``names`` of that quantisation. Raises `ModelError` without one."""
    found = {name: match[1] for name in names if (match := _QUANTISATION.search(_stem(name)))}
    fitting = [name for name, kind in found.items() if kind.upper() == quantisation.upper()]
    parts = [name for name in fitting if _is_part(name)]
    whole = sorted(set(fitting) - set(parts), key=lambda name: (name.count("/"), len(name), name))
    if whole:
        return whole[0]
    if parts:
        raise ModelError(
            f"{repo} holds {quantisation} in {len(parts)} parts; download and join them "
            f"(llama-gguf-split --merge), then give the file"
        )
    known = ", ".join(sorted({kind.upper() for kind in found.values()})) or "no GGUF file at all"
    raise ModelError(f"{repo} has no GGUF file of quantisation {quantisation}; it has {known}")


def quantisation_of(file_name: str) -> str | None:
    """``Q4_K_M`` of ``model-Q4_K_M.gguf``; None of a name without one, and of a part of a file."""
    match = None if _is_part(file_name) else _QUANTISATION.search(_stem(file_name))
    return None if match is None else match[1].upper()


_PART = re.compile(r"-\d{5}-of-\d{5}$")


def _stem(name: str) -> str:
    return _PART.sub("", name.rsplit("/", 1)[-1].removesuffix(".gguf"))


def _is_part(name: str) -> bool:
    return _PART.search(name.removesuffix(".gguf")) is not None


def _gguf_names(repo: str, revision: str | None) -> list[str]:
    """GGUF files of the repository; of its copy in the cache when the hub is out of reach."""
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(repo, revision=revision, timeout=_TIMEOUT_S)
        names = [sibling.rfilename for sibling in info.siblings or ()]
    except _connection_errors() as error:
        names = _cached_names(repo, revision)
        if not names:
            raise error
    return [name for name in names if name.endswith(".gguf")]


def _cached_names(repo: str, revision: str | None) -> list[str]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    wanted = revision or "main"
    try:
        repos = [r for r in scan_cache_dir().repos if r.repo_type == "model" and r.repo_id == repo]
    except CacheNotFound:
        return []
    return [
        file.file_path.relative_to(snapshot.snapshot_path).as_posix()
        for cached in repos
        for snapshot in cached.revisions
        if wanted in snapshot.refs or snapshot.commit_hash == wanted
        for file in snapshot.files
    ]


def _connection_errors() -> tuple[type[Exception], ...]:
    """What is raised when the hub does not answer; the HTTP library behind it has changed."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    http_error = next(base for base in HfHubHTTPError.__bases__ if base is not OSError)
    return (http_error, OfflineModeIsEnabled, ConnectionError, TimeoutError)


@contextmanager
def _hub_errors(repo: str, revision: str | None, local_only: bool = False) -> Iterator[None]:
    """Turns what `huggingface_hub` raises into one sentence with the remedy."""
    from huggingface_hub import errors

    try:
        yield
    except ModelError:
        raise
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{repo} is gated: accept its terms on its page on the hub, then set HF_TOKEN to a "
            f"token of that account"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{repo} has no revision {revision!r}; check its name") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"there is no model {repo} on the hub, or it is private; check the name, "
            f"or set HF_TOKEN to a token that may read it"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise (_not_here(repo) if local_only else _unreachable(repo)) from error
    except errors.HFValidationError as error:
        raise ModelError(f"{repo} is no name of a model on the hub: {error}") from error
    except errors.HfHubHTTPError as error:
        raise ModelError(f"the hub refuses {repo}: {error}; try again later") from error
    except _connection_errors() as error:
        raise _unreachable(repo, str(error)) from error
    except OSError as error:
        raise ModelError(f"{repo} cannot be stored in the hub's cache: {error}") from error


def _not_here(repo: str) -> ModelError:
    return ModelError(
        f"{repo} has not been fetched to this machine; fetch it with `batchradix models pull`"
    )


def _unreachable(repo: str, reason: str = "") -> ModelError:
    detail = f" ({reason.splitlines()[0]})" if reason else ""
    return ModelError(
        f"{repo} is not in the cache and the Hugging Face hub cannot be reached{detail}; check "
        f"the network and HF_HUB_OFFLINE, or give --model a folder or a .gguf file"
    )


def _silent_bar() -> Any:
    """A progress bar that shows nothing: what is printed is for the caller to decide."""
    import tqdm  # type: ignore[import-untyped]

    class Silent(tqdm.tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["disable"] = True
            super().__init__(*args, **kwargs)

    return Silent
