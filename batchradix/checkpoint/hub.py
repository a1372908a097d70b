"""Models on the Hugging Face hub, through `huggingface_hub` and its cache.

``HF_TOKEN``, ``HF_HOME``, ``HF_HUB_OFFLINE`` and ``HF_ENDPOINT`` are honoured by that library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from batchradix.errors import ModelError

_WANTED = ("*.safetensors", "*.json", "*.jinja")
_TIMEOUT_S = 20.0
_UNWANTED = ("*/*", "consolidated*.safetensors")  # other layouts of the same weights
_QUANTISATION = re.compile(r"(?:^|[-._])((?:I?Q|TQ)\d\w*|BF16|F16|F32|MXFP4\w*)$", re.IGNORECASE)


def fetch_snapshot(repo: str, revision: str | None, notify: Callable[[str], None]) -> Path:
    """The folder of a repository's safetensors, settings and tokenizer, named by its commit.

    Raises `ModelError` when it cannot be had, saying whether the hub, the name or the right to
    it is what is missing.
    """
    from huggingface_hub import snapshot_download

    notify(f"looking for {repo} on the Hugging Face hub and in its cache")
    with _hub_errors(repo, revision):
        folder = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(_WANTED),
            ignore_patterns=list(_UNWANTED),
            tqdm_class=_silent_bar(),
        )
    return Path(folder)


def fetch_gguf(
    repo: str, quantisation: str, revision: str | None, notify: Callable[[str], None]
) -> Path:
    """The repository's GGUF file of one quantisation (``Q4_K_M``; case does not matter).

    Raises `ModelError` as `fetch_snapshot` does, and when there is no such file or several.
    """
    from huggingface_hub import hf_hub_download

    notify(f"looking for {repo} on the Hugging Face hub and in its cache")
    with _hub_errors(repo, revision):
        name = choose_gguf(repo, _gguf_names(repo, revision), quantisation)
        return Path(hf_hub_download(repo, name, revision=revision, tqdm_class=_silent_bar()))


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
def _hub_errors(repo: str, revision: str | None) -> Iterator[None]:
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
        raise _unreachable(repo) from error
    except errors.HFValidationError as error:
        raise ModelError(f"{repo} is no name of a model on the hub: {error}") from error
    except errors.HfHubHTTPError as error:
        raise ModelError(f"the hub refuses {repo}: {error}; try again later") from error
    except _connection_errors() as error:
        raise _unreachable(repo, str(error)) from error
    except OSError as error:
        raise ModelError(f"{repo} cannot be stored in the hub's cache: {error}") from error


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
