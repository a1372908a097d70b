"""Attention as two matrix products around a float32 softmax: any device, any shape."""

from __future__ import annotations

import math

import torch

MAX_SCORES = 1 << 22  # elements of one score matrix; longer pieces are cut along the queries


def attend_padded_matmul(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Contract of `attend_padded`."""
    if softcap is not None:
        scores = torch.bmm(q.float(), k.float().transpose(1, 2)).mul_(scale)
        return _softmax_product(_cap(scores, softcap).add_(bias.float()), v.float())
    scores = torch.baddbmm(bias.float(), q.float(), k.float().transpose(1, 2), alpha=scale)
    return _softmax_product(scores, v.float())


def attend_piece_matmul(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Contract of `attend_piece`; the output is float32."""
    num_kv_heads, num_queries, group, head_dim = q.shape
    keys, values = k.float(), v.float()
    chunk = max(1, MAX_SCORES // (num_kv_heads * group * k.shape[1]))
    outputs, lses = [], []
    for start in range(0, num_queries, chunk):
        end = min(start + chunk, num_queries)
        num_slots = end if causal else k.shape[1]
        rows = q[:, start:end].float().reshape(num_kv_heads, (end - start) * group, head_dim)
        scores = torch.bmm(rows, keys[:, :num_slots].transpose(1, 2)).mul_(scale)
        if softcap is not None:
            scores = _cap(scores, softcap)
        if causal:
            depth = torch.arange(num_slots, device=q.device)
            hidden = depth[None, :] > torch.arange(start, end, device=q.device)[:, None]
            scores.view(num_kv_heads, end - start, group, -1).masked_fill_(
                hidden[:, None], -math.inf
            )
        out, lse = _softmax_product(scores, values[:, :num_slots])
        outputs.append(out.view(num_kv_heads, end - start, group, v.shape[-1]))
        lses.append(lse.view(num_kv_heads, end - start, group))
    if len(outputs) == 1:
        return outputs[0], lses[0]
    return torch.cat(outputs, dim=1), torch.cat(lses, dim=1)


def _cap(scores: torch.Tensor, softcap: float) -> torch.Tensor:
    """In place."""
    return scores.div_(softcap).tanh_().mul_(softcap)


def _softmax_product(
    scores: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scores) @ values and the log-sum-exp; overwrites ``scores`` [B, N, S]."""
    peak = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    out = torch.bmm(weights, values).div_(total)
    return out, total.log_().add_(peak).squeeze(-1)
