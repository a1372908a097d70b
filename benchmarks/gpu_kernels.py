"""The row-wise kernels: what each is compared with, and what it is timed on.

A part calls the functions that the engine calls, on a device: on CUDA they take Triton, on a CPU
C or torch, so the parts themselves are tested without a GPU. A new kernel is a `Kernel` in
`KERNELS`, and a name in `gpu_parts.PARTS`.
"""

from __future__ import annotations

from collections.abc import Iterator

import gpu_measure
import torch
from gpu_kv import KV_KERNELS
from gpu_measure import (
    EXACT,
    Call,
    Comparison,
    Found,
    Kernel,
    Setting,
    Timed,
    raised,
    seconds_of,
)
from gpu_mla import MLA_KERNELS

from batchradix_kernels.masked_sampling import (
    masked_argmax,
    masked_argmax_reference,
    masked_sample,
    masked_sample_reference,
)
from batchradix_kernels.masked_sampling.reference import expand_bitmask
from batchradix_kernels.rms_norm import rms_norm, rms_norm_reference
from batchradix_kernels.rope import rope, rope_reference
from batchradix_kernels.rope_delta import rope_delta, rope_delta_reference
from batchradix_kernels.swiglu import swiglu, swiglu_reference
from batchradix_kernels.testing import TOLERANCES

DRAW_MARGIN = 1e-4  # of the probability


