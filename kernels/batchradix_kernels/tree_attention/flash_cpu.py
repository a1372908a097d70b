"""Pieces through the flash attention that torch brings for the CPU.

It wants values as wide as keys: narrower ones are filled up with zeros, and the result is cut.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn.functional import pad


@cache
def is_available() -> bool:
    """Whether this torch has the operator and it returns the log-sum-exp as expected."""
    try:
        ones = torch.ones(1, 1, 2, 8)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            ones, ones, ones, 0.0, True, scale=0.125
        )
        hidden = torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])
        masked, masked_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            ones, ones, ones, 0.0, False, attn_mask=hidden[None, None], scale=0.125
        )
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False
    expected = torch.tensor([1.0, 1.0 + float(torch.log(torch.tensor(2.0)))])
    return all(
        torch.allclose(each, ones)
        and each_lse.shape == (1, 1, 2)
        and torch.allclose(each_lse[0, 0].float(), expected, atol=1e-5)
        for each, each_lse in ((out, lse), (masked, masked_lse))
    )


def attend_piece_flash_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Contract of `attend_piece`; the output comes in the dtype of ``q``.

    A context piece folds the query heads of a key head into the rows; a causal piece makes
    them a batch over the same keys, since the mask counts rows.
    """
    num_kv_heads, num_queries, group, head_dim = q.shape
    v_dim = v.shape[-1]
    v = pad(v, (0, head_dim - v_dim)) if v_dim < head_dim else v
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if causal and num_queries > 1:
        size = (group, num_kv_heads, num_queries, head_dim)
        out, lse = flash(
            q.permute(2, 0, 1, 3), k.expand(size), v.expand(size), 0.0, True, scale=scale
        )
        return out.permute(1, 2, 0, 3)[..., :v_dim], lse.permute(1, 2, 0)
    rows = q.reshape(1, num_kv_heads, num_queries * group, head_dim)
    out, lse = flash(rows, k.unsqueeze(0), v.unsqueeze(0), 0.0, False, scale=scale)
    shape = (num_kv_heads, num_queries, group)
    return out.reshape(*shape, head_dim)[..., :v_dim], lse.reshape(shape)


def attend_padded_flash_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Contract of `attend_padded`."""
    head_dim, v_dim = q.shape[-1], v.shape[-1]
    v = pad(v, (0, head_dim - v_dim)) if v_dim < head_dim else v
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(side.unsqueeze(1) for side in (q, k, v)),
        0.0,
        False,
        attn_mask=bias.to(q.dtype).unsqueeze(1),
        scale=scale,
    )
    return out[:, 0, :, :v_dim].float(), lse[:, 0]
