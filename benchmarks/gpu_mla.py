"""The kernels for latent attention and mixtures of experts, as `gpu_kernels.py` has the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from gpu_measure import EXACT, Call, Comparison, Kernel

from batchradix_kernels.latent_store import latent_store, latent_store_reference
from batchradix_kernels.mla_attention import mla_attention, mla_attention_reference
from batchradix_kernels.moe_gemm import moe_experts, moe_experts_reference
from batchradix_kernels.moe_routing import (
    Routing,
    moe_routing,
    moe_routing_reference,
    num_blocks_at_most,
    sort_by_expert,
    sort_by_expert_reference,
)
from batchradix_kernels.testing import TOLERANCES
from batchradix_kernels.triton_runtime import serves

Pieces = list[tuple[int, int, int, int]]
LATENT, ROPE, HEAD = 512, 64, 128  # of DeepSeek-V2 and V3
V3 = Routing(
    num_chosen=8,
    scoring="sigmoid",
    num_groups=8,
    num_groups_kept=4,
    group_score="best_two",
    normalise=True,
    scaling=2.5,
)
V2 = Routing(num_chosen=6, num_groups=8, num_groups_kept=3, scaling=16.0)


def _inputs(
    num_queries: int,
    num_slots: int,
    num_heads: int,
    dims: tuple[int, int, int],
    device: torch.device,
    dtype: torch.dtype,
    *,
    absorbed: bool,
) -> tuple[torch.Tensor | None, ...]:
    """What `mla_attention` takes before the pieces; ``dims``: of a key's parts and a value."""
    key, rope, value = dims

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, dtype=torch.float32).to(dtype)

    q, q_rope = randn(num_queries, num_heads, key), randn(num_queries, num_heads, rope)
    if absorbed:
        pool = randn(num_slots, key + rope)
        return q, q_rope, pool[None, :, :key], pool[:, key:], None
    rows = randn(num_heads, num_slots, key + value)
    return q, q_rope, rows[..., :key], randn(num_slots, rope), rows[..., key:]


def _compare_attention(device: torch.device, dtype: torch.dtype) -> Iterator[Comparison]:
    decoding: Pieces = [(0, 300, 0, 7), (300, 33, 0, 4), (340, 65, 4, 7)]
    decoding += [(410 + 20 * row, 1 + 3 * row, row, row + 1) for row in range(7)]
    prefill: Pieces = [(0, 70, 0, 150)]
    shapes = [(5, 24, 8, 20)]
    if device.type == "cuda":  # the reference takes minutes on a CPU
        shapes += [(heads, LATENT, ROPE, HEAD) for heads in (16, 128)]
    for num_heads, key, rope, value in shapes:
        for absorbed in (True, False):
            dims = (key, rope, key) if absorbed else (min(key, HEAD), rope, value)
            form = "absorbed" if absorbed else "expanded"
            for kind, num_queries, context, causal in (
                ("decoding", 7, decoding, []),
                ("prefill", 150, prefill, [(77, 150, 0, 150)]),
            ):
                given = _inputs(num_queries, 600, num_heads, dims, device, dtype, absorbed=absorbed)
                scale = (dims[0] + rope) ** -0.5
                out, lse = mla_attention(*given, context, causal, scale=scale)
                wanted, wanted_lse = mla_attention_reference(*given, context, causal, scale=scale)
                label = f"{kind}, {form}, {num_heads} heads of {key} + {rope}"
                yield Comparison(label, out, wanted, TOLERANCES[dtype])
                yield Comparison(f"lse, {label}", lse, wanted_lse, TOLERANCES[torch.float32])


def _attend(
    given: tuple[torch.Tensor | None, ...], context: Pieces, causal: Pieces
) -> Callable[[], object]:
    """A call that attends and merges, planned before where there are kernels."""
    q, q_rope, keys, ropes, values = given
    assert q is not None
    assert q_rope is not None
    assert keys is not None
    assert ropes is not None
    scale = (q.shape[2] + q_rope.shape[2]) ** -0.5
    if not serves(q.device):
        return lambda: mla_attention(q, q_rope, keys, ropes, values, context, causal, scale=scale)
    from batchradix_kernels.mla_attention.triton import TritonLatentAttention

    value_dim = q.shape[2] if values is None else values.shape[2]
    kernel = TritonLatentAttention(
        absorbed=values is None,
        num_heads=q.shape[1],
        key_dim=q.shape[2],
        rope_dim=q_rope.shape[2],
        value_dim=value_dim,
        scale=scale,
        dtype=q.dtype,
        device=q.device,
    )
    table, new = (np.array(kind, dtype=np.int64).reshape(-1, 4) for kind in (context, causal))
    plan = kernel.plan(table, new, len(q))
    out = torch.empty((*q.shape[:2], value_dim), device=q.device, dtype=q.dtype)

    def run() -> None:
        kernel.attend(plan, q, q_rope, keys, ropes, values)
        kernel.merge(plan, out)

    return run