def ceilings(setting: Setting) -> Iterator[Timed]:
    """A copy's GB/s (read and written) and the TFLOP/s of a large product in bfloat16."""
    device, is_small = setting.device, setting.is_small
    source = torch.zeros((1 << 22) if is_small else (1 << 30), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = seconds_of(lambda: target.copy_(source), device)
    yield Timed.of("copy", seconds, 2 * source.numel(), "GB/s")
    size = 128 if is_small else 8192
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    seconds = seconds_of(lambda: a @ b, device)
    yield Timed.of("product", seconds, 2 * size**3, "TFLOP/s")


def compare(setting: Setting, name: str) -> Iterator[Found]:
    """Each comparison of a kernel, in each dtype."""
    return gpu_measure.compare_all(KERNELS[name].compare, setting.device)


def speed(setting: Setting) -> Iterator[Timed | Found]:
    """All kernels in turn, with cold caches."""
    num_elements = 1 << (16 if setting.is_small else 28)
    for name, kernel in KERNELS.items():
        try:
            for call in kernel.calls(setting.device, num_elements):
                seconds = seconds_of(call.run, setting.device)
                label = f"{name}{call.what and ' '}{call.what}"
                amount, unit = call.num_bytes, "GB/s"
                if call.num_flops:
                    amount, unit = call.num_flops, "TFLOP/s"
                yield Timed.of(label, seconds, amount, unit, call.label)
        except Exception as error:
            yield raised(name, error)


def _angles(num: int, half: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    angle = 100 * torch.randn(num, half, device=device)
    return angle.cos(), angle.sin()


def _compare_norm(device: torch.device, dtype: torch.dtype) -> Iterator[Comparison]:
    for rows, width in ((1, 1), (3, 577), (130, 576), (70, 4096), (2, 8192)):
        x, residual = (torch.randn(rows, width, device=device).to(dtype) for _ in range(2))
        weight = torch.randn(width, device=device).to(dtype)
        summed = x + residual
        wanted = rms_norm_reference(summed.double(), weight.double(), 1e-5)
        out = rms_norm(x, weight, 1e-5, residual)
        yield Comparison(f"norm {rows} × {width}", out, wanted, TOLERANCES[dtype])
        yield Comparison(f"sum {rows} × {width}", x, summed, EXACT)


def _norm_calls(device: torch.device, num_elements: int) -> Iterator[Call]:
    width = 4096
    x = torch.randn(num_elements // width, width, device=device).bfloat16()
    residual, weight = torch.zeros_like(x), torch.ones(width, device=device).bfloat16()
    yield Call(
        f"{len(x):,} rows of {width}, with residual, bfloat16",
        lambda: rms_norm(x, weight, 1e-5, residual),
        4 * x.nbytes,
    )


def _compare_gate(device: torch.device, dtype: torch.dtype) -> Iterator[Comparison]:
    for rows, width in ((1, 1), (3, 577), (130, 1536), (9, 14336)):
        gate_up = (5 * torch.randn(rows, 2 * width, device=device)).to(dtype)
        wanted = swiglu_reference(gate_up.double())
        yield Comparison(f"{rows} × {width}", swiglu(gate_up), wanted, TOLERANCES[dtype])


def _gate_calls(device: torch.device, num_elements: int) -> Iterator[Call]:
    width = 2048
    gate_up = torch.randn(num_elements // width // 2, 2 * width, device=device).bfloat16()
    yield Call(
        f"{len(gate_up):,} rows of 2 × {width}, bfloat16",
        lambda: swiglu(gate_up),
        3 * gate_up.nbytes // 2,
    )


def _compare_rope(device: torch.device, dtype: torch.dtype) -> Iterator[Comparison]:
    shapes = ((1, 1, 1, 2), (131, 9, 3, 64), (70, 32, 8, 128), (5, 4, 1, 96))
    for tokens, num_q, num_k, head_dim in shapes:
        heads = torch.randn(tokens, num_q + 2 * num_k, head_dim, device=device).to(dtype)
        angles = _angles(tokens, head_dim // 2, device)
        weights = [torch.randn(head_dim, device=device).to(dtype) for _ in range(2)]
        for norms in (None, (weights[0], weights[1], 1e-5)):
            wanted, rotated = heads.double(), heads.clone()
            rope_reference(wanted, *angles, num_q, num_k, norms)
            rope(rotated, *angles, num_q, num_k, norms)
            label = f"{tokens} × {num_q}+{num_k} × {head_dim}{', norms' if norms else ''}"
            yield Comparison(label, rotated, wanted, TOLERANCES[dtype])


def _rope_calls(device: torch.device, num_elements: int) -> Iterator[Call]:
    num_tokens = num_elements // (40 * 128)
    heads = torch.randn(num_tokens, 40, 128, device=device).bfloat16()
    cosines, sines = _angles(num_tokens, 64, device)
    yield Call(
        f"{num_tokens:,} tokens, 32 + 8 heads of 128, bfloat16",
        lambda: rope(heads, cosines, sines, 32, 8),
        2 * heads.nbytes + 2 * cosines.nbytes,
    )


def _compare_move(device: torch.device, dtype: torch.dtype) -> Iterator[Comparison]:
    for layers, num_heads, num_slots, head_dim in ((2, 3, 70, 64), (1, 8, 300, 128), (3, 1, 5, 20)):
        pool = torch.randn(layers, 2, num_heads, num_slots, head_dim, device=device).to(dtype)
        slots = torch.randperm(num_slots, device=device)[: num_slots // 2].int()
        angles = _angles(len(slots), head_dim // 2, device)
        wanted = pool.double()
        rope_delta_reference(wanted[:, 0], slots, *angles)
        rope_delta(pool[:, 0], slots, *angles)
        label = f"{layers} layers, {len(slots)} of {num_slots} slots, {num_heads} × {head_dim}"
        yield Comparison(label, pool, wanted, TOLERANCES[dtype])


def _move_calls(device: torch.device, num_elements: int) -> Iterator[Call]:
    num_slots = num_elements // (32 * 8 * 128)
    keys = torch.randn(32, 8, num_slots, 128, device=device).bfloat16()
    slots = torch.arange(num_slots, device=device, dtype=torch.int32)
    cosines, sines = (a.expand(num_slots, -1) for a in _angles(1, 64, device))
    yield Call(
        f"{num_slots:,} slots of 32 layers, 8 heads of 128, bfloat16",
        lambda: rope_delta(keys, slots, cosines, sines),
        2 * keys.nbytes,
    )


Inputs = tuple[torch.Tensor, list[torch.Tensor], torch.Tensor, torch.Tensor]


def _choices(num_rows: int, width: int, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Logits, settings of every kind, a bitmask, and the rows where it holds."""
    logits = (3 * torch.randn(num_rows, width, device=device)).to(dtype)
    kind = torch.arange(num_rows, device=device) % 6
    settings = [
        torch.where(kind == 0, 0.0, 0.5 + 0.2 * kind).float(),
        torch.where(kind % 3 == 2, 40, 0).int(),
        torch.where(kind >= 3, 0.9, 1.0).double(),
        torch.where(kind == 5, 0.02, 0.0).double(),
        torch.rand(num_rows, device=device, dtype=torch.float64),
    ]
    words = torch.randint(-(2**31), 2**31, (num_rows, -(-width // 32)), device=device)
    return logits, settings, (words | 1).int(), kind % 2 == 0


def _compare_choice(device: torch.device, dtype: torch.dtype) -> Iterator[Comparison]:
    for num_rows, width in ((5, 33), (37, 1000), (64, 49_152), (12, 128_256)):
        logits, settings, bitmask, masked = _choices(num_rows, width, device, dtype)
        label = f"{num_rows} × {width}"
        for mask, rows in ((None, None), (bitmask, masked)):
            name = f"{label}{'' if mask is None else ', masked'}"
            tokens, peaks = masked_argmax(logits, mask, rows)
            wanted, highest = masked_argmax_reference(logits, mask, rows)
            yield Comparison(f"largest {name}", tokens, wanted, EXACT)
            yield Comparison(f"its logit {name}", peaks, highest, EXACT)
            yield from _compare_draw(name, logits, settings, mask, rows)


def _compare_draw(
    name: str,
    logits: torch.Tensor,
    settings: list[torch.Tensor],
    mask: torch.Tensor | None,
    rows: torch.Tensor | None,
) -> Iterator[Comparison]:
    """Draws may differ where rounding moves the border between two tokens past the random number:
    they must lie between what the reference draws with slightly smaller and larger ones."""
    drawn, _ = masked_sample(logits, *settings, mask, rows)
    *cuts, uniform = settings
    low, high = (
        masked_sample_reference(logits, *cuts, (uniform + by).clamp(0.0, 1 - 1e-9), mask, rows)[0]
        for by in (-DRAW_MARGIN, DRAW_MARGIN)
    )
    yield Comparison(f"drawn {name}", drawn, drawn.clamp(low, high), EXACT)
    if mask is not None and rows is not None:
        allowed = expand_bitmask(mask, logits.shape[1]) | ~rows[:, None]
        held = allowed.gather(1, drawn[:, None])
        yield Comparison(f"allowed {name}", held, torch.ones_like(held), EXACT)


def _choice_calls(device: torch.device, num_elements: int) -> Iterator[Call]:
    width = min(128_256, num_elements // 64)
    logits, settings, bitmask, _ = _choices(64, width, device, torch.bfloat16)
    num_bytes = logits.nbytes + bitmask.nbytes
    masked = torch.ones(64, dtype=torch.bool, device=device)
    label = f"of 64 × {width:,}, masked, bfloat16"
    yield Call(
        f"largest {label}",
        lambda: masked_argmax(logits, bitmask, masked),
        num_bytes,
        what="largest",
    )
    yield Call(
        f"drawn with cuts {label}",
        lambda: masked_sample(logits, *settings, bitmask, masked),
        num_bytes,
        what="drawn",
    )


KERNELS: dict[str, Kernel] = {
    "rms_norm": Kernel(_compare_norm, _norm_calls),
    "swiglu": Kernel(_compare_gate, _gate_calls),
    "rope": Kernel(_compare_rope, _rope_calls),
    "rope_delta": Kernel(_compare_move, _move_calls),
    "masked_sampling": Kernel(_compare_choice, _choice_calls),
    **KV_KERNELS,
    **MLA_KERNELS,
}
