"""A LoRA adapter as PEFT saves it: ``adapter_config.json`` and ``adapter_model.safetensors``.

Hu et al. (2021); PEFT's `LoraConfig` says what the fields mean. Nothing is imported from it, and
pickles (``adapter_model.bin``) are never opened.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchradix.checkpoint.content_hash import file_sha256
from batchradix.checkpoint.json_file import read_json
from batchradix.checkpoint.weights import read_safetensors_header
from batchradix.errors import ModelError

__all__ = ["Adapter", "open_adapter"]

_CONFIG, _WEIGHTS, _PICKLE = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
# Fields that change what is computed in a way that no product of two matrices holds.
_NOT_PLAIN = (
    *("use_dora", "lora_bias", "fan_in_fan_out", "use_qalora", "use_bdlora"),
    *("layer_replication", "trainable_token_indices", "target_parameters"),
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config"),
)
_MOST = 1e15  # of a rank or alpha; larger ones are damage
# Ways to begin training that change the model's own weights too.
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """``scales``: by the name of each changed layer, what the product of its matrices is multiplied
    by; ``replaced``: names of tensors that stand in for the model's. ``content_hash``: hex SHA-256
    over what decides the result."""

    path: Path
    weight_file: Path
    scales: Mapping[str, float]
    replaced: frozenset[str]
    content_hash: str

    @staticmethod
    def down_name(layer: str) -> str:
        """The tensor [r, in_size] of a layer in the file."""
        return f"{_PREFIX}{layer}{_DOWN}"

    @staticmethod
    def up_name(layer: str) -> str:
        """The tensor [out_size, r]."""
        return f"{_PREFIX}{layer}{_UP}"

    @staticmethod
    def replacement_name(name: str) -> str:
        return f"{_PREFIX}{name}"


def open_adapter(folder: str | os.PathLike[str]) -> Adapter:
    """Reads settings and names, no weights.

    Raises `ModelError` for what is no LoRA adapter, is incomplete or damaged, and for variants that
    cannot be merged into the model's weights.
    """
    path = Path(folder).expanduser()
    config_file, weight_file = path / _CONFIG, path / _WEIGHTS
    if not config_file.is_file():
        raise ModelError(
            f"{path} holds no {_CONFIG}; give the folder of a LoRA adapter that PEFT saved"
        )
    if not weight_file.is_file():
        pickle = " (a pickle, which can run code, is never opened)"
        found = f", only {_PICKLE}{pickle}" if (path / _PICKLE).is_file() else ""
        raise ModelError(f"{path} holds no {_WEIGHTS}{found}; save the adapter as safetensors")
    config = read_json(config_file)
    _refuse(config_file, config)
    header = read_safetensors_header(weight_file)
    ranks, replaced = _layers(weight_file, header)
    _check_targets(config_file, config, ranks)
    scales = {layer: _scale(config_file, config, layer, rank) for layer, rank in ranks.items()}
    digest = hashlib.sha256(b"batchradix adapter 1\n")
    digest.update(json.dumps(scales, sort_keys=True).encode())
    digest.update(file_sha256(weight_file).encode())
    return Adapter(
        path=path,
        weight_file=weight_file,
        scales=scales,
        replaced=replaced,
        content_hash=digest.hexdigest(),
    )


def _refuse(path: Path, config: Mapping[str, Any]) -> None:
    remedy = "merge it into its base model with peft (merge_and_unload) and give that"
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise ModelError(f"{path}: adapters of kind {kind} are not supported, only LORA; {remedy}")
    used = [name for name in _NOT_PLAIN if config.get(name)]
    if config.get("bias", "none") != "none":
        used.append(f"bias {config['bias']!r}")
    if used:
        raise ModelError(f"{path}: an adapter with {used[0]} is not supported; {remedy}")
    begun = str(config.get("init_lora_weights", True)).lower()
    if begun.startswith(_CHANGE_THE_BASE):
        raise ModelError(
            f"{path}: an adapter begun with {begun} belongs to a base model that was changed too; "
            f"save it as a plain one (peft: path_initial_model_for_weight_conversion)"
        )


def _layers(
    path: Path, header: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, int], frozenset[str]]:
    """The rank of each changed layer, and the tensors that replace the model's."""
    ranks: dict[str, int] = {}
    replaced = set()
    for name, entry in header.items():
        if not name.startswith(_PREFIX):
            raise ModelError(f"{path}: tensor {name} is not named as PEFT does; save it with peft")
        inner = name.removeprefix(_PREFIX)
        if inner.endswith(_DOWN):
            layer = inner.removesuffix(_DOWN)
            other = header.get(Adapter.up_name(layer))
            down, up = entry["shape"], [] if other is None else other["shape"]
            if len(down) != 2 or len(up) != 2 or up[1] != down[0]:
                raise ModelError(
                    f"{path}: there is no {layer}{_UP} that fits its {_DOWN[1:]}; "
                    f"save the adapter again"
                )
            ranks[layer] = down[0]
        elif inner.endswith(_UP):
            if Adapter.down_name(inner.removesuffix(_UP)) not in header:
                raise ModelError(f"{path}: {inner} has no {_DOWN[1:]}; save the adapter again")
        elif "lora_" in inner:
            raise ModelError(
                f"{path}: tensor {inner} is not supported, only LoRA of linear layers; merge the "
                f"adapter into its base model with peft (merge_and_unload) and give that"
            )
        else:
            replaced.add(inner)
    if not ranks and not replaced:
        raise ModelError(f"{path} holds no weights; save the adapter again")
    return ranks, frozenset(replaced)


def _check_targets(path: Path, config: Mapping[str, Any], layers: Mapping[str, int]) -> None:
    """Every target that is listed by name has weights; patterns may match nothing."""
    targets = config.get("target_modules")
    for target in targets if isinstance(targets, list) else []:
        if not any(layer == target or layer.endswith(f".{target}") for layer in layers):
            raise ModelError(
                f"{path} names the target {target}, of which {_WEIGHTS} has no weights; "
                f"save the adapter again"
            )


def _scale(path: Path, config: Mapping[str, Any], layer: str, rank: int) -> float:
    """lora_alpha / r, or over its root, by the first pattern that the layer's name ends with."""
    expected = _by_pattern(path, config, "rank_pattern", layer, config.get("r", 8))
    alpha = _by_pattern(path, config, "alpha_pattern", layer, config.get("lora_alpha", 8))
    if expected != rank:
        raise ModelError(
            f"{path} says that {layer} has rank {expected}, and its weights have {rank}; "
            f"save the adapter again"
        )
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _by_pattern(path: Path, config: Mapping[str, Any], name: str, layer: str, default: Any) -> Any:
    value = default
    patterns = config.get(name) or {}
    try:
        for pattern, given in patterns.items():
            if re.match(rf"(.*\.)?({pattern})$", layer):
                value = given
                break
    except (AttributeError, re.error) as error:
        raise ModelError(f"{path}: {name} is {patterns!r}, which cannot be read") from error
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < _MOST:
        raise ModelError(f"{path}: {name} or its default is {value!r}, not a number above 0")
    return value
