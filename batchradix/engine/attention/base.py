"""What the model asks of attention: a pool, a plan once a step, a call every layer."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from batchradix.checkpoint.model_config import ModelConfig
from batchradix.config import KVDType
from batchradix.engine.step import Step
from batchradix.types import I64
from batchradix_kernels.float8 import FLOAT8

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that `EngineSettings` names so."""
    return _DTYPES[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The numbers of a model that a backend needs; ``scale`` multiplies the scores.

    ``kv_dtype``: what keys and values are stored in where that is not ``dtype``, in which they are
    multiplied, `FLOAT8`.

    ``batch_invariant`` asks that what a query gets does not depend, to the last bit, on the rows
    beside it, on where slots lie, or on what was computed in which step.

    ``layer_windows``, ``softcap``, ``sinks``: as in `ModelConfig`; the cap is that of scores after
    ``scale``.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    dtype: torch.dtype
    device: torch.device
    batch_invariant: bool = False
    kv_dtype: torch.dtype | None = None
    layer_windows: tuple[int | None, ...] = ()
    softcap: float | None = None
    sinks: bool = False

    def window(self, layer: int) -> int | None:
        """Of a layer: how many tokens a query sees, itself included; None: all."""
        return self.layer_windows[layer] if self.layer_windows else None

    def windows_within(self, step: Step) -> tuple[int | None, ...]:
        """Of each layer, in a step; None also where no query has so many tokens before it."""
        if not self.layer_windows:
            return (None,) * self.num_layers
        longest = int(step.positions.max()) + 1
        return tuple(w if w is not None and w < longest else None for w in self.layer_windows)

    @property
    def pool_dtype(self) -> torch.dtype:
        """What keys and values are stored in."""
        return self.kv_dtype or self.dtype

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """As in `ModelConfig`."""
        return self.num_kv_heads, self.head_dim, self.head_dim

    @property
    def sizes(self) -> dict[str, int]:
        """The numbers that decide how long attention takes, by name."""
        return {
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
        }

    @property
    def peculiarities(self) -> dict[str, Any]:
        """What else decides it in models that have such; may be written as JSON."""
        has_windows = any(window is not None for window in self.layer_windows)
        found = {
            "layer_windows": list(self.layer_windows) if has_windows else None,
            "softcap": self.softcap,
            "sinks": self.sinks,
        }
        return {name: value for name, value in found.items() if value}

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        *,
        dtype: str,
        device: torch.device,
        batch_invariant: bool = False,
        kv_dtype: KVDType = "auto",
    ) -> AttentionShape:
        """The shape of a model; ``dtype`` and ``kv_dtype`` are named as in `EngineSettings`."""
        return cls(
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale or config.head_dim**-0.5,
            dtype=torch_dtype(dtype),
            device=device,
            batch_invariant=batch_invariant,
            kv_dtype=FLOAT8 if kv_dtype == "fp8" else None,
            layer_windows=config.layer_windows,
            softcap=config.attention_softcap,
            sinks=config.attention_sinks,
        )


class KVBackend(Protocol):
    """Owns the layout of the pool; pool and plan are opaque to everyone else.

    Legend: T queries of the step, H query heads, K key heads, E key, V value, L layers, n slots.
    """

    def allocate(self, num_slots: int) -> Any:
        """A pool of keys and values of ``num_slots`` tokens, its memory undefined."""
        ...

    def move(self, pool: Any, moves: I64) -> None:
        """Copies (source, target, num_slots) runs in every layer, all reads first."""
        ...

    def poison(self, pool: Any, slot_start: int, num_slots: int) -> None:
        """Fills slots with NaN in every layer; for tests."""
        ...

    def export(self, pool: Any, slots: I64) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and values in some slots, [L, K, n, E] and [L, K, n, V] in the pool's
        dtype and in this layout whatever the pool's is."""
        ...

    def load(self, pool: Any, slot_start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes keys and values, as `export` gave them, to n slots from ``slot_start`` on."""
        ...

    def plan(self, step: Step) -> Any:
        """Everything of the step that does not depend on the layer."""
        ...


class AttentionBackend(KVBackend, Protocol):
    """For models that keep keys and values of heads; their sizes are the same, E."""

    def run(
        self,
        layer: int,
        q_THE: torch.Tensor,
        k_TKE: torch.Tensor,
        v_TKE: torch.Tensor,
        pool: Any,
        plan: Any,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes keys and values of the step's queries to the pool, then attends; in a layer with
        a window (`AttentionShape.layer_windows`) to the last tokens of each query alone.

        ``sinks_H``: float32, a score a head that takes softmax weight and gives no value.
        ``q_THE`` may be float32 beside another model dtype; returns [T, H · E] in the model
        dtype. Reads no slot outside the step's pieces.
        """
        ...


@runtime_checkable
class FixedPlans(Protocol):
    """A backend that can put the plans of many steps in one place, one after the other, so that
    what was recorded of one step can be replayed on others. All of it is on the current device."""

    def lay_out(self, step: Step) -> Any:
        """A step's plan as far as the host gets with it."""
        ...

    def sizes(self, layout: Any, num_tokens: int) -> Hashable:
        """Of a plan with room for the layout, in a step of ``num_tokens``, which are at least
        those of the layout; of few different sizes over a run."""
        ...

    def empty_plan(self, sizes: Any) -> Any:
        """A plan of these sizes, to be filled before `AttentionBackend.run` takes it."""
        ...

    def fill(self, plan: Any, layout: Any) -> None:
        """Makes it the plan of a step. The queries it has beyond the step's read and write no
        slot, and get numbers that mean nothing."""
        ...
