"""One piece through the flash attention that torch brings for the CPU."""

from __future__ import annotations

from functools import cache

import torch


@cache
def is_available() -> bool:
    """Whether this torch has the operator and it returns the log-sum-exp as expected."""
    try:
        ones = torch.ones(1, 1, 2, 8)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            ones, ones, ones, 0.0, True, scale=0.125
        )
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False
    expected = torch.tensor([1.0, 1.0 + float(torch.log(torch.tensor(2.0)))])
    return bool(
        torch.allclose(out, ones)
        and lse.shape == (1, 1, 2)
        and torch.allclose(lse[0, 0].float(), expected, atol=1e-5)
    )


def attend_piece_flash_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Contract of `attend_piece`; the output comes in the dtype of ``q``.

    A context piece folds the query heads of a key head into the rows; a causal piece makes
    them a batch over the same keys, since the mask counts rows.
    """
    num_kv_heads, num_queries, group, head_dim = q.shape
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if causal and num_queries > 1:
        size = (group, num_kv_heads, num_queries, head_dim)
        out, lse = flash(
            q.permute(2, 0, 1, 3), k.expand(size), v.expand(size), 0.0, True, scale=scale
        )
        return out.permute(1, 2, 0, 3), lse.permute(1, 2, 0)
    rows = q.reshape(1, num_kv_heads, num_queries * group, head_dim)
    out, lse = flash(rows, k.unsqueeze(0), v.unsqueeze(0), 0.0, False, scale=scale)
    shape = (num_kv_heads, num_queries, group)
    return out.reshape(*shape, head_dim), lse.reshape(shape)
