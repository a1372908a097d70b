"""Attention over the pieces of a tree, one query at a time, written to be obviously right."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def slots_of_query(
    query: int, context: Iterable[tuple[int, ...]], causal: Iterable[tuple[int, ...]]
) -> list[int]:
    """Every slot of a query's pieces that it may attend to, in their order; pieces as in
    `tree_attention_reference`."""
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
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Grouped-query attention of every query over the slots of its pieces, in float64.

    ``q``: [T, H, E]; ``k``, ``v``: [K, S, E] over the slots of a pool, with ``H`` a multiple of
    ``K`` and query head ``h`` reading key head ``h // (H // K)``. ``context`` and ``causal``:
    (slot_start, num_slots, query_start, query_end); in a context piece every query attends to
    every slot, in a causal piece query ``query_start + i`` to the first ``i + 1`` slots. With a
    ``window`` it attends to the last so many of its slots alone; its pieces then stand in order
    of position. With a ``softcap`` scores become ``softcap * tanh(score / softcap)``. ``sinks``,
    [H], are scores that take weight and give no value.
    Returns float32[T, H, E].
    """
    context, causal = list(context), list(causal)
    group = q.shape[1] // k.shape[0]
    out = torch.empty(q.shape, dtype=torch.float64)
    for t in range(q.shape[0]):
        slots = _last(slots_of_query(t, context, causal), window)
        for head in range(q.shape[1]):
            keys = k[head // group, slots].double()
            values = v[head // group, slots].double()
            scores = _capped(keys @ q[t, head].double() * scale, softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head : head + 1].double()))
            weights = torch.softmax(scores, dim=0)[: len(slots)]
            out[t, head] = weights @ values
    return out.float()


def tree_attention_lse_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    context: Iterable[tuple[int, ...]],
    causal: Iterable[tuple[int, ...]],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """The log-sum-exps of the scores behind `tree_attention_reference`: float32[T, H]."""
    context, causal = list(context), list(causal)
    group = q.shape[1] // k.shape[0]
    keys = k.double().repeat_interleave(group, dim=0)  # [H, S, E]
    rows = []
    for t in range(q.shape[0]):
        seen = keys[:, _last(slots_of_query(t, context, causal), window)]
        scores = torch.einsum("he,hse->hs", q[t].double(), seen) * scale
        rows.append(_capped(scores, softcap).logsumexp(dim=1))
    return torch.stack(rows).float()


def _last(slots: list[int], window: int | None) -> list[int]:
    return slots if window is None else slots[-window:]


def _capped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)
