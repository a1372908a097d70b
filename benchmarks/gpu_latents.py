"""Latent attention (MLA) over tree pieces: every backend against a dense reference, then their
speed, as `gpu_attention.py` has it for other attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gpu_attention import Case, Work, cases, dense_reference, runs_of, time_each, works
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

from batchradix.engine.attention.mla_base import MlaShape, UpProjection, pieces_by_form
from batchradix.engine.attention.registry import (
    MLA_BACKENDS,
    make_mla_backend,
    refusal,
)
from batchradix.engine.step import Step
from batchradix_kernels.testing import TOLERANCES

V2_LITE = (16, 512, 64, 128, 128)  # heads, latent, rope key, key without rope, value
V3 = (128, 512, 64, 128, 128)
MODELS = {"v2-lite": V2_LITE, "v3": V3}
COMPARED = ((5, 24, 8, 20, 12), V2_LITE)  # and on a GPU V3
SMALL_MODELS = {"small": (4, 64, 16, 32, 32)}  # on a CPU


def shape_of(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> MlaShape:
    """Of one layer; ``sizes`` as in `V2_LITE`."""
    num_heads, latent, rope, nope, value = sizes
    return MlaShape(
        num_layers=1,
        num_heads=num_heads,
        kv_lora_rank=latent,
        rope_dim=rope,
        nope_dim=nope,
        v_dim=value,
        scale=(nope + rope) ** -0.5,
        dtype=dtype,
        device=device,
    )


def backends_here(device: torch.device) -> list[str]:
    """Those that a device may have, and last the one that compiles when it is first used."""
    names = [name for name in MLA_BACKENDS if device.type == "cpu" or name != "cpu"]
    return sorted(names, key=lambda name: name == "flashinfer")


@dataclass(frozen=True)
class Inputs:
    """Of a layer of a step: queries of T tokens, what the pool holds of S slots, the weights."""

    q_nope: torch.Tensor  # [T, H, P]
    q_rope: torch.Tensor  # [T, H, R]
    rows: torch.Tensor  # [S, C + R], finite everywhere
    up: UpProjection

    @classmethod
    def random(cls, num_tokens: int, num_slots: int, shape: MlaShape) -> Inputs:
        """Values about 1 in size, whatever the shape."""

        def randn(*size: int) -> torch.Tensor:
            return torch.randn(size, device=shape.device)

        heads, rank, of_head = shape.num_heads, shape.kv_lora_rank, shape.nope_dim + shape.v_dim
        kv_b = randn(heads * of_head, rank) * rank**-0.5
        return cls(
            randn(num_tokens, heads, shape.nope_dim).to(shape.dtype),
            randn(num_tokens, heads, shape.rope_dim).to(shape.dtype),
            randn(num_slots, shape.width).to(shape.dtype),
            UpProjection.split(kv_b.to(shape.dtype), (heads, shape.nope_dim, shape.v_dim)),
        )

    def run(self, backend: Any, slots: torch.Tensor, pool: Any, plan: Any) -> torch.Tensor:
        """[T, H · V]; ``slots``: int64[T], those of the queries."""
        rank = self.up.w_uk_HPC.shape[2]
        own = self.rows[slots]
        out: torch.Tensor = backend.run(
            0, self.q_nope, self.q_rope, own[:, :rank], own[:, rank:], self.up, pool, plan
        )
        return out

    def expected(self, case: Case, shape: MlaShape) -> torch.Tensor:
        """[T, H · V] in float64, over keys and values of every head."""
        latents, ropes = self.rows.double().split((shape.kv_lora_rank, shape.rope_dim), dim=1)
        keys = latents @ self.up.w_uk_HPC.double().transpose(1, 2)
        keys = torch.cat((keys, ropes.expand(shape.num_heads, -1, -1)), dim=2)
        values = latents @ self.up.w_uv_HCV.double()
        q = torch.cat((self.q_nope, self.q_rope), dim=2)
        out, _ = dense_reference(q, keys, values, case, shape.scale)
        return out.flatten(1)


def compare(setting: Setting) -> Iterator[Found | Skipped]:
    """Every backend in each dtype; a reason to skip is said once."""
    said: set[str] = set()

    def each(device: torch.device, dtype: torch.dtype) -> Iterator[Comparison | Found | Skipped]:
        for sizes in COMPARED if setting.is_small else (*COMPARED, V3):
            for case in cases(setting.is_small or sizes is V3):
                yield from _compare_backends(case, shape_of(sizes, dtype, device))

    for record in compare_all(each, setting.device):
        if isinstance(record, Skipped):
            if record.why in said:
                continue
            said.add(record.why)
        yield record


def _compare_backends(case: Case, shape: MlaShape) -> Iterator[Comparison | Found | Skipped]:
    """One that raises does not end the others."""
    given = Inputs.random(len(case.slots), case.end, shape)
    wanted = given.expected(case, shape)
    kept = given.rows[case.used]
    for name in backends_here(shape.device):
        reason = refusal(name, shape)
        if reason is not None:
            yield Skipped(f"{name} in {dtype_name(shape.dtype)}", reason)
            continue
        label = f"{name}, {case.label}, {shape.num_heads} × {shape.kv_lora_rank}"
        try:
            backend = make_mla_backend(name, shape)
            pool = backend.allocate(case.end)
            backend.poison(pool, 0, case.end)
            for start, end in runs_of(sorted(set(case.used) - set(case.slots))):
                _load(backend, pool, start, given.rows[start:end], shape)
            slots = torch.tensor(case.slots, device=shape.device)
            out = given.run(backend, slots, pool, backend.plan(case.step()))
            exported = torch.cat(backend.export(pool, np.array(case.used)), dim=3)[0, 0]
        except Exception as error:
            yield raised(f"{label} {dtype_name(shape.dtype)}", error)
            continue
        yield Comparison(label, out, wanted, TOLERANCES[shape.dtype])
        yield Comparison(f"pool after {label}", exported, kept, EXACT)


def _load(backend: Any, pool: Any, slot: int, rows: torch.Tensor, shape: MlaShape) -> None:
    """Rows [n, C + R] into the slots from ``slot`` on."""
    latents, ropes = rows[None, None].split((shape.kv_lora_rank, shape.rope_dim), dim=3)
    backend.load(pool, slot, latents, ropes)


def latent_bytes(step: Step, shape: MlaShape) -> int:
    """Of what a layer must read of the pool, each slot of each piece once."""
    slots = int(step.context[:, 1].sum() + step.causal[:, 1].sum())
    return slots * shape.width * shape.dtype.itemsize


def num_flops(step: Step, shape: MlaShape) -> float:
    """Of a layer's products between pool and output, each piece in the form that takes fewer; the
    same for a backend that has one form only."""
    rank, nope, rope, value = shape.kv_lora_rank, shape.nope_dim, shape.rope_dim, shape.v_dim
    absorbed, expanded = pieces_by_form(step, shape)
    runs = np.concatenate((expanded.context, expanded.causal))[:, :2]
    made = int(np.unique(runs, axis=0)[:, 1].sum())  # slots whose keys and values are made
    pairs = [
        sum(n * (end - start) for _, n, start, end in pieces.context.tolist())
        + sum(n * (n + 1) / 2 for _, n, _, _ in pieces.causal.tolist())
        for pieces in (absorbed, expanded)
    ]
    of_head = pairs[0] * (2 * rank + rope) + pairs[1] * (nope + rope + value)
    of_head += (absorbed.num_tokens + made) * rank * (nope + value)
    return 2.0 * shape.num_heads * of_head


def speed(setting: Setting) -> Iterator[Record]:
    """Decode in GB/s of latents and rope keys read, the others in TFLOP/s."""
    models = SMALL_MODELS if setting.is_small else MODELS
    shapes = {
        model: shape_of(sizes, torch.bfloat16, setting.device) for model, sizes in models.items()
    }
    names = backends_here(setting.device)
    yield from time_each(names, shapes, works(setting.is_small), "latent attention", _time)


@torch.inference_mode()
def _time(name: str, model: str, work: Work, shape: MlaShape) -> Timed:
    backend = make_mla_backend(name, shape)
    step, num_slots = work.bench.step, work.bench.num_slots
    given = Inputs.random(step.num_tokens, num_slots, shape)
    pool = backend.allocate(num_slots)
    _load(backend, pool, 0, given.rows, shape)
    slots = torch.from_numpy(step.slots).to(shape.device)
    plan = backend.plan(step)
    seconds = seconds_of(lambda: given.run(backend, slots, pool, plan), shape.device)
    plan_s = host_seconds_of(lambda: backend.plan(step), shape.device)
    flops = num_flops(step, shape)
    detail = (
        f"{work.bench.what}; {flops / 1e9:,.1f} GFLOP; the plan of a step takes "
        f"{plan_s * 1e6:,.0f} µs"
    )
    label = f"{model} {work.name}: {name}"
    if work.by_bytes:
        return Timed.of(label, seconds, latent_bytes(step, shape), "GB/s", detail)
    return Timed.of(label, seconds, flops, "TFLOP/s", detail)
