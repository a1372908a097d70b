"""What a model with multi-head latent attention asks of its backend: MLA beside `base`.

What is cached of a token is its latent, normalised, and behind it one rotated key that all heads
share. There are two ways to attend to cached tokens, which differ in rounding alone:

- *absorbed*: queries go through ``w_uk`` first, then all heads attend to the latents themselves,
  and what they get goes through ``w_uv``. Cheap for few queries.
- *expanded*: keys and values of every head are made of the latents. Cheap for many queries, which
  then share what that costs.

Legend: T queries of the step, H heads, C latent, R rope, P the part of a head without rope, V
value, L layers, n slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from batchradix.checkpoint.model_config import ModelConfig
from batchradix.engine.attention.base import AttentionShape, KVBackend, torch_dtype
from batchradix.engine.step import Step
from batchradix.types import I64

Form = Literal["absorbed", "expanded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaShape:
    """The numbers of a model that a backend needs; ``scale`` multiplies the scores.

    ``batch_invariant`` as in `AttentionShape`.
    """

    num_layers: int
    num_heads: int
    kv_lora_rank: int
    rope_dim: int
    nope_dim: int
    v_dim: int
    scale: float
    dtype: torch.dtype
    device: torch.device
    batch_invariant: bool = False

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        *,
        dtype: str,
        device: torch.device,
        batch_invariant: bool = False,
    ) -> MlaShape:
        """The shape of a model that has `MlaConfig`; ``dtype`` as in `EngineSettings`."""
        mla = config.mla
        assert mla is not None
        return cls(
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            kv_lora_rank=mla.kv_lora_rank,
            rope_dim=mla.rope_dim,
            nope_dim=mla.nope_dim,
            v_dim=mla.v_dim,
            scale=mla.scale,
            dtype=torch_dtype(dtype),
            device=device,
            batch_invariant=batch_invariant,
        )

    @property
    def width(self) -> int:
        """Elements of a token and layer in the pool: the latent, then the rope key."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def pool_dtype(self) -> torch.dtype:
        """What latents and rope keys are stored in."""
        return self.dtype

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """As in `ModelConfig`."""
        return 1, self.kv_lora_rank, self.rope_dim

    @property
    def sizes(self) -> dict[str, int]:
        """As in `AttentionShape`."""
        return {
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "kv_lora_rank": self.kv_lora_rank,
            "rope_dim": self.rope_dim,
            "nope_dim": self.nope_dim,
            "v_dim": self.v_dim,
        }


AnyShape: TypeAlias = AttentionShape | MlaShape


@dataclass(frozen=True, slots=True, kw_only=True)
class UpProjection:
    """A layer's ``kv_b_proj`` in two parts, contiguous, in the model's dtype.

    The key of head ``h`` without rope is ``w_uk_HPC[h] @ latent``, its value
    ``latent @ w_uv_HCV[h]``.
    """

    w_uk_HPC: torch.Tensor
    w_uv_HCV: torch.Tensor

    @classmethod
    def split(cls, kv_b: torch.Tensor, shape_HPV: tuple[int, int, int]) -> UpProjection:
        """``kv_b``: the weight [H · (P + V), C] of ``kv_b_proj``."""
        num_heads, nope_dim, v_dim = shape_HPV
        heads = kv_b.view(num_heads, nope_dim + v_dim, -1)
        return cls(
            w_uk_HPC=heads[:, :nope_dim].contiguous(),
            w_uv_HCV=heads[:, nope_dim:].transpose(1, 2).contiguous(),
        )


class MlaBackend(KVBackend, Protocol):
    """For models with latent attention. The pool is one tensor [L, slots, C + R] in the model's
    dtype unless the backend says otherwise. In `export` and `load` latents [L, 1, n, C] stand for
    the keys of one head, and rope keys [L, 1, n, R] for its values."""

    def run(
        self,
        layer: int,
        q_nope_THP: torch.Tensor,
        q_rope_THR: torch.Tensor,
        latent_TC: torch.Tensor,
        k_rope_TR: torch.Tensor,
        up: UpProjection,
        pool: Any,
        plan: Any,
    ) -> torch.Tensor:
        """Writes latents and rope keys of the step's queries to the pool, then attends.

        Latents are normalised, rope parts rotated; all may be views, in the model's dtype (or
        float32). Returns [T, H · V] in the model's dtype. Reads no slot outside the step's pieces.
        """
        ...


