"""What a model is and needs, known from its settings alone, and which of them fit this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchradix.checkpoint.checkpoint import Checkpoint, open_checkpoint, open_settings
from batchradix.checkpoint.download import is_whole, listed_path
from batchradix.checkpoint.hub import cached_repositories, fetch_settings, quantisation_of
from batchradix.checkpoint.known import known_models
from batchradix.checkpoint.listed import LISTED_MODELS
from batchradix.checkpoint.model_config import ModelConfig
from batchradix.checkpoint.resolve import hub_name
from batchradix.config import EngineOptions
from batchradix.errors import BatchradixError, ModelError, OptionError
from batchradix.report.machine import machine
from batchradix.schema.tool_styles import detect_style
from batchradix.settings import (
    Machine,
    element_bytes,
    kv_element_bytes,
    resolve_dtype,
    resolve_engine,
)

_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""One of them is there where a GPU may be; without any, torch need not be loaded and asked."""
USEFUL_KV_TOKENS = 4096
"""A model fits where so many tokens of keys and values, or its whole context, do beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a model takes in the dtype that it is run in. ``kv_tokens``: what there is room for
    beside the weights, 0 where there is none."""

    dtype: str
    num_parameters: int
    weight_bytes: int
    kv_token_bytes: int
    context_length: int
    kv_tokens: int

    @property
    def fits(self) -> bool:
        return self.kv_tokens >= min(USEFUL_KV_TOKENS, self.context_length)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"fits": self.fits}


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedEntry:
    """A model that can be named. ``place``: listed, cache or hub, where it is known from;
    ``path`` where it lies on this machine; ``problem`` why it cannot be run."""

    name: str
    place: str
    path: Path | None = None
    license: str | None = None
    is_gated: bool = False
    description: str = ""
    needs: Needs | None = None
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        return asdict(self) | {
            "path": None if self.path is None else str(self.path),
            "needs": None if self.needs is None else self.needs.to_json(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCheck:
    """A model that could be run, but for what ``problems`` say. ``stored_bytes``: its files."""

    checkpoint: Checkpoint
    needs: Needs
    stored_bytes: int
    is_fetched: bool
    problems: tuple[str, ...]

    @property
    def tool_style(self) -> str | None:
        """How calls of functions are written, where the chat template says it."""
        style = detect_style(self.checkpoint.chat_template)
        return None if style is None else style.name

    def to_json(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        config = self.checkpoint.config
        return {
            "name": self.checkpoint.name,
            "revision": self.checkpoint.revision,
            "path": str(self.checkpoint.path),
            "format": self.checkpoint.format,
            "is_fetched": self.is_fetched,
            "stored_bytes": self.stored_bytes,
            "architecture": config.architecture,
            "num_layers": config.num_layers,
            "vocab_size": config.vocab_size,
            **self.needs.to_json(),
            "has_chat_template": self.checkpoint.chat_template is not None,
            "tool_style": self.tool_style,
            "bos_token": self.checkpoint.bos_token,
            "eos_token": self.checkpoint.eos_token,
            "problems": list(self.problems),
        }


def needs_of(config: ModelConfig, options: EngineOptions, here: Machine) -> Needs:
    """Raises `OptionError` for options that exclude each other on this machine."""
    device = here.device if options.device == "auto" else options.device
    dtype = resolve_dtype(options.dtype, device=device, has_bf16=here.has_bf16)
    # As the C kernels keep latents, twice; which backend will serve, torch would have to say.
    copies = 2 if config.mla is not None and device == "cpu" else 1
    try:
        kv_tokens = resolve_engine(
            options,
            here,
            num_kv_elements_per_token=config.num_kv_elements_per_token,
            weight_bytes_float32=4 * config.num_parameters,
            num_kv_copies=copies,
        ).kv_tokens
    except OptionError:
        if options != EngineOptions(device=options.device, dtype=options.dtype):
            raise
        kv_tokens = 0
    kv_element = kv_element_bytes(options.kv_dtype, dtype)
    return Needs(
        dtype=dtype,
        num_parameters=config.num_parameters,
        weight_bytes=element_bytes(dtype) * config.num_parameters,
        kv_token_bytes=copies * kv_element * config.num_kv_elements_per_token,
        context_length=config.context_length,
        kv_tokens=kv_tokens,
    )


def this_machine(options: EngineOptions) -> Machine:
    """With the device that the options name, or the best there is."""
    if options.device in ("auto", "cpu") and not any(Path(file).exists() for file in _GPU_FILES):
        return machine("cpu")
    from batchradix.engine.device import find_device

    return machine(*find_device(options.device))


def list_models() -> list[ListedEntry]:
    """Models with short names, those in the hub's cache, then known ones on the hub."""
    options = EngineOptions()
    here = this_machine(options)
    known = {model.name: model for model in known_models()}
    entries = []
    for listed in LISTED_MODELS.values():
        path = listed_path(listed)
        entries.append(
            ListedEntry(
                name=listed.name,
                place="listed",
                path=path if is_whole(path, listed) else None,
                license=listed.license,
                description=listed.description,
                needs=needs_of(known[listed.hub_name].config, options, here),
            )
        )
    fetched = [_cached(name, path, options, here) for name, path in _cached_models()]
    entries += fetched
    there = {entry.name for entry in fetched}
    for model in known.values():
        if model.name not in there:
            entries.append(
                ListedEntry(
                    name=model.name,
                    place="hub",
                    license=model.license,
                    is_gated=model.is_gated,
                    needs=needs_of(model.config, options, here),
                )
            )
    return entries


def _cached_models() -> list[tuple[str, Path]]:
    """Names and paths of what has been fetched from the hub: folders and GGUF files."""
    found: list[tuple[str, Path]] = []
    for repo, folder in cached_repositories().items():
        if any(folder.glob("*.safetensors")):
            found.append((repo, folder))
        for file in sorted(folder.rglob("*.gguf")):
            if (quantisation := quantisation_of(file.name)) is not None:
                found.append((f"{repo}:{quantisation}", file))
    return found


def _cached(name: str, path: Path, options: EngineOptions, here: Machine) -> ListedEntry:
    try:
        checkpoint = open_checkpoint(str(path))
    except BatchradixError as error:
        return ListedEntry(name=name, place="cache", path=path, problem=str(error))
    return ListedEntry(
        name=name, place="cache", path=path, needs=needs_of(checkpoint.config, options, here)
    )


def check_model(name: str, options: EngineOptions, *, notify: Callable[[str], None]) -> ModelCheck:
    """Opens a model without reading weights; of one on the hub that is not on this machine its
    settings and tokenizer alone are fetched.

    Raises `ModelError` when it cannot be had or run, `TemplateError` for a damaged chat template.
    """
    checkpoint, stored_bytes = _open(name, notify)
    here = this_machine(options)
    needs = needs_of(checkpoint.config, options, here)
    return ModelCheck(
        checkpoint=checkpoint,
        needs=needs,
        stored_bytes=stored_bytes,
        is_fetched=bool(checkpoint.weight_files),
        problems=tuple(_problems(checkpoint, needs, here)),
    )


def _open(name: str, notify: Callable[[str], None]) -> tuple[Checkpoint, int]:
    """With the size of its files; settings alone where a model on the hub is not here."""
    is_here = name in LISTED_MODELS or Path(name).expanduser().exists()
    asked = None if is_here else hub_name(name)
    try:
        checkpoint = open_checkpoint(name, notify=notify, local_only=asked is not None)
    except ModelError:
        if asked is None or asked.quantisation is not None:
            raise
        return _open_remote(name, notify)
    return checkpoint, sum(file.stat().st_size for file in checkpoint.weight_files)


def _open_remote(name: str, notify: Callable[[str], None]) -> tuple[Checkpoint, int]:
    asked = hub_name(name)
    remote = fetch_settings(asked.repo, asked.revision, notify)
    checkpoint = open_settings(name, remote.folder, revision=asked.revision)
    if remote.weight_bytes == 0:
        held = "only as pickles, which are never opened" if remote.has_pickles else "not at all"
        raise ModelError(f"{name} holds weights {held}; use another copy of the model")
    return checkpoint, remote.weight_bytes


def _problems(checkpoint: Checkpoint, needs: Needs, here: Machine) -> list[str]:
    found = []
    if not needs.fits:
        free = here.free_device_memory_bytes if here.device != "cpu" else None
        room = here.free_memory_bytes if free is None else free
        found.append(
            f"it does not fit: weights of {needs.weight_bytes / 2**30:,.1f} GiB and room for "
            f"{min(USEFUL_KV_TOKENS, needs.context_length):,} tokens of keys and values are "
            f"needed, and {room / 2**30:,.1f} GiB are free on {here.device}"
        )
    if checkpoint.chat_template is None:
        found.append("it has no chat template: messages and --chat need --chat-template")
    return found
