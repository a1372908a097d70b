"""`open_checkpoint`: from a model's name to everything that is known of it before weights load."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from batchradix.checkpoint.adapter import Adapter, open_adapter
from batchradix.checkpoint.chat_template import compile_template
from batchradix.checkpoint.content_hash import content_hash
from batchradix.checkpoint.gguf_header import read_gguf_header
from batchradix.checkpoint.gguf_kept import kept_bytes
from batchradix.checkpoint.gguf_model import gguf_config
from batchradix.checkpoint.gguf_tokenizer import gguf_tokenizer
from batchradix.checkpoint.hf_config import hf_config
from batchradix.checkpoint.hf_folder import (
    chosen_template,
    read_chat_templates,
    read_tokenizer,
    refuse_foreign_folder,
)
from batchradix.checkpoint.json_file import read_json
from batchradix.checkpoint.listed import LISTED_MODELS, ListedModel
from batchradix.checkpoint.model_config import ModelConfig
from batchradix.checkpoint.resolve import locate
from batchradix.checkpoint.tokenizer import Tokenizer
from batchradix.checkpoint.weights import find_weights
from batchradix.errors import ModelError, OptionError

_GGUF_TEMPLATE = "tokenizer.chat_template"

__all__ = ["LISTED_MODELS", "Checkpoint", "ListedModel", "open_checkpoint"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """A model that can be run: its files, its architecture, its tokenizer, its chat template.

    ``name`` is what it was opened as; ``path`` the folder, or the ``.gguf`` file itself.
    ``bos_token`` and ``eos_token`` are texts, ``""`` where there is none; ``special_texts``
    holds all named special tokens for the chat template. ``chat_templates``: all that the model
    has, by name, of which ``chat_template`` is one. No weight has been read.
    """

    name: str
    revision: str | None
    path: Path
    format: Literal["safetensors", "gguf"]
    weight_files: tuple[Path, ...]
    config: ModelConfig
    tokenizer: Tokenizer
    chat_template: str | None
    bos_token: str
    eos_token: str
    is_demonstration: bool = False
    special_texts: Mapping[str, str] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    adapter: Adapter | None = None

    @cached_property
    def content_hash(self) -> str:
        """Hex SHA-256 that names what the model is, with its adapter, wherever they lie; see
        `content_hash`."""
        base = content_hash(self.path, self.format, self.weight_files)
        if self.adapter is None:
            return base
        return hashlib.sha256(f"{base} {self.adapter.content_hash}".encode()).hexdigest()

    @cached_property
    def kept_bytes(self) -> int | None:
        """What weights take in memory as a file holds them; None for floats, FP8 and int8."""
        if self.format == "gguf":
            return kept_bytes(self.path)
        if self.config.stored is None or self.config.stored.layout == "scaled":
            return None
        return sum(file.stat().st_size for file in self.weight_files)


def open_checkpoint(
    name: str,
    *,
    revision: str | None = None,
    notify: Callable[[str], None] | None = None,
    local_only: bool = False,
    lora: str | os.PathLike[str] | None = None,
) -> Checkpoint:
    """Opens a model by name, fetching it if need be; reads no weights and runs no code of it.

    ``name`` is a folder in Hugging Face's layout, a ``.gguf`` file, a listed name
    (`LISTED_MODELS`), ``owner/repo[@revision]`` or ``owner/repo:QUANTISATION`` on the Hugging
    Face hub. What exists on disk wins. ``notify`` is told in one line what is being fetched;
    with ``local_only`` nothing is. ``lora``: the folder of an adapter to be merged into it.

    Raises `ModelError` when the model cannot be had, is damaged or cannot be run, and
    `TemplateError` when its chat template is malformed.
    """
    located = locate(name, revision=revision, notify=notify or _silent, local_only=local_only)
    try:
        parts = _gguf_parts(located.path) if located.path.is_file() else _folder_parts(located.path)
    except OSError as error:  # a file that is there and may not be looked at, a broken disk
        raise ModelError(
            f"{error.filename or located.path} cannot be read: {error.strerror or error}; "
            f"mend that or use another copy of the model"
        ) from error
    checkpoint = Checkpoint(
        name=name,
        revision=located.revision,
        path=located.path,
        is_demonstration=located.is_demonstration,
        adapter=None if lora is None else open_adapter(lora),
        **parts,
    )
    if checkpoint.chat_template is not None:
        compile_template(checkpoint.chat_template)
    return checkpoint


def with_chat_template(checkpoint: Checkpoint, template: str | None) -> Checkpoint:
    """The model with another chat template: Jinja text, or the name of one of those that it has.

    Raises `TemplateError` for a malformed one and `OptionError` for what is neither.
    """
    if template is None:
        return checkpoint
    text = checkpoint.chat_templates.get(template, template)
    if text is template and not any(mark in text for mark in ("{{", "{%")):
        known = ", ".join(checkpoint.chat_templates) or "none"
        raise OptionError(
            f"`chat_template` {text[:60]!r} is neither Jinja text nor the name of one of the "
            f"model's templates (there are: {known}); give a file or text with places such as "
            f"{{{{ messages }}}}"
        )
    compile_template(text)
    return replace(checkpoint, chat_template=text)


def _silent(line: str) -> None:
    pass


def _gguf_parts(path: Path) -> dict[str, Any]:
    header = read_gguf_header(path)
    config = gguf_config(path, header)
    definition, specials, names = gguf_tokenizer(path, header.metadata)
    template = header.metadata.get(_GGUF_TEMPLATE)
    return {
        "format": "gguf",
        "weight_files": (path,),
        "config": config,
        "tokenizer": Tokenizer(definition, specials, num_embeddings=config.vocab_size),
        "chat_template": template if isinstance(template, str) else None,
        "chat_templates": {
            name.removeprefix(_GGUF_TEMPLATE).lstrip(".") or "default": text
            for name, text in header.metadata.items()
            if name.startswith(_GGUF_TEMPLATE) and isinstance(text, str)
        },
        "bos_token": specials.bos_token,
        "eos_token": specials.eos_token,
        "special_texts": names,
    }


def open_settings(name: str, folder: Path, *, revision: str | None = None) -> Checkpoint:
    """As `open_checkpoint`, of a folder that need not hold weights: it cannot be run."""
    parts = _folder_parts(folder, weightless=True)
    checkpoint = Checkpoint(name=name, revision=revision, path=folder, **parts)
    if checkpoint.chat_template is not None:
        compile_template(checkpoint.chat_template)
    return checkpoint


def _folder_parts(folder: Path, *, weightless: bool = False) -> dict[str, Any]:
    refuse_foreign_folder(folder)
    raw = read_json(folder / "config.json")
    config = hf_config(folder / "config.json", raw)
    weight_files: tuple[Path, ...] = ()
    if not weightless:
        is_quantised = config.stored is not None
        weight_files = find_weights(folder, quantised=is_quantised, mxfp4=config.mxfp4)
    tokenizer, names = read_tokenizer(folder, raw, config.vocab_size)
    templates = read_chat_templates(folder)
    return {
        "format": "safetensors",
        "weight_files": weight_files,
        "config": config,
        "tokenizer": tokenizer,
        "chat_template": chosen_template(folder, templates),
        "chat_templates": templates,
        "bos_token": names.get("bos_token", ""),
        "eos_token": names.get("eos_token", ""),
        "special_texts": names,
    }
