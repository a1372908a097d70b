"""Measuring attention, and what ``auto`` makes of the times that were kept."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from batchradix.checkpoint.checkpoint import open_checkpoint
from batchradix.config import EngineOptions
from batchradix.engine.attention import measured, registry
from batchradix.engine.attention.base import AttentionShape
from batchradix.engine.attention.bench import (
    measure,
    prefill,
    separate_decode,
    shared_decode,
    typical_steps,
)
from batchradix.engine.attention.cpu_backend import CpuAttention
from batchradix.engine.attention.measured import fastest, read_times, table_key, write_times
from batchradix.engine.attention.mla_base import AnyShape, MlaShape
from batchradix.engine.attention.mla_cpu import CpuMla
from batchradix.engine.attention.mla_torch import TorchMla
from batchradix.engine.attention.registry import (
    make_backend,
    make_mla_backend,
    measurable,
    num_kv_copies,
)
from batchradix.engine.attention.torch_backend import TorchAttention
from batchradix.settings import Machine

TINY_STEPS = (
    shared_decode(num_rows=6, num_prefix=5, num_documents=3, num_document=4, num_tail=2),
    prefill(num_tokens=7, num_prefix=3),
    separate_decode(num_rows=3, num_tokens=4),
)


@pytest.fixture
def shape() -> AttentionShape:
    return AttentionShape(
        num_layers=4,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        scale=0.25,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


@pytest.fixture
def latent() -> MlaShape:
    return MlaShape(
        num_layers=4,
        num_heads=2,
        kv_lora_rank=20,
        rope_dim=6,
        nope_dim=10,
        v_dim=14,
        scale=0.25,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


@pytest.fixture(params=["shape", "latent"])
def any_shape(request) -> AnyShape:
    return request.getfixturevalue(request.param)


def keep(folder, shape, **mean_ms: float):
    """A table in which every step takes a backend the same; returns its file."""
    times = {name: {"prefill": taken_ms, "shared": taken_ms} for name, taken_ms in mean_ms.items()}
    return write_times(folder, table_key(shape, measurable(shape)), times)


@pytest.mark.parametrize("bench", [*typical_steps(), *TINY_STEPS], ids=lambda bench: bench.name)
def test_every_query_of_a_step_sees_its_own_slot_and_no_slot_twice(bench):
    step = bench.step
    assert len(set(step.slots)) == step.num_tokens
    reached = set()
    for query, slot in enumerate(step.slots):
        seen = [
            np.arange(start, start + n) for start, n, a, b in step.context if a <= query < b
        ] + [
            np.arange(start, start + query - a + 1)
            for start, _, a, b in step.causal
            if a <= query < b
        ]
        slots = np.concatenate(seen).tolist()
        assert slot in slots
        assert len(set(slots)) == len(slots)
        reached |= set(slots)
    assert reached == set(range(bench.num_slots))


def test_the_steps_have_the_sizes_they_tell(shape):
    decode, chunk, apart = typical_steps()
    assert (decode.step.num_tokens, decode.num_slots) == (64, 300 + 8 * 400 + 64 * 50)
    assert (chunk.step.num_tokens, chunk.num_slots) == (512, 1212)
    assert (apart.step.num_tokens, apart.num_slots) == (64, 64 * 500)


def test_every_backend_that_serves_is_measured_in_every_step(any_shape):
    times = measure(any_shape, TINY_STEPS, num_rounds=1)
    assert list(times) == measurable(any_shape)
    assert "torch" in times
    for steps in times.values():
        assert list(steps) == ["shared", "prefill", "separate"]
        assert all(taken_ms > 0 for taken_ms in steps.values())


def test_a_time_is_the_median_of_a_layer_and_its_share_of_the_plan(shape, monkeypatch):
    now_s = 0.0
    turns = []

    class Slow(TorchAttention):
        def plan(self, step):
            nonlocal now_s
            now_s += 8.0
            turns.append("slow")
            return super().plan(step)

        def run(self, *given):
            nonlocal now_s
            now_s += [100.0, 100.0, 5.0, 1.0, 2.0][len(turns) - 1]  # two rounds warm up
            return super().run(*given)

    monkeypatch.setitem(registry.BACKENDS, "slow", Slow)
    times = measure(shape, TINY_STEPS[:1], num_rounds=3, clock=lambda: now_s)
    assert len(turns) == 5
    assert times["slow"]["shared"] == pytest.approx(1e3 * (8.0 / shape.num_layers + 2.0))
    assert times["torch"]["shared"] == 0


@pytest.mark.parametrize("name", ["torch", "cpu"])
def test_latents_are_measured_in_a_filled_pool_with_an_up_projection_a_layer(
    latent, name, native, monkeypatch
):
    native()
    kind = registry.MLA_BACKENDS[name]
    seen = []

    class Watched(kind):
        def allocate(self, num_slots):
            pool = super().allocate(num_slots)
            self.poison(pool, 0, num_slots)
            return pool

        def run(self, layer, *given):
            out = super().run(layer, *given)
            seen.append((layer, given[4].w_uk_HPC.data_ptr(), bool(out.isfinite().all())))
            assert out.shape == (given[0].shape[0], 2 * 14)
            return out

    monkeypatch.setattr(registry, "MLA_BACKENDS", {name: Watched, "triton": None})
    measure(latent, TINY_STEPS[:1], num_rounds=1)
    assert len(seen) == 3 * 4  # two rounds warm up
    assert {layer for layer, _, _ in seen} == set(range(4))
    assert len({place for _, place, _ in seen}) == 4
    assert all(finite for _, _, finite in seen)


@pytest.mark.parametrize(
    ("torch_ms", "cpu_ms", "winner"),
    [
        ((1.0, 1.0), (2.0, 2.0), "torch"),
        ((2.0, 2.0), (1.0, 1.0), "cpu"),
        ((0.95, 0.95), (1.0, 1.0), "cpu"),  # too close to leave what is usual
        ((30.0, 1.0), (10.0, 9.0), "torch"),  # 3 times as long and 9 times as fast
    ],
)
def test_a_backend_wins_by_a_tenth_with_all_steps_counting_the_same(torch_ms, cpu_ms, winner):
    times = {
        name: dict(zip(("prefill", "shared"), each, strict=True))
        for name, each in (("torch", torch_ms), ("cpu", cpu_ms))
    }
    assert fastest(times, "cpu") == winner


@pytest.fixture
def folder(native, tmp_path):
    """A cache folder, for tests of two backends: by the rule auto is the C kernels."""
    native()
    return tmp_path


def test_auto_takes_what_was_measured_fastest(shape, folder):
    assert isinstance(make_backend("auto", shape, folder), CpuAttention)
    keep(folder, shape, torch=1.0, cpu=2.0)
    assert isinstance(make_backend("auto", shape, folder), TorchAttention)
    keep(folder, shape, torch=2.0, cpu=1.0)
    assert isinstance(make_backend("auto", shape, folder), CpuAttention)


def test_auto_takes_what_was_measured_fastest_over_latents(latent, folder):
    assert isinstance(make_mla_backend("auto", latent, folder), CpuMla)
    keep(folder, latent, torch=1.0, cpu=2.0)
    assert isinstance(make_mla_backend("auto", latent, folder), TorchMla)
    assert isinstance(make_mla_backend("cpu", latent, folder), CpuMla)
    keep(folder, latent, torch=2.0, cpu=1.0)
    assert isinstance(make_mla_backend("auto", latent, folder), CpuMla)


@pytest.mark.parametrize("size", ["num_layers", "num_heads", "kv_lora_rank", "rope_dim", "nope_dim",
                                  "v_dim"])  # fmt: skip
def test_other_latents_have_another_table(latent, folder, size):
    keep(folder, latent, torch=1.0, cpu=2.0)
    other = replace(latent, **{size: 2 * getattr(latent, size)})
    assert isinstance(make_mla_backend("auto", other, folder), CpuMla)


def test_the_pool_of_latents_is_sized_for_the_backend_that_a_table_names(
    lab, saved, folder, monkeypatch
):
    """The table is that of the threads the run will have, whatever the process has now."""
    monkeypatch.setenv("BATCHRADIX_CACHE", str(folder))
    torch.set_num_threads(2)
    model = saved("deepseek-v3")[0]
    config = open_checkpoint(str(model)).config
    machine = Machine(num_threads=1, free_memory_bytes=1 << 30, has_bf16=False)

    def copies(**options) -> int:
        return num_kv_copies(config, EngineOptions(dtype="float32", **options), machine)

    assert copies() == CpuMla.num_copies == 2
    of = MlaShape.of(config, dtype="float32", device=torch.device("cpu"))
    times = {"torch": {"prefill": 1.0}, "cpu": {"prefill": 2.0}}
    write_times(folder, table_key(of, measurable(of), num_threads=1), times)
    assert copies() == 1
    assert copies(num_threads=2) == 2
    assert copies(attention="cpu") == 2
    assert copies(attention="torch") == 1
    runner = lab.open_runner(model)
    assert isinstance(runner._attention, TorchMla)
    runner.close()


def test_a_named_backend_and_deterministic_runs_ask_no_table(shape, folder):
    keep(folder, shape, torch=1.0, cpu=2.0)
    assert isinstance(make_backend("cpu", shape, folder), CpuAttention)
    invariant = replace(shape, batch_invariant=True)
    assert isinstance(make_backend("auto", invariant, folder), CpuAttention)


@pytest.mark.parametrize(
    "change",
    [{"dtype": torch.bfloat16}, {"num_heads": 4}, {"num_layers": 5}, {"head_dim": 32}],
    ids=lambda change: next(iter(change)),
)
def test_another_model_or_dtype_has_another_table(shape, folder, change):
    keep(folder, shape, torch=1.0, cpu=2.0)
    assert isinstance(make_backend("auto", replace(shape, **change), folder), CpuAttention)


def test_another_machine_or_version_measures_anew(shape, folder, monkeypatch):
    keep(folder, shape, torch=1.0, cpu=2.0)
    for name, other in (
        ("VERSION", "0"),
        ("processor_name", lambda device: "another"),
        ("torch.__version__", "0"),
        ("torch.get_num_threads", lambda: 99),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"{measured.__name__}.{name}", other)
            assert isinstance(make_backend("auto", shape, folder), CpuAttention), name
    assert isinstance(make_backend("auto", shape, folder), TorchAttention)


@pytest.mark.parametrize(
    "damage",
    [
        lambda table: "",
        lambda table: json.dumps(table)[:-1],
        lambda table: "[" * 10_000,
        lambda table: json.dumps([table]),
        lambda table: json.dumps(table | {"key": table["key"] | {"processor": "another"}}),
        lambda table: json.dumps(table | {"milliseconds": {}}),
        lambda table: json.dumps(table | {"milliseconds": {"torch": {"prefill": 1.0}}}),
        lambda table: json.dumps(table | {"milliseconds": {"torch": {}, "cpu": {}}}),
        lambda table: json.dumps(
            table | {"milliseconds": {"torch": {"prefill": 1.0}, "cpu": {"shared": 2.0}}}
        ),
        *(
            lambda table, taken_ms=taken_ms: json.dumps(
                table | {"milliseconds": {"torch": {"prefill": taken_ms}, "cpu": {"prefill": 2.0}}}
            )
            for taken_ms in (0, -1, float("nan"), float("inf"), "fast", None, [])
        ),
    ],
)
def test_a_damaged_or_foreign_table_is_as_good_as_none(shape, folder, damage):
    path = keep(folder, shape, torch=1.0, cpu=2.0)
    path.write_text(damage(json.loads(path.read_text())))
    assert isinstance(make_backend("auto", shape, folder), CpuAttention)


def test_a_table_that_others_may_write_is_not_trusted(shape, folder):
    path = keep(folder, shape, torch=1.0, cpu=2.0)
    os.chmod(path, 0o666)
    assert isinstance(make_backend("auto", shape, folder), CpuAttention)


def test_a_runner_looks_into_the_cache_folder(lab, saved, folder, monkeypatch):
    monkeypatch.setenv("BATCHRADIX_CACHE", str(folder))
    model = saved("llama")[0]
    config = open_checkpoint(str(model)).config
    shape = AttentionShape.of(config, dtype="float32", device=torch.device("cpu"))
    keep(folder, shape, torch=1.0, cpu=2.0)
    runner = lab.open_runner(model)
    assert isinstance(runner._attention, TorchAttention)
    runner.close()


def test_a_table_is_read_as_it_was_written(any_shape, tmp_path):
    key = table_key(any_shape, measurable(any_shape))
    times = measure(any_shape, TINY_STEPS, num_rounds=1)
    assert read_times(tmp_path, key) is None
    write_times(tmp_path, key, times)
    assert read_times(tmp_path, key) == times


def test_kernels_that_are_only_interpreted_are_not_measured(any_shape, monkeypatch):
    monkeypatch.setattr(registry.TritonAttention, "missing", lambda shape: None)
    monkeypatch.setattr(registry, "without_triton", lambda device: None)
    assert "triton" in measurable(any_shape)
    monkeypatch.setattr(registry, "interprets", lambda: True)
    assert "triton" not in measurable(any_shape)
    assert "unset TRITON_INTERPRET" in registry.unmeasured(any_shape)["triton"]
