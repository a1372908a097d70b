"""What steps of the engine took on this machine, as a sum of parts, kept in the cache folder.

Seconds of a step: some for itself, some for each token that goes through the model, for each row
that runs and for each token of keys and values that is kept. The four are fitted to the steps of a
run by least squares, none below zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from batchradix._version import VERSION
from batchradix.engine.device import processor_name
from batchradix.engine.kept_table import NO_TABLE, read_table, write_table
from batchradix.settings import EngineSettings
from batchradix.types import StepStats

MIN_STEPS = 12
_WARM_UP_STEPS = 2
_FORMAT = 1
_KIND = "costs"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Seconds: of a step, of a token through the model, of a running row, of a KV token kept."""

    step_s: float
    token_s: float
    row_s: float
    kv_token_s: float

    def seconds(self, num_tokens: int, num_rows: int, num_kv_tokens: int) -> float:
        """What a step takes."""
        return (
            self.step_s
            + self.token_s * num_tokens
            + self.row_s * num_rows
            + self.kv_token_s * num_kv_tokens
        )


class CostMeter:
    """Watches the steps of a run; a `types.StepObserver` that keeps sums alone."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._products = np.zeros((4, 4))
        self._targets = np.zeros(4)

    def __call__(self, step: StepStats) -> None:
        if not step.model_tokens:
            return
        self._num_steps += 1
        if self._num_steps <= _WARM_UP_STEPS:
            return
        seconds = step.schedule_s + step.forward_s + step.mask_s + step.sample_s + step.collect_s
        parts = np.array([1.0, step.model_tokens, step.running_rows, step.kv_tokens])
        self._products += np.outer(parts, parts)
        self._targets += seconds * parts

    @property
    def costs(self) -> StepCosts | None:
        """What was found, None after fewer than `MIN_STEPS` steps."""
        if self._num_steps < MIN_STEPS:
            return None
        # Of widely different sizes, so that they are brought to one before they are compared.
        scale = np.sqrt(np.maximum(np.diag(self._products), 1e-300))
        products = self._products / np.outer(scale, scale)
        targets = self._targets / scale
        left = [0, 1, 2, 3]
        found = np.zeros(4)
        while left:
            solved = np.linalg.lstsq(products[np.ix_(left, left)], targets[left], rcond=1e-9)[0]
            if solved.min() >= 0:
                found[left] = solved / scale[left]
                break
            left.pop(int(solved.argmin()))
        if not found.any():
            return None
        names = ("step_s", "token_s", "row_s", "kv_token_s")
        return StepCosts(**dict(zip(names, found.tolist(), strict=True)))


def costs_key(model_hash: str, settings: EngineSettings) -> dict[str, Any]:
    """All that a step's time depends on beside what is in it, as a JSON object."""
    device = torch.device(settings.device)
    return {
        "format": _FORMAT,
        "version": VERSION,
        "torch": torch.__version__,
        "processor": processor_name(device),
        "model": model_hash,
        "num_threads": settings.num_threads if device.type == "cpu" else 0,
        **{
            name: getattr(settings, name)
            for name in ("dtype", "quantize", "kv_dtype", "attention", "deterministic", "overlap")
        },
    }


def write_costs(folder: Path, key: Mapping[str, Any], costs: StepCosts) -> None:
    """Keeps costs in the cache folder, in the place of older ones. Raises `ModelError` or
    `OSError` when the folder cannot be written."""
    write_table(folder, _KIND, key, costs=asdict(costs))


def read_costs(folder: Path, key: Mapping[str, Any]) -> StepCosts | None:
    """The costs of a key, None where there are none to be trusted."""
    try:
        costs = StepCosts(**read_table(folder, _KIND, key, "costs"))
        trusted = all(0 <= float(value) < math.inf for value in asdict(costs).values())
    except NO_TABLE:
        return None
    return costs if trusted else None
