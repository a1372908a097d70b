"""Attention over the pieces of a tree, one query at a time, written to be obviously right."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def slots_of_query(
    query: int, context: Iterable[tuple[int, ...]], causal: Iterable[tuple[int, ...]]
) -> list[int]:
    """Every slot that ``query`` attends to; pieces as in `tree_attention_reference`."""
    slots: list[int] = []
    for slot_start, num_slots, query_start, query_end in context:
        if query_start <= query < query_end:
            slots.extend(range(slot_start, slot_start + num_slots))
    for slot_start, _, query_start, query_end in causal:
        if query_start <= query < query_end:
            slots.extend(range(slot_start, slot_start + query - query_start + 1))
    return slots


def tree_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    context: Iterable[tuple[int, ...]],
    causal: Iterable[tuple[int, ...]],
    *,
    scale: float,
) -> torch.Tensor:
    """Grouped-query attention of every query over the slots of its pieces, in float64.

    ``q``: [T, H, E]; ``k``, ``v``: [K, S, E] over the slots of a pool, with ``H`` a multiple of
    ``K`` and query head ``h`` reading key head ``h // (H // K)``. ``context`` and ``causal``:
    (slot_start, num_slots, query_start, query_end); in a context piece every query attends to
    every slot, in a causal piece query ``query_start + i`` to the first ``i + 1`` slots.
    Returns float32[T, H, E].
    """
    context, causal = list(context), list(causal)
    group = q.shape[1] // k.shape[0]
    out = torch.empty(q.shape, dtype=torch.float64)
    for t in range(q.shape[0]):
        slots = slots_of_query(t, context, causal)
        for head in range(q.shape[1]):
            keys = k[head // group, slots].double()
            values = v[head // group, slots].double()
            weights = torch.softmax(keys @ q[t, head].double() * scale, dim=0)
            out[t, head] = weights @ values
    return out.float()


def tree_attention_lse_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    context: Iterable[tuple[int, ...]],
    causal: Iterable[tuple[int, ...]],
    *,
    scale: float,
) -> torch.Tensor:
    """The log-sum-exps of the scores behind `tree_attention_reference`: float32[T, H]."""
    context, causal = list(context), list(causal)
    group = q.shape[1] // k.shape[0]
    keys = k.double().repeat_interleave(group, dim=0)  # [H, S, E]
    rows = []
    for t in range(q.shape[0]):
        seen = keys[:, slots_of_query(t, context, causal)]
        rows.append((torch.einsum("he,hse->hs", q[t].double(), seen) * scale).logsumexp(dim=1))
    return torch.stack(rows).float()
