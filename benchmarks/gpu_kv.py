"""The kernels around attention: storing keys and values, moving them, merging partial results."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from gpu_measure import EXACT, Call, Comparison, Kernel

from batchradix_kernels.kv_move import kv_move, kv_move_reference
from batchradix_kernels.kv_store import kv_store, kv_store_reference
from batchradix_kernels.lse_merge import (
    lse_merge,
    lse_merge_reference,
    merge_parts,
    merge_parts_reference,
)
from batchradix_kernels.testing import TOLERANCES

HEADS = ((8, 128), (3, 64), (1, 20))  # key heads, head dimension


def _compare_store(device: torch.device, dtype: torch.dtype) -> Iterator[Comparison]:
    """Every third token is padding; keys and values are views of all heads, in float32 too."""
    for num_tokens, (heads, width) in zip((1, 131, 300), HEADS, strict=True):
        for given in dict.fromkeys((dtype, torch.float32)):
            num_slots = num_tokens + 7
            pool = torch.randn(2, heads, num_slots, width, device=device).to(dtype)
            slots = torch.randperm(num_slots, device=device)[:num_tokens].int()
            slots[2::3] = -1
            all_heads = torch.randn(num_tokens, 4 * heads, width, device=device).to(given)
            k, v = all_heads.split((2 * heads, heads, heads), dim=1)[1:]
            wanted = pool.clone()
            kv_store_reference(k, v, slots, wanted)
            kv_store(k, v, slots, pool)
            label = f"{num_tokens} tokens, {heads} × {width}, from {given.itemsize * 8} bits"
            yield Comparison(label, pool, wanted, EXACT)


def _store_calls(device: torch.device, num_elements: int) -> Iterator[Call]:
    num_tokens = num_elements // (2 * 8 * 128)
    k, v = torch.randn(2, num_tokens, 8, 128, device=device).bfloat16()
    pool = torch.zeros(2, 8, num_tokens, 128, device=device, dtype=torch.bfloat16)
    slots = torch.randperm(num_tokens, device=device).int()
    yield Call(
        f"{num_tokens:,} tokens, 8 heads of 128, bfloat16",
        lambda: kv_store(k, v, slots, pool),
        2 * pool.nbytes,
    )


def _compare_move(device: torch.device, dtype: torch.dtype) -> Iterator[Comparison]:
    """Slots that are source and target, and others that stay as they are."""
    for layers, num_slots, (heads, width) in zip((2, 1, 3), (70, 300, 5), HEADS, strict=True):
        pool = torch.randn(layers, 2, heads, num_slots, width, device=device).to(dtype)
        sources, targets = (
            torch.randperm(num_slots, device=device)[: num_slots // 2].int() for _ in range(2)
        )
        wanted = pool.clone()
        kv_move_reference(wanted, sources, targets)
        kv_move(pool, sources, targets)
        label = f"{layers} layers, {len(sources)} of {num_slots} slots, {heads} × {width}"
        yield Comparison(label, pool, wanted, EXACT)


def _move_calls(device: torch.device, num_elements: int) -> Iterator[Call]:
    num_slots = num_elements // (2 * 16 * 8 * 128)
    pool = torch.zeros(16, 2, 8, num_slots, 128, device=device, dtype=torch.bfloat16)
    slots = torch.randperm(num_slots, device=device).int()
    moved = max(1, num_slots // 2)
    yield Call(
        f"{moved:,} slots of 16 layers, 8 heads of 128, bfloat16",
        lambda: kv_move(pool, slots[:moved], slots[-moved:]),
        4 * pool.nbytes * moved // num_slots,  # read and written twice
    )


def _compare_merge(device: torch.device, dtype: torch.dtype) -> Iterator[Comparison]:
    """Queries with no part, one or many, among parts that nobody may read."""
    for counts, (heads, width) in zip(
        ([3, 0, 1, 5], [1] * 70, [0, 2, 130]), ((32, 128), (9, 80), (3, 20)), strict=True
    ):
        num_parts = sum(counts) + 2
        outputs = torch.randn(num_parts, heads, width, device=device)
        lses = 20 * torch.randn(num_parts, heads, device=device)
        lses[:, 0] = -math.inf  # a head without keys anywhere
        chosen = torch.randperm(num_parts, device=device)
        outputs[chosen[-2:]], lses[chosen[-2:]] = math.nan, math.nan
        unread = torch.tensor([-5, 1 << 30], device=device)
        parts = torch.cat([chosen[:-2], unread]).int()
        offsets = torch.tensor([0, *counts], device=device).cumsum(0).int()
        out = torch.full((len(counts), heads, width), math.nan, device=device, dtype=dtype)
        lse = torch.full(out.shape[:2], math.nan, device=device)
        wanted, wanted_lse = out.clone(), lse.clone()
        merge_parts(outputs, lses, offsets, parts, out, lse)
        merge_parts_reference(outputs, lses, offsets, parts, wanted, wanted_lse)
        label = f"{len(counts)} queries, {heads} × {width}"
        yield Comparison(f"parts of {label}", out, wanted, TOLERANCES[dtype])
        yield Comparison(
            f"log-sum-exps of {label}",
            lse.clamp_min(-1e30),
            wanted_lse.clamp_min(-1e30),
            TOLERANCES[torch.float32],
        )
    outputs, lses = torch.randn(3, 7, 9, 64, device=device), 3 * torch.randn(3, 7, 9, device=device)
    for what, got, wanted in zip(
        ("levels", "log-sum-exps of levels"),
        lse_merge(outputs, lses),
        lse_merge_reference(outputs, lses),
        strict=True,
    ):
        yield Comparison(what, got, wanted, TOLERANCES[torch.float32])


def _merge_calls(device: torch.device, num_elements: int) -> Iterator[Call]:
    heads, width, each = 32, 128, 4
    num_queries = num_elements // (heads * width * each)
    outputs = torch.randn(num_queries * each, heads, width, device=device)
    lses = torch.randn(num_queries * each, heads, device=device)
    offsets = each * torch.arange(num_queries + 1, device=device, dtype=torch.int32)
    parts = torch.randperm(num_queries * each, device=device).int()
    out = torch.empty(num_queries, heads, width, device=device, dtype=torch.bfloat16)
    yield Call(
        f"{num_queries:,} queries of {each} parts, {heads} heads of {width}",
        lambda: merge_parts(outputs, lses, offsets, parts, out),
        outputs.nbytes + lses.nbytes + out.nbytes,
    )


KV_KERNELS: dict[str, Kernel] = {
    "kv_store": Kernel(_compare_store, _store_calls),
    "kv_move": Kernel(_compare_move, _move_calls),
    "lse_merge": Kernel(_compare_merge, _merge_calls),
}
