"""All layers in one call give, bit for bit, what their operations give one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from batchradix_kernels.bf16_linear import Bf16Weight, bf16_linear, serves
from batchradix_kernels.decoder import CpuDecoder, DecoderLayer
from batchradix_kernels.int8_linear import Int8Weight, int8_linear
from batchradix_kernels.native import library
from batchradix_kernels.quantise_rows import quantise_rows
from batchradix_kernels.rms_norm import rms_norm, rms_norm_int8
from batchradix_kernels.rope import rope
from batchradix_kernels.swiglu import swiglu, swiglu_int8
from batchradix_kernels.tree_attention.cpu import CpuTreeAttention

pytestmark = pytest.mark.skipif(library() is None, reason="the C kernels were not built")

HIDDEN, HEADS, KV_HEADS, DIM, WIDTH, LAYERS, SLOTS = 64, 6, 2, 32, 96, 3, 256
EPSILON = 1e-5


def make_layer(dtype: torch.dtype, quantised: str, *, biased: bool, normed: bool) -> DecoderLayer:
    """``quantised``: which of the four linear layers are int8, by their first letters."""

    def linear(name: str, out_size: int, in_size: int) -> Bf16Weight | Int8Weight:
        weight = torch.randn(out_size, in_size) / in_size**0.5
        if name in quantised:
            return Int8Weight(weight)
        bias = torch.randn(out_size).to(dtype) if biased else None
        return Bf16Weight(weight.to(dtype), bias, gated=name == "g")

    def bias(name: str, size: int) -> torch.Tensor | None:
        return torch.randn(size).to(dtype) if biased and name in quantised else None

    qkv = (HEADS + 2 * KV_HEADS) * DIM
    norms = (1 + torch.rand(DIM).to(dtype), 1 + torch.rand(DIM).to(dtype))
    return DecoderLayer(
        input_norm=torch.rand(HIDDEN).to(dtype),
        mlp_norm=torch.rand(HIDDEN).to(dtype),
        head_norms=norms if normed else None,
        qkv=linear("q", qkv, HIDDEN),
        o=linear("o", HIDDEN, HEADS * DIM),
        gate_up=linear("g", 2 * WIDTH, HIDDEN),
        down=linear("d", HIDDEN, WIDTH),
        biases=(bias("q", qkv), bias("o", HIDDEN), bias("g", 2 * WIDTH), bias("d", HIDDEN)),
    )


class Attention:
    """Two queries under a shared prefix and a chunk of new tokens, in a pool half filled; the
    first layer may have a window."""

    def __init__(self, dtype: torch.dtype, num_tokens: int, window: int | None = None) -> None:
        self.kernel = CpuTreeAttention(
            num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, scale=0.2, dtype=dtype
        )
        self.pool = self.kernel.allocate(LAYERS, SLOTS)
        self.pool.storage.fill_(torch.nan)
        for layer in range(LAYERS):
            kv = torch.randn(2, KV_HEADS, 70, DIM).to(dtype)
            self.pool.write(layer, np.arange(70), kv)
        slots = np.arange(100, 100 + num_tokens)
        context = np.array([[0, 70, 0, num_tokens]])
        causal = np.array([[100, num_tokens, 0, num_tokens]])
        self.plans = [
            self.kernel.plan(slots, context, causal, SLOTS, window=None if layer else window)
            for layer in range(LAYERS)
        ]


def one_by_one(
    layers: list[DecoderLayer],
    x: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    attention: Attention,
) -> torch.Tensor:
    left: torch.Tensor | None = None
    for i, layer in enumerate(layers):

        def apply(index: int, rows, layer: DecoderLayer = layer) -> torch.Tensor:
            weight = layer.weights[index]
            if isinstance(weight, Bf16Weight):
                return bf16_linear(rows, weight)
            rows = quantise_rows(rows) if isinstance(rows, torch.Tensor) else rows
            return int8_linear(rows, weight, layer.biases[index], x.dtype)

        def norm(weight: torch.Tensor, linear, added):
            kind = rms_norm_int8 if isinstance(linear, Int8Weight) else rms_norm
            return kind(x, weight, EPSILON, added)

        qkv = apply(0, norm(layer.input_norm, layer.qkv, left))
        heads = qkv.view(len(x), -1, DIM)
        norms = None if layer.head_norms is None else (*layer.head_norms, EPSILON)
        rope(heads, *angles, HEADS, KV_HEADS, norms)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        plan, pool = attention.plans[i], attention.pool
        out = attention.kernel.run(plan, pool, i, q, k, v, sinks=layer.sinks)
        left = apply(1, out)
        gate_up = apply(2, norm(layer.mlp_norm, layer.gate_up, left))
        if isinstance(layer.gate_up, Int8Weight):
            kind = swiglu_int8 if isinstance(layer.down, Int8Weight) else swiglu
            gate_up = kind(gate_up)
        left = apply(3, gate_up)
    assert left is not None
    return x + left


CASES = [
    (torch.bfloat16, ""),
    (torch.bfloat16, "qogd"),
    (torch.bfloat16, "od"),
    (torch.bfloat16, "qg"),
    (torch.float32, "qogd"),
]


@pytest.mark.parametrize(("dtype", "quantised"), CASES, ids=lambda case: str(case))
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize(
    "extras", [False, True], ids=["plain", "biases, head norms, a window and sinks"]
)
def test_it_equals_its_operations(every_level, dtype, quantised, num_threads, extras):
    if quantised != "qogd" and not serves(HIDDEN, HIDDEN):
        pytest.skip("no products of bfloat16 on this instruction set")
    torch.manual_seed(0)
    layers = [make_layer(dtype, quantised, biased=extras, normed=extras) for _ in range(LAYERS)]
    window = 30 if extras else None
    if extras:
        layers[1] = replace(layers[1], sinks=torch.randn(HEADS))
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        decoder = CpuDecoder(
            layers,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            epsilon=EPSILON,
            dtype=dtype,
        )
        for num_tokens in (2, 90, 1):  # the scratch of the larger step serves the last
            x = torch.randn(num_tokens, HIDDEN).to(dtype)
            turns = torch.rand(num_tokens, DIM // 2) * 6
            angles = (turns.cos(), turns.sin())
            torch.manual_seed(num_tokens)
            mine = Attention(dtype, num_tokens, window)
            torch.manual_seed(num_tokens)
            theirs = Attention(dtype, num_tokens, window)
            wanted = one_by_one(layers, x.clone(), angles, theirs)
            out = decoder.run(x, *angles, mine.plans, mine.pool)
            assert out is x
            assert torch.equal(out, wanted)
            assert torch.equal(mine.pool.storage.nan_to_num(), theirs.pool.storage.nan_to_num())
    finally:
        torch.set_num_threads(before)


def test_a_smaller_step_follows_one_that_memory_ran_out_for(monkeypatch):
    torch.manual_seed(0)
    layers = [make_layer(torch.float32, "qogd", biased=False, normed=False) for _ in range(LAYERS)]
    sizes = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "epsilon": EPSILON}
    decoder = CpuDecoder(layers, **sizes, dtype=torch.float32)
    empty = torch.empty

    def run(num_tokens: int) -> torch.Tensor:
        x, turns = torch.ones(num_tokens, HIDDEN), torch.ones(num_tokens, DIM // 2)
        torch.manual_seed(num_tokens)
        attention = Attention(torch.float32, num_tokens)
        return decoder.run(x, turns, turns, attention.plans, attention.pool)

    def little(size, **options):
        if options.get("dtype") == torch.float32 and isinstance(size, int) and size > 40 * HIDDEN:
            raise MemoryError
        return empty(size, **options)

    wanted = run(20)
    for warm in (False, True):
        decoder = CpuDecoder(layers, **sizes, dtype=torch.float32)
        if warm:
            run(2)
        with monkeypatch.context() as patch:
            patch.setattr("batchradix_kernels.decoder.torch.empty", little)
            with pytest.raises(MemoryError):
                run(90)
        assert torch.equal(run(20), wanted)


def test_what_it_does_not_serve():
    layer = make_layer(torch.bfloat16, "qogd", biased=False, normed=False)
    assert layer.is_served(torch.bfloat16)
    assert not layer.is_served(torch.float16)