def _attention_calls(device: torch.device, num_elements: int) -> Iterator[Call]:
    """Rows with a context of their own; rows below one node, in both forms; a prompt. Few of all
    where a CPU is to do it, whose reference goes query by query."""
    num_slots = num_elements // (LATENT + ROPE)
    is_small = num_elements < 1 << 20
    few, many, most_rows, most_new = (1, 2, 4, 16) if is_small else (16, 128, 64, 4096)
    num_rows = min(most_rows, num_slots)
    each = num_slots // num_rows
    latent, head = (LATENT, ROPE, LATENT), (HEAD, ROPE, HEAD)
    of = {"device": device, "dtype": torch.bfloat16}
    for num_heads in (few, many):
        given = _inputs(num_rows, num_slots, num_heads, latent, **of, absorbed=True)
        tails = [(each * row, each, row, row + 1) for row in range(num_rows)]
        yield Call(
            f"{num_rows} rows × {each:,} slots of their own, {num_heads} heads, absorbed",
            _attend(given, tails, []),
            num_rows * each * (LATENT + ROPE) * 2,
            what=f"decode, {num_heads} heads",
        )
    shared = min(num_slots, 8192)
    for absorbed in (True, False):
        dims, form = (latent, "absorbed") if absorbed else (head, "expanded")
        given = _inputs(4 * num_rows, shared, many, dims, **of, absorbed=absorbed)
        flops = 2 * 4 * num_rows * shared * many * sum(dims)
        yield Call(
            f"{4 * num_rows} rows below {shared:,} slots, {many} heads, {form}",
            _attend(given, [(0, shared, 0, 4 * num_rows)], []),
            shared * (ROPE + (LATENT if absorbed else many * 2 * HEAD)) * 2,
            what=form,
            num_flops=flops,
        )
    length = min(num_slots, most_new)
    given = _inputs(length, length, many, head, **of, absorbed=False)
    yield Call(
        f"a prompt of {length:,}, {many} heads, expanded",
        _attend(given, [], [(0, length, 0, length)]),
        length * (ROPE + many * 2 * HEAD) * 2,
        what="prompt",
        num_flops=length * length * many * sum(head),
    )


def _compare_store(device: torch.device, dtype: torch.dtype) -> Iterator[Comparison]:
    for num_tokens, latent, rope in ((1, 512, 64), (7, 24, 8), (700, 512, 64)):
        rows = torch.randn(num_tokens, latent + rope + 3, device=device)
        slots = torch.randperm(2 * num_tokens, device=device)[:num_tokens].int()
        slots[::5] = -1
        pool = torch.zeros(2 * num_tokens, latent + rope, device=device, dtype=dtype)
        wanted = pool.clone()
        given = (rows[:, :latent], rows[:, latent : latent + rope], slots)
        latent_store(*given, pool)
        latent_store_reference(*given, wanted)
        yield Comparison(f"{num_tokens} × {latent} + {rope}", pool, wanted, EXACT)


