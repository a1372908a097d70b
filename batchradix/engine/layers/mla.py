"""Queries, latents and rope keys of multi-head latent attention (DeepSeek-V2, 2024).

Legend: T tokens, H heads, C latent, R rope, P nope.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from batchradix.checkpoint.model_config import MlaConfig
from batchradix.engine.layers.linear import Linear, Rows
from batchradix.engine.layers.norm import RMSNorm
from batchradix_kernels.rope import rope

NORM_EPSILON = 1e-6  # of the norms inside, whatever the model's is: so are the published ones


@dataclass(frozen=True, slots=True)
class QueryLora:
    """Queries through a narrow layer: its norm, and what makes the heads of its result."""

    norm: RMSNorm
    b_proj: Linear


class LatentProjection:
    """``a_proj`` gives queries (of all heads, or where there is a ``lora`` the narrow ones), then
    the latent and the rope key. Rope pairs stand half a head apart."""

    def __init__(
        self,
        mla: MlaConfig,
        num_heads: int,
        a_proj: Linear,
        lora: QueryLora | None,
        latent_norm: RMSNorm,
    ) -> None:
        self.mla = mla
        self.num_heads = num_heads
        self.a_proj = a_proj
        self.lora = lora
        self.latent_norm = latent_norm

    @property
    def is_quantised(self) -> bool:
        return self.a_proj.is_quantised

    def __call__(
        self, x: Rows, cosines: torch.Tensor, sines: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, D] to q_nope [T, H, P], q_rope [T, H, R], latent [T, C] and k_rope [T, R]: what
        `MlaBackend.run` takes. ``cosines``, ``sines``: float32[T, R / 2]."""
        mla = self.mla
        out = self.a_proj(x)
        latents_at = out.shape[1] - mla.kv_lora_rank - mla.rope_dim
        keys_at = out.shape[1] - mla.rope_dim
        queries = out[:, :latents_at]
        if self.lora is not None:
            b_proj = self.lora.b_proj
            queries = b_proj(self.lora.norm.before(b_proj.is_quantised, queries.contiguous(), None))
        heads = queries.reshape(queries.shape[0], self.num_heads, -1)
        rotated = torch.cat((heads[..., mla.nope_dim :], out[:, None, keys_at:]), dim=1)
        rope(rotated, cosines, sines, self.num_heads, 1)
        latent = self.latent_norm(out[:, latents_at:keys_at].contiguous())
        return heads[..., : mla.nope_dim], rotated[:, :-1], latent, rotated[:, -1]
