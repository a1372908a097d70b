"""Attention over tree pieces: every backend against a dense reference, then their speed.

Backends are made as the engine makes them. The paged form and the log-sum-exps, which the
engine does not ask for, are compared on the Triton kernel itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from gpu_measure import (
    EXACT,
    Comparison,
    Found,
    Record,
    Setting,
    Skipped,
    Timed,
    compare_all,
    dtype_name,
    host_seconds_of,
    raised,
    seconds_of,
)

from batchradix.engine.attention.base import AttentionBackend, AttentionShape
from batchradix.engine.attention.bench import (
    BenchStep,
    prefill,
    separate_decode,
    shared_decode,
)
from batchradix.engine.attention.registry import BACKENDS, make_backend, refusal, unmeasured
from batchradix.engine.step import Step, i64_table
from batchradix_kernels.testing import TOLERANCES
from batchradix_kernels.triton_runtime import serves

HEADS = ((32, 8, 128), (9, 3, 64), (6, 2, 80), (8, 1, 96))  # query heads, key heads, dimension
LLAMA_8B, SMOLLM2 = HEADS[:2]
GAP = 3  # slots that nobody may read, behind each piece
PAGE_SIZES = (1, 4, 16)
PAGED_HEADS = HEADS[:3]
Pieces = list[tuple[int, int, int, int]]


@dataclass
class Case:
    """Queries and the pieces they see, in slots with gaps between them."""

    label: str
    slots: list[int] = field(default_factory=list)  # of the queries
    context: Pieces = field(default_factory=list)
    causal: Pieces = field(default_factory=list)
    end: int = GAP

    def place(self, num_slots: int) -> int:
        """Where the next piece begins."""
        start = self.end
        self.end += num_slots + GAP
        return start

    def shared(self, num_slots: int, first: int, last: int) -> None:
        """A node that was computed before, above the queries ``[first, last)``."""
        self.context.append((self.place(num_slots), num_slots, first, last))

    def tail(self, num_slots: int) -> None:
        """A row that decodes: its own slots, the last of which is new."""
        start, query = self.place(num_slots), len(self.slots)
        self.context.append((start, num_slots, query, query + 1))
        self.slots.append(start + num_slots - 1)

    def new(self, num_slots: int) -> tuple[int, int, int]:
        """A node that is prefilled; its start and its queries."""
        start, first = self.place(num_slots), len(self.slots)
        self.slots += range(start, start + num_slots)
        self.causal.append((start, num_slots, first, len(self.slots)))
        return start, first, len(self.slots)

    @property
    def used(self) -> list[int]:
        pieces = self.context + self.causal
        return sorted({s for start, n, *_ in pieces for s in range(start, start + n)})

    def step(self) -> Step:
        slots = np.array(self.slots, dtype=np.int64)
        return Step(
            token_ids=np.zeros_like(slots),
            positions=np.zeros_like(slots),
            slots=slots,
            context=i64_table(self.context, 4),
            causal=i64_table(self.causal, 4),
        )


def decoding(label: str, num_rows: int, root: int, document: int) -> Case:
    """Rows below a root and a document for every four, behind tails of many lengths."""
    case = Case(label)
    case.shared(root, 0, num_rows)
    for first in range(0, num_rows, 4):
        case.shared(document + first, first, min(first + 4, num_rows))
    for row in range(num_rows):
        case.tail(1 + 7 * row % 50)
    return case


def prefilling(label: str, prefix: int, num_tokens: int) -> Case:
    """New tokens behind a cached prefix."""
    case = Case(label)
    case.shared(prefix, 0, num_tokens)
    case.new(num_tokens)
    return case


def cascade(label: str, length: int) -> Case:
    """A new node with new nodes below it, and rows that decode below an old one beside them."""
    case = Case(label)
    start, _, above = case.new(length)
    children = 0
    for part in (length // 2, 1):
        case.new(part)
        children += part
    case.context.append((start, length, above, above + children))
    first = len(case.slots)
    case.shared(length, first, first + 3)
    for _ in range(3):
        case.tail(length // 3 + 1)
    return case


def cases(is_small: bool) -> list[Case]:
    """Small odd shapes; where it is a GPU also ones that fill it and whose nodes are split."""
    some = [
        decoding("decode", 7, 70, 33),
        decoding("one row", 1, 1, 1),
        prefilling("prefill behind a prefix", 70, 33),
        prefilling("one new token", 1, 1),
        cascade("cascade", 41),
    ]
    if not is_small:
        some += [
            decoding("decode of 256 rows", 256, 3000, 400),
            decoding("decode below a long node", 5, 40_000, 33),
            prefilling("prefill behind a long prefix", 5000, 513),
            cascade("cascade of long nodes", 700),
        ]
    return some


def dense_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, H, E] and log-sum-exps [T, H] in float64, by masks of all slots at once.

    ``q``: [T, H, E]; ``k``, ``v``: [K, S, E], finite.
    """
    (num_tokens, num_heads, _), num_slots = q.shape, k.shape[1]
    place, token = torch.arange(num_slots, device=q.device), torch.arange(num_tokens)[:, None]
    token = token.to(q.device)
    seen = torch.zeros(num_tokens, num_slots, dtype=torch.bool, device=q.device)
    for start, length, first, last in case.context:
        seen[first:last, start : start + length] = True
    for start, length, first, last in case.causal:
        behind = place - start <= token - first
        seen |= (
            behind & (place >= start) & (place < start + length) & (token >= first) & (token < last)
        )
    group = num_heads // k.shape[0]
    outputs, lses = [], []
    for head in range(num_heads):
        scores = q[:, head].double() @ k[head // group].double().T * scale
        scores = scores.masked_fill(~seen, -math.inf)
        outputs.append(scores.softmax(1) @ v[head // group].double())
        lses.append(scores.logsumexp(1))
    return torch.stack(outputs, 1), torch.stack(lses, 1)


def backends_here(device: torch.device) -> list[str]:
    """Those that a device may have; a GPU never has the kernels in C."""
    return [name for name in BACKENDS if device.type == "cpu" or name != "cpu"]


def shape_of(heads: Sequence[int], dtype: torch.dtype, device: torch.device) -> AttentionShape:
    """Of one layer."""
    num_heads, num_kv_heads, head_dim = heads
    return AttentionShape(
        num_layers=1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        dtype=dtype,
        device=device,
    )


def compare(setting: Setting, dtype: str) -> Iterator[Found | Skipped]:
    """Every backend and the paged kernel in a dtype; a reason to skip is said once."""
    said: set[str] = set()

    def both(device: torch.device, dtype: torch.dtype) -> Iterator[Comparison | Skipped]:
        for heads in HEADS:
            for case in cases(setting.is_small):
                yield from _compare_backends(case, shape_of(heads, dtype, device))
        yield from _compare_paged(device, dtype)

    for record in compare_all(both, setting.device, [getattr(torch, dtype)]):
        if isinstance(record, Skipped):
            if record.why in said:
                continue
            said.add(record.why)
        yield record


@dataclass(frozen=True)
class _Inputs:
    q: torch.Tensor  # [T, H, E]
    kv: torch.Tensor  # [2, K, S, E], finite everywhere

    @classmethod
    def of(cls, case: Case, shape: AttentionShape) -> _Inputs:
        size = (2, shape.num_kv_heads, case.end, shape.head_dim)
        q_size = (len(case.slots), shape.num_heads, shape.head_dim)
        return cls(
            torch.randn(q_size, device=shape.device).to(shape.dtype),
            torch.randn(size, device=shape.device).to(shape.dtype),
        )

    def new(self, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the queries, [T, K, E]."""
        k, v = self.kv[:, :, case.slots].transpose(1, 2)
        return k, v


def _compare_backends(case: Case, shape: AttentionShape) -> Iterator[Comparison | Found | Skipped]:
    """One that raises does not end the others."""
    given = _Inputs.of(case, shape)
    wanted, _ = dense_reference(given.q, *given.kv, case, shape.scale)
    for name in backends_here(shape.device):
        reason = refusal(name, shape)
        if reason is not None:
            yield Skipped(f"{name} in {dtype_name(shape.dtype)}", reason)
            continue
        heads = f"{shape.num_heads}/{shape.num_kv_heads} × {shape.head_dim}"
        label = f"{name}, {case.label}, {heads}"
        try:
            out, kept = _attend(make_backend(name, shape), case, given)
        except Exception as error:
            yield raised(f"{label} {dtype_name(shape.dtype)}", error)
            continue
        yield Comparison(label, out, wanted, TOLERANCES[shape.dtype])
        yield Comparison(f"pool after {label}", kept, given.kv[:, :, case.used], EXACT)


def _attend(
    backend: AttentionBackend, case: Case, given: _Inputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """What queries get, [T, H, E], and what the used slots hold then, [2, K, n, E]."""
    pool = backend.allocate(case.end)
    backend.poison(pool, 0, case.end)
    for start, end in runs_of(sorted(set(case.used) - set(case.slots))):
        k, v = given.kv[:, None, :, start:end]
        backend.load(pool, start, k, v)
    out = backend.run(0, given.q, *given.new(case), pool, backend.plan(case.step()))
    kept = torch.stack(backend.export(pool, np.array(case.used)))[:, 0]
    return out.view(given.q.shape), kept


def runs_of(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending slots as half-open runs."""
    cuts = [0, *(i for i in range(1, len(slots)) if slots[i] != slots[i - 1] + 1), len(slots)]
    return [(slots[a], slots[b - 1] + 1) for a, b in pairwise(cuts) if a < b]


def _compare_paged(device: torch.device, dtype: torch.dtype) -> Iterator[Comparison | Skipped]:
    if not serves(device):
        yield Skipped("pages and log-sum-exps", f"Triton runs no kernels on this {device.type}")
        return
    for heads, page_size in zip(PAGED_HEADS, PAGE_SIZES, strict=True):
        for case in cases(is_small=True):
            yield from _compare_pages(case, shape_of(heads, dtype, device), page_size)


def _compare_pages(case: Case, shape: AttentionShape, page_size: int) -> Iterator[Comparison]:
    """Pages in any order, behind tables whose unused ends name pages that do not exist; what the
    plan has room for is NaN before."""
    from batchradix_kernels.tree_attention.triton import TritonTreeAttention

    given = _Inputs.of(case, shape)
    where, context, causal, table = _paged(case, page_size)
    size = (2, shape.num_kv_heads, int(where.max()) + 1 + page_size, shape.head_dim)
    pool = torch.full(size, math.nan, device=shape.device, dtype=shape.dtype)
    old = sorted(set(case.used) - set(case.slots))
    pool[:, :, where[old]] = given.kv[:, :, old]
    kernel = TritonTreeAttention(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        scale=shape.scale,
        dtype=shape.dtype,
        device=shape.device,
    )
    plan = kernel.plan(where[case.slots], context, causal, pages=table, page_size=page_size)
    plan.partial.fill_(math.nan)
    plan.partial_lse.fill_(math.nan)
    lse = torch.full(given.q.shape[:2], math.nan, device=shape.device)
    out = kernel.run(plan, pool, given.q, *given.new(case), lse=lse)
    wanted, wanted_lse = dense_reference(given.q, *given.kv, case, shape.scale)
    label = f"triton, {case.label}, pages of {page_size}"
    yield Comparison(label, out.view(given.q.shape), wanted, TOLERANCES[shape.dtype])
    yield Comparison(f"log-sum-exps of {label}", lse, wanted_lse, TOLERANCES[torch.float32])


def _paged(case: Case, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Where each slot goes, the pieces by places in the table, and the table."""
    starts = sorted({(start, n) for start, n, *_ in case.context + case.causal})
    counts = [-(-n // size) for _, n in starts]
    free = np.random.default_rng(3).permutation(sum(counts) + 5).tolist()
    where, table, first = np.zeros(case.end, dtype=np.int64), [], {}
    for (start, n), count in zip(starts, counts, strict=True):
        first[start] = len(table)
        taken = np.array([free.pop() for _ in range(count)])
        at = np.arange(n)
        where[start : start + n] = taken[at // size] * size + at % size
        table += [*taken.tolist(), -7, 1 << 30]
    context, causal = (
        i64_table([(first[start], n, *queries) for start, n, *queries in pieces], 4)
        for pieces in (case.context, case.causal)
    )
    return where, context, causal, np.array(table, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Work:
    """A step to time, and whether it is bound by memory (else by products)."""

    name: str
    bench: BenchStep
    by_bytes: bool


def works(is_small: bool) -> list[Work]:
    if is_small:
        return [
            Work("decode", separate_decode(num_rows=4, num_tokens=40), True),
            Work("cascade", _cascade_step(8, 64, 2, 32, 4), False),
            Work("prefill", prefill(num_tokens=16, num_prefix=32), False),
        ]
    return [
        Work("decode", separate_decode(num_rows=64, num_tokens=4096), True),
        Work("cascade", _cascade_step(256, 16_384, 8, 2048, 32), False),
        Work("prefill", prefill(num_tokens=2048, num_prefix=4096), False),
    ]


def _cascade_step(rows: int, prefix: int, documents: int, document: int, tail: int) -> BenchStep:
    return shared_decode(
        num_rows=rows,
        num_prefix=prefix,
        num_documents=documents,
        num_document=document,
        num_tail=tail,
    )


def kv_bytes(step: Step, shape: AttentionShape) -> int:
    """Of keys and values that a layer must read, each slot of each piece once."""
    slots = int(step.context[:, 1].sum() + step.causal[:, 1].sum())
    return 2 * slots * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize


def num_flops(step: Step, shape: AttentionShape) -> float:
    """Of the two products of a layer."""
    pairs = sum(n * (end - start) for _, n, start, end in step.context.tolist())
    pairs += sum(n * (n + 1) / 2 for _, n, _, _ in step.causal.tolist())
    return 4.0 * pairs * shape.num_heads * shape.head_dim


def speed(setting: Setting) -> Iterator[Record]:
    """Decode in GB/s of keys and values read, the others in TFLOP/s; backends that compile when
    they are first used come last."""
    names = sorted(backends_here(setting.device), key=lambda name: name == "flashinfer")
    shapes = {
        model: shape_of(heads, torch.bfloat16, setting.device)
        for model, heads in (("llama-8b", LLAMA_8B), ("smollm2", SMOLLM2))
    }
    yield from time_each(names, shapes, works(setting.is_small), "attention", _time)


def time_each(
    names: Sequence[str],
    shapes: Mapping[str, Any],
    some: Sequence[Work],
    kind: str,
    time: Callable[[str, str, Work, Any], Timed],
) -> Iterator[Record]:
    """What ``time`` says of each backend, model and work; why a backend is not timed, once."""
    said: set[str] = set()
    for name in names:
        for model, shape in shapes.items():
            reason = unmeasured(shape).get(name)
            if reason is not None:
                if name not in said:
                    yield Skipped(f"{name} {kind}", reason)
                said.add(name)
                continue
            for work in some:
                try:
                    yield time(name, model, work, shape)
                except Exception as error:  # of any kind: it is what is to be reported
                    yield raised(f"{model} {work.name}: {name}", error)


@torch.inference_mode()
def _time(name: str, model: str, work: Work, shape: AttentionShape) -> Timed:
    backend: AttentionBackend = make_backend(name, shape)
    step, num_slots = work.bench.step, work.bench.num_slots
    pool = backend.allocate(num_slots)
    kv = torch.randn(2, 1, shape.num_kv_heads, num_slots, shape.head_dim, device=shape.device)
    backend.load(pool, 0, *kv.to(shape.dtype))
    del kv
    size = (step.num_tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
    qkv = torch.randn(size, device=shape.device).to(shape.dtype)
    sizes = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    q, k, v = qkv.split(sizes, dim=1)

    plan = backend.plan(step)
    seconds = seconds_of(lambda: backend.run(0, q, k, v, pool, plan), shape.device)
    plan_s = host_seconds_of(lambda: backend.plan(step), shape.device)
    detail = f"{work.bench.what}; the plan of a step takes {plan_s * 1e6:,.0f} µs"
    label = f"{model} {work.name}: {name}"
    if work.by_bytes:
        return Timed.of(label, seconds, kv_bytes(step, shape), "GB/s", detail)
    return Timed.of(label, seconds, num_flops(step, shape), "TFLOP/s", detail)