@dataclass(frozen=True, slots=True)
class Pieces:
    """Some of a step's pieces and the queries that they have: ``context`` and ``causal`` as in
    `Step`, but that queries are numbered within ``queries``, int64[num_tokens], which are in order
    and may be fewer than the step's."""

    context: I64
    causal: I64
    queries: I64

    @property
    def num_tokens(self) -> int:
        return len(self.queries)


def pieces_by_form(
    step: Step, shape: MlaShape, forced: Form | None = None
) -> tuple[Pieces, Pieces]:
    """The pieces of a step to attend to absorbed, and those to attend to expanded.

    By operations: for ``n`` queries and ``s`` slots a head multiplies ``n · s · (2C + R)`` times
    absorbed, and ``s · C · (P + V) + n · s · (P + R + V)`` times expanded: with the sizes of
    DeepSeek-V3, 171 queries are enough for expansion, however many slots. Absorbing a query costs
    ``C · (P + V)`` more, once a query, so a piece none of whose queries would be absorbed for
    another one may be expanded with fewer: a prompt that shares nothing always is.
    ``forced`` takes one form for all.
    """
    pieces = np.concatenate((step.context, step.causal))
    if forced is None:
        expanded = _expanded(pieces, step.num_tokens, shape)
    else:
        expanded = np.full(len(pieces), forced == "expanded")
    of_context, of_causal = expanded[: len(step.context)], expanded[len(step.context) :]
    return (
        select_pieces(step.context[~of_context], step.causal[~of_causal], step.num_tokens),
        select_pieces(step.context[of_context], step.causal[of_causal], step.num_tokens),
    )


def select_pieces(context: I64, causal: I64, num_tokens: int) -> Pieces:
    """These pieces of a step of ``num_tokens`` queries, without the queries that have none."""
    pieces = np.concatenate((context, causal))
    uses = _num_uses(pieces, num_tokens)
    numbers = np.concatenate(([0], np.cumsum(uses > 0)))
    pieces[:, 2:] = numbers[pieces[:, 2:]]
    return Pieces(pieces[: len(context)], pieces[len(context) :], np.flatnonzero(uses))


def _num_uses(pieces: I64, num_tokens: int) -> I64:
    """How many of the pieces each query has."""
    changes = np.zeros(num_tokens + 1, dtype=np.int64)
    np.add.at(changes, pieces[:, 2], 1)
    np.add.at(changes, pieces[:, 3], -1)
    return np.cumsum(changes)[:-1]


def _expanded(pieces: I64, num_tokens: int, shape: MlaShape) -> NDArray[np.bool_]:
    """Which pieces to expand. Causal pieces count as full ones in both forms."""
    up = shape.kv_lora_rank * (shape.nope_dim + shape.v_dim)
    slots, queries = pieces[:, 1], pieces[:, 3] - pieces[:, 2]
    absorbed_cost = queries * slots * (2 * shape.kv_lora_rank + shape.rope_dim)
    expanded_cost = slots * up + queries * slots * (shape.nope_dim + shape.rope_dim + shape.v_dim)
    expanded: NDArray[np.bool_] = expanded_cost < absorbed_cost

    uses = _num_uses(pieces[~expanded], num_tokens)  # absorbed pieces of each query
    gain = expanded_cost - absorbed_cost
    for index in np.flatnonzero(~expanded & (gain < queries * up)).tolist():
        mine = uses[pieces[index, 2] : pieces[index, 3]]
        if gain[index] < np.count_nonzero(mine == 1) * up:
            expanded[index] = True
            mine -= 1
    return expanded
