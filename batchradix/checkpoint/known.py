"""Models on the hub that many people run, as numbers, which say what they would need."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from batchradix.checkpoint.hf_config import hf_config
from batchradix.checkpoint.model_config import ModelConfig

_FILE = "known_models.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """``config``: sizes alone; how positions are scaled is left out.
    ``billion_parameters`` is what its makers say, ``is_gated`` whether terms must be accepted."""

    name: str
    license: str
    is_gated: bool
    billion_parameters: float
    config: ModelConfig


def known_models() -> list[KnownModel]:
    """All of them, in the order of the file: families, each from small to large."""
    entries = json.loads(files("batchradix.checkpoint").joinpath(_FILE).read_text("utf-8"))
    return [
        KnownModel(
            name=name,
            license=entry["license"],
            is_gated=entry["gated"],
            billion_parameters=entry["billion_parameters"],
            config=hf_config(Path(_FILE), entry["config"]),
        )
        for name, entry in entries.items()
    ]
