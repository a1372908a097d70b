"""Measuring tiles runs every choice of them; the interpreter stands in for the GPU."""

from __future__ import annotations

import torch

from batchradix.engine.attention.base import AttentionShape
from batchradix.engine.attention.bench import compare, prefill, separate_decode, tune
from batchradix_kernels.tree_attention.tiles import tile_choices


def test_what_the_clock_says_is_fastest_is_taken():
    shape = AttentionShape(
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        scale=0.25,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    steps = (prefill(num_tokens=40, num_prefix=3), separate_decode(num_rows=3, num_tokens=4))
    seen: list[set[str]] = []

    def timed(makers):
        seen.append(set(makers))
        times = compare(makers, shape, steps, num_rounds=1)
        assert all(taken_ms > 0 for each in times.values() for taken_ms in each.values())
        last = list(makers)[-1]
        return {
            name: dict.fromkeys(each, 1.0 if name == last else 2.0) for name, each in times.items()
        }

    choices = tile_choices(16, 2, torch.bfloat16)
    assert tune(shape, steps, timed) == tuple(each[-1] for each in choices)
    assert seen == [set(map(str, each)) for each in choices]
