"""Moving stored keys to other positions, in plain torch."""

from __future__ import annotations

import torch


def rope_delta_reference(
    keys: torch.Tensor, slots: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> None:
    """Same contract as `rope_delta`, on any device and in any floating dtype."""
    low, high = (
        keys[..., slots.long(), :]
        .to(torch.promote_types(keys.dtype, torch.float32))
        .chunk(2, dim=-1)
    )
    rotated = torch.cat((low * cosines - high * sines, high * cosines + low * sines), dim=-1)
    keys[..., slots.long(), :] = rotated.to(keys.dtype)