def _store_calls(device: torch.device, num_elements: int) -> Iterator[Call]:
    width = LATENT + ROPE
    rows = torch.randn(num_elements // width, width, device=device).bfloat16()
    pool = torch.empty_like(rows)
    slots = torch.randperm(len(rows), device=device).int()
    yield Call(
        f"{len(rows):,} tokens of {LATENT} + {ROPE}, bfloat16",
        lambda: latent_store(rows[:, :LATENT], rows[:, LATENT:], slots, pool),
        2 * rows.nbytes,
    )


def _compare_routing(device: torch.device, dtype: torch.dtype) -> Iterator[Comparison]:
    kimi = Routing(num_chosen=8, scoring="sigmoid", normalise=True, scaling=2.827)
    for name, routing, num_experts in (("V2", V2, 160), ("V3", V3, 256), ("Kimi-K2", kimi, 384)):
        logits = (3 * torch.randn(130, num_experts, device=device)).to(dtype)
        bias = torch.randn(num_experts, device=device)
        for given in (None, bias):
            ids, weights = moe_routing(logits, routing, given)
            wanted_ids, wanted = moe_routing_reference(logits, routing, given)
            label = f"{name}{'' if given is None else ', biased'}"
            yield Comparison(f"experts {label}", ids, wanted_ids, EXACT)
            yield Comparison(f"weights {label}", weights, wanted, TOLERANCES[torch.float32])
        for block_rows in (16, 128):
            yield from _compare_order(
                f"{name}, blocks of {block_rows}", ids, num_experts, block_rows
            )


def _compare_order(
    label: str, ids: torch.Tensor, num_experts: int, block_rows: int
) -> Iterator[Comparison]:
    """What is used of it."""
    order = sort_by_expert(ids, num_experts, block_rows)
    most = num_blocks_at_most(ids.numel(), num_experts, block_rows)
    sizes = (most * block_rows, most, 1)
    wanted = [torch.empty(size, dtype=torch.int32) for size in sizes]
    sort_by_expert_reference(ids.cpu(), num_experts, block_rows, *wanted)
    used = int(wanted[2])
    for what, got, want, count in zip(
        ("rows", "experts", "blocks"), order[:3], wanted, (used * block_rows, used, 1), strict=True
    ):
        yield Comparison(f"{what} {label}", got[:count].cpu(), want[:count], EXACT)


def _routing_calls(device: torch.device, num_elements: int) -> Iterator[Call]:
    logits = torch.randn(num_elements // 4096, 256, device=device)
    bias = torch.randn(256, device=device)
    ids, _ = moe_routing(logits, V3, bias)
    label = f"{len(logits):,} tokens among 256 experts, as V3"
    yield Call(
        f"choice of {label}", lambda: moe_routing(logits, V3, bias), logits.nbytes, what="choice"
    )
    yield Call(
        f"order of {label}", lambda: sort_by_expert(ids, 256, 128), 3 * ids.nbytes, what="order"
    )


def _experts(
    num_tokens: int, sizes: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """What `moe_experts` takes; ``sizes``: experts, of a token, hidden, width."""
    num_experts, num_chosen, hidden, width = sizes
    x = torch.randn(num_tokens, hidden, device=device).to(dtype)
    gate_up = torch.randn(num_experts, 2 * width, hidden, device=device, dtype=dtype)
    down = torch.randn(num_experts, hidden, width, device=device, dtype=dtype)
    scores = torch.rand(num_tokens, num_experts, device=device)
    weights, ids = scores.topk(num_chosen, dim=1)
    return x, gate_up.mul_(hidden**-0.5), down.mul_(width**-0.5), ids, weights.contiguous()


def _compare_experts(device: torch.device, dtype: torch.dtype) -> Iterator[Comparison]:
    for num_tokens, sizes in (
        (1, (1, 1, 1, 1)),
        (9, (8, 3, 150, 70)),
        (70, (3, 2, 130, 65)),
        (300, (2, 1, 512, 200)),
    ):
        x, gate_up, down, ids, weights = _experts(num_tokens, sizes, device, dtype)
        exact = (tensor.double() for tensor in (x, gate_up, down))
        wanted = moe_experts_reference(*exact, ids, weights.double())
        out = moe_experts(x, gate_up, down, ids, weights)
        label = f"{num_tokens} tokens, {' × '.join(map(str, sizes))}"
        yield Comparison(label, out, wanted, TOLERANCES[dtype])


def _experts_calls(device: torch.device, num_elements: int) -> Iterator[Call]:
    """Experts of DeepSeek-V2-Lite's size, as many as there is room for."""
    hidden, width = (2048, 1408) if num_elements >= 1 << 26 else (32, 20)
    num_experts = min(64, num_elements // (3 * hidden * width))
    for num_tokens in (64, 4096) if num_elements >= 1 << 26 else (4, 16):
        given = _experts(num_tokens, (num_experts, 6, hidden, width), device, torch.bfloat16)
        is_decode = num_tokens < 1024  # bound by the weights
        yield Call(
            f"{num_tokens:,} tokens × 6 of {num_experts} experts, {hidden} × {width}",
            partial(moe_experts, *given),
            given[1].nbytes + given[2].nbytes,
            what=f"{num_tokens:,} tokens",
            num_flops=0 if is_decode else 6 * num_tokens * 6 * hidden * width,
        )


MLA_KERNELS: dict[str, Kernel] = {
    "latent_store": Kernel(_compare_store, _store_calls),
    "mla_attention": Kernel(_compare_attention, _attention_calls),
    "moe_routing": Kernel(_compare_routing, _routing_calls),
    "moe_gemm": Kernel(_compare_experts, _experts_calls),
}
