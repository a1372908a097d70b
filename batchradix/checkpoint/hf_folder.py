"""Tokenizer and chat template of a model folder in Hugging Face's layout."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchradix.checkpoint.json_file import read_json, read_json_if_there
from batchradix.checkpoint.tokenizer import AddedToken, SpecialTokens, Tokenizer
from batchradix.checkpoint.weights import INDEX_NAME
from batchradix.errors import ModelError

NAMED_SPECIALS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


def refuse_foreign_folder(folder: Path) -> None:
    """Raises `ModelError` for a folder that is no text model of its own, saying what it is."""
    whole = any((folder / n).is_file() for n in ("model.safetensors", INDEX_NAME))
    if (folder / "adapter_config.json").is_file() and not whole:
        base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
        raise ModelError(
            f"{folder} is an adapter{f' for {base}' if base else ''}, not a model; "
            f"give its base model, and the adapter as `lora`"
        )
    if (folder / "modules.json").is_file():
        raise ModelError(
            f"{folder} is an embedding model (it has modules.json of sentence-transformers); "
            f"use a model that generates text"
        )
    if (folder / "config.json").is_file():
        return
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        raise ModelError(f"{folder} has no config.json; name the file {ggufs[0]} itself")
    if (folder / "params.json").is_file():
        raise ModelError(f"{folder} is not in Hugging Face's layout; convert the model to it first")
    raise ModelError(
        f"{folder} has no config.json, so it is no model folder; "
        f"give the folder that holds config.json, tokenizer.json and *.safetensors"
    )


def read_tokenizer(
    folder: Path, config: Mapping[str, Any], num_embeddings: int
) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer and the texts of its named special tokens (``bos_token``, ...).

    ``config`` is the content of ``config.json``, ``num_embeddings`` the model's vocabulary.
    Raises `ModelError` when ``tokenizer.json`` is missing or malformed.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        others = [
            n
            for n in ("tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model")
            if (folder / n).is_file()
        ]
        found = f"; {others[0]} alone is not enough" if others else ""
        raise ModelError(
            f"{path} is missing{found}; save the tokenizer as tokenizer.json "
            f"(transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    definition = read_json(path)
    settings = read_json_if_there(folder / "tokenizer_config.json")
    names = _named_specials(folder, settings)
    generation = read_json_if_there(folder / "generation_config.json")
    eos_ids = [
        *_ids(folder / "generation_config.json", generation.get("eos_token_id")),
        *_ids(folder / "config.json", config.get("eos_token_id")),
    ]
    try:
        specials = SpecialTokens(
            bos_token=names.get("bos_token", ""),
            eos_token=names.get("eos_token", ""),
            eos_ids=tuple(eos_ids),
            named=(*names.values(), *_more_specials(settings)),
            extra=_listed_tokens(settings),
        )
        return Tokenizer(definition, specials, num_embeddings=num_embeddings), names
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{path} is malformed ({error!r}); fetch the model again") from error


def _ids(path: Path, value: Any) -> list[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ModelError(f"{path}: eos_token_id is {value!r}, not a token id or a list of them")
    return ids


def _named_specials(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the named special tokens; a token is a string or an object with ``content``."""
    old = read_json_if_there(folder / "special_tokens_map.json")
    names = {}
    for name in NAMED_SPECIALS:
        value = settings.get(name, old.get(name))
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            names[name] = value
    return names


def _more_specials(settings: Mapping[str, Any]) -> list[str]:
    """Texts of special tokens that have no name of their own."""
    texts = []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = settings.get(key) or ()
        for token in value.values() if isinstance(value, Mapping) else value:
            text = token.get("content") if isinstance(token, Mapping) else token
            if isinstance(text, str):
                texts.append(text)
    return texts


def _listed_tokens(settings: Mapping[str, Any]) -> tuple[AddedToken, ...]:
    """The added tokens of ``tokenizer_config.json``, which may know more than the tokenizer."""
    flags = ("special", "lstrip", "rstrip", "normalized", "single_word")
    return tuple(
        AddedToken(
            id=int(token_id),
            content=entry["content"],
            **{name: bool(entry.get(name, False)) for name in flags},
        )
        for token_id, entry in (settings.get("added_tokens_decoder") or {}).items()
    )


def read_chat_templates(folder: Path) -> dict[str, str]:
    """The model's chat templates by name; one that has none is called ``default``.

    ``chat_template.jinja`` wins over ``chat_template.json``, that over the entry of
    ``tokenizer_config.json``, as in `transformers`; ``additional_chat_templates`` holds others.
    Raises `ModelError`.
    """
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    templates = {path.stem: _read_text(path) for path in more}
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return {**templates, "default": _read_text(jinja)}
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = folder / name
        value = read_json_if_there(path).get("chat_template")
        if value is not None:
            return templates | _named_templates(path, value)
    return templates


def chosen_template(folder: Path, templates: Mapping[str, str]) -> str | None:
    """Of several the one named ``default``. Raises `ModelError` where none is."""
    if not templates or "default" in templates:
        return templates.get("default")
    if len(templates) == 1:
        return next(iter(templates.values()))
    known = ", ".join(re.sub(r"\s+", " ", name) for name in templates)
    raise ModelError(f"{folder}: no chat template is named default (there are: {known})")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _named_templates(path: Path, value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    templates: dict[str, Any] = {}
    if isinstance(value, Mapping):
        templates = dict(value)
    elif isinstance(value, list):
        templates = {str(t.get("name")): t.get("template") for t in value if isinstance(t, Mapping)}
    found = {name: text for name, text in templates.items() if isinstance(text, str)}
    if not found:
        raise ModelError(f"{path}: no chat template is named default (there are: none)")
    return found
