"""Every backend against the float64 reference on random trees in a poisoned pool."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch_flashinfer

from batchradix.engine.attention.base import AttentionShape
from batchradix.engine.attention.cpu_backend import CpuAttention
from batchradix.engine.attention.registry import make_backend, missing_kernels, refusal
from batchradix.engine.attention.torch_backend import TorchAttention
from batchradix.engine.attention.triton_backend import TritonAttention
from batchradix.errors import OptionError
from batchradix_kernels.float8 import FLOAT8, as_bytes, stored
from batchradix_kernels.testing import TOLERANCES, assert_matches
from batchradix_kernels.tree_attention import tree_attention_reference
from batchradix_kernels.tree_attention.reference import slots_of_query
from batchradix_kernels.triton_runtime import interprets

# Under Triton's interpreter (`tests/interpreted`) the Triton backend alone, and little of it.
BACKENDS = ["torch", "torch without flash attention", "cpu", "flashinfer"]
if interprets():
    BACKENDS = ["triton"]
HEADS = [(9, 3, 20)]
if not interprets():
    HEADS += [(2, 2, 64), (6, 2, 80), (4, 1, 64), (8, 1, 128)]
POOL_SLOTS = 700
# What products are in, and what keys and values are stored in.
DTYPES = [
    pytest.param(torch.float32, torch.float32, id="float32"),
    pytest.param(torch.bfloat16, torch.bfloat16, id="bfloat16"),
    pytest.param(torch.bfloat16, FLOAT8, id="bfloat16 over float8"),
]


class Tree:
    """A random tree: finished ancestors in the pool, new nodes and decoding rows below."""

    def __init__(self, seed: int, depth: int, width: int, max_length: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.max_length = max_length
        self.free = self.rng.permutation(POOL_SLOTS // 10) * 10  # where nodes may start
        self.context: list[list[int]] = []
        self.causal: list[list[int]] = []
        self.slots: list[int] = []
        self.old_slots: list[int] = []
        self._grow(depth, width)

    def _place(self, length: int) -> int:
        """A run of ``length`` slots that nobody has."""
        taken = set(self.old_slots) | set(self.slots)
        for start in self.free:
            if start + length <= POOL_SLOTS and not taken & set(range(start, start + length)):
                return int(start)
        raise AssertionError("the pool of the test is too small")

    def _grow(self, depth: int, width: int) -> None:
        """One node with all below it; its queries and theirs are one range."""
        length = int(self.rng.integers(1, self.max_length + 1))
        start, first, place = self._place(length), len(self.slots), len(self.context)
        kind = self.rng.choice(["old", "new"]) if depth else self.rng.choice(["row", "new"])
        if kind == "new":
            self.slots += range(start, start + length)
            self.causal.append([start, length, first, first + length])
        elif kind == "row":  # a decoding row's tail: one query, its own slot last
            self.old_slots += range(start, start + length - 1)
            self.slots.append(start + length - 1)
            self.context.append([start, length, first, first + 1])
        else:
            self.old_slots += range(start, start + length)
        below = len(self.slots) if kind == "new" else first
        if depth:
            for _ in range(int(self.rng.integers(1, width + 1))):
                self._grow(depth - 1, width)
            if kind != "row":
                self.context.insert(place, [start, length, below, len(self.slots)])


@pytest.fixture(params=BACKENDS)
def backend_name(request, monkeypatch, native):
    """The torch backend must not depend on an operator that other devices lack."""
    if request.param == "torch without flash attention":
        monkeypatch.setattr("batchradix_kernels.tree_attention.is_available", lambda: False)
    if request.param == "cpu":
        native()
    if request.param == "flashinfer":
        torch_flashinfer.install(monkeypatch)
    in_8_bits = request.node.callspec.params.get("kv_dtype") == FLOAT8
    if in_8_bits and request.param in ("cpu", "flashinfer"):
        pytest.skip(f"{request.param} knows no keys and values in 8 bits")
    return request.param.split()[0]


def read(pool, layer: int, slots) -> torch.Tensor:
    """Keys and values [2, K, n, E] of one layer."""
    if isinstance(pool, torch.Tensor):
        return pool[layer][:, :, slots]
    return pool.read(layer, np.array(slots, dtype=np.int64))


def write(pool, layer: int, slots, kv: torch.Tensor) -> None:
    if isinstance(pool, torch.Tensor):
        as_bytes(pool[layer])[:, :, slots] = as_bytes(kv)
    else:
        pool.write(layer, np.array(slots, dtype=np.int64), kv)


@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize(
    ("depth", "width", "max_length"), [(0, 1, 9), (1, 9, 6), (3, 2, 5), (13, 1, 3), (1, 7, 40)]
)
def test_a_random_tree_equals_the_reference(
    lab, backend_name, dtype, kv_dtype, num_heads, num_kv_heads, head_dim, depth, width, max_length
):
    tree = Tree(head_dim + depth, depth, width, max_length)
    shape = AttentionShape(
        num_layers=2,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        dtype=dtype,
        device=torch.device("cpu"),
        kv_dtype=kv_dtype,
    )
    backend = make_backend(backend_name, shape)
    pool = backend.allocate(POOL_SLOTS)
    backend.poison(pool, 0, POOL_SLOTS)
    torch.manual_seed(0)
    for layer in range(2):
        old = torch.randn(2, num_kv_heads, len(tree.old_slots), head_dim)
        write(pool, layer, tree.old_slots, stored(old, kv_dtype))
    num_tokens = len(tree.slots)
    step = lab.make_step(
        range(num_tokens),
        range(num_tokens),
        tree.slots,
        context=tree.context,
        causal=tree.causal,
    )
    plan = backend.plan(step)
    for layer in range(2):
        q = torch.randn(num_tokens, num_heads, head_dim)
        k, v = torch.randn(2, num_tokens, num_kv_heads, head_dim)
        out = backend.run(layer, q, k, v, pool, plan)
        assert out.dtype == dtype
        assert same(read(pool, layer, tree.slots)[0], stored(k.transpose(0, 1), kv_dtype))
        wanted = tree_attention_reference(
            q.to(dtype),
            *read(pool, layer, range(POOL_SLOTS)).to(dtype),
            tree.context,
            tree.causal,
            scale=shape.scale,
        )
        assert_matches(out.view_as(wanted), wanted, TOLERANCES[dtype])


# Of a root with rows and new nodes below; the positions of rows differ. What a window of the first
# layer, the cap and the sinks are, and how trees grow: depth, width, the longest node.
PECULIAR = [
    pytest.param(1, None, False, (3, 2, 9), id="sees itself alone"),
    pytest.param(5, None, False, (2, 4, 40), id="less than a node"),
    pytest.param(33, None, True, (1, 12, 90), id="ends within nodes, with sinks"),
    pytest.param(70, 20.0, False, (1, 5, 120), id="with a cap"),
    pytest.param(50, 5.0, True, (13, 1, 9), id="many levels, with a cap and sinks"),
    pytest.param(100_000, 5.0, True, (2, 3, 20), id="wider than all"),
]


@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("window", "softcap", "has_sinks", "sizes"), PECULIAR)
def test_windows_caps_and_sinks_equal_the_reference(
    lab, backend_name, dtype, kv_dtype, heads, window, softcap, has_sinks, sizes
):
    """Slots beyond the windows of all queries hold NaN in the layer that has one."""
    tree = Tree(window + sizes[0], *sizes)
    num_heads, num_kv_heads, head_dim = heads
    shape = AttentionShape(
        num_layers=2,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=0.7 * head_dim**-0.5,
        dtype=dtype,
        device=torch.device("cpu"),
        kv_dtype=kv_dtype,
        layer_windows=(window, None),
        softcap=softcap,
        sinks=has_sinks,
    )
    if backend_name == "flashinfer" or refusal(backend_name, shape) is not None:
        pytest.skip(f"{backend_name} does not serve it")
    backend = make_backend(backend_name, shape)
    pool = backend.allocate(POOL_SLOTS)
    backend.poison(pool, 0, POOL_SLOTS)
    torch.manual_seed(0)
    num_tokens = len(tree.slots)
    seen = [slots_of_query(t, tree.context, tree.causal) for t in range(num_tokens)]
    in_window = {slot for slots in seen for slot in slots[-window:]}
    for layer, kept in enumerate((in_window, set(tree.old_slots))):
        old_slots = [slot for slot in tree.old_slots if slot in kept]
        old = torch.randn(2, num_kv_heads, len(old_slots), head_dim)
        write(pool, layer, old_slots, stored(old, kv_dtype))
    positions = [len(slots) - 1 for slots in seen]
    step = lab.make_step(
        range(num_tokens), positions, tree.slots, context=tree.context, causal=tree.causal
    )
    plan = backend.plan(step)
    for layer in range(2):
        q = 3 * torch.randn(num_tokens, num_heads, head_dim)
        k, v = torch.randn(2, num_tokens, num_kv_heads, head_dim)
        sinks = torch.randn(num_heads) if has_sinks else None
        out = backend.run(layer, q, k, v, pool, plan, sinks)
        wanted = tree_attention_reference(
            q.to(dtype),
            *read(pool, layer, range(POOL_SLOTS)).to(dtype),
            tree.context,
            tree.causal,
            scale=shape.scale,
            window=shape.layer_windows[layer],
            softcap=softcap,
            sinks=sinks,
        )
        assert_matches(out.view_as(wanted), wanted, TOLERANCES[dtype])


@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES)
def test_keys_and_values_leave_the_pool_and_come_back_bit_for_bit(backend_name, dtype, kv_dtype):
    backend = make_backend(backend_name, small_shape(dtype, num_layers=2, kv_dtype=kv_dtype))
    pool, other = backend.allocate(40), backend.allocate(20)
    held = stored(torch.randn(2, 2, 1, 40, 64), kv_dtype)
    for layer in range(2):
        write(pool, layer, range(40), held[layer])
    slots = np.array([30, 31, 4, 39, 0])
    k, v = backend.export(pool, slots)
    assert k.shape == v.shape == (2, 1, 5, 64)
    assert k.dtype == v.dtype == kv_dtype
    assert same(k, held[:, 0][:, :, slots])
    assert same(v, held[:, 1][:, :, slots])
    backend.poison(other, 0, 20)
    backend.load(other, 7, k, v)
    again = backend.export(other, np.arange(7, 12))
    assert all(map(same, again, (k, v)))
    outside = np.array([slot for slot in range(20) if not 7 <= slot < 12])
    assert all(side.isnan().all() for side in backend.export(other, outside))


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return actual.dtype == expected.dtype and torch.equal(as_bytes(actual), as_bytes(expected))


def small_shape(
    dtype: torch.dtype, num_layers: int = 1, kv_dtype: torch.dtype | None = None
) -> AttentionShape:
    return AttentionShape(
        num_layers=num_layers,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        scale=0.125,
        dtype=dtype,
        device=torch.device("cpu"),
        kv_dtype=kv_dtype,
    )


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("broken", ["q", "k", "first k"])
def test_a_query_that_went_bad_is_never_given_zeros(lab, backend_name, dtype, broken):
    backend = make_backend(backend_name, small_shape(dtype))
    pool = backend.allocate(16)
    step = lab.make_step(range(5), range(5), range(5), causal=[[0, 5, 0, 5]])
    q = torch.randn(5, 2, 64)
    k, v = torch.randn(2, 5, 1, 64)
    {"q": q, "k": k, "first k": k[:1]}[broken].fill_(torch.nan)
    out = backend.run(0, q, k, v, pool, backend.plan(step))
    assert out.isnan().all()


@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES)
def test_moves_read_all_before_they_write_and_touch_every_layer(backend_name, dtype, kv_dtype):
    backend = make_backend(backend_name, small_shape(dtype, num_layers=3, kv_dtype=kv_dtype))
    pool = backend.allocate(100)
    backend.poison(pool, 0, 100)
    before = stored(torch.randn(3, 2, 1, 100, 64), kv_dtype)
    for layer in range(3):
        write(pool, layer, range(100), before[layer])
    backend.move(pool, np.array([[10, 5, 33], [43, 38, 7], [90, 0, 3]]))
    wanted = before.clone()
    wanted[..., 5:45, :] = before[..., 10:50, :]
    wanted[..., 0:3, :] = before[..., 90:93, :]
    for layer in range(3):
        assert same(read(pool, layer, range(100)), wanted[layer])
    backend.poison(pool, 7, 30)
    for layer in range(3):
        got = read(pool, layer, range(100))
        assert got[:, :, 7:37].isnan().all()
        assert same(got[:, :, 37:], wanted[layer, :, :, 37:])


def test_auto_means_the_c_kernels_where_they_serve(native):
    native()
    assert isinstance(make_backend("auto", small_shape(torch.float32)), CpuAttention)
    assert isinstance(make_backend("auto", small_shape(torch.float16)), TorchAttention)
    with pytest.raises(
        OptionError,
        match="there is none for dtype float16, only for bfloat16 and float32; use torch",
    ):
        make_backend("cpu", small_shape(torch.float16))


def test_keys_and_values_in_8_bits_are_refused_by_others_and_auto_takes_torch():
    shape = small_shape(torch.bfloat16, kv_dtype=FLOAT8)
    assert isinstance(make_backend("auto", shape), TorchAttention)
    with pytest.raises(OptionError, match=r"none for keys and values in 8 bits .*; use torch"):
        make_backend("cpu", shape)
    with pytest.raises(OptionError, match=r"flashinfer, .* no keys and values in 8 bits"):
        make_backend("flashinfer", shape)
    with pytest.raises(OptionError, match=r"deterministic needs .* leave deterministic out"):
        make_backend("auto", replace(shape, batch_invariant=True))


@pytest.mark.parametrize(
    "changes", [{"layer_windows": (None, 8)}, {"softcap": 30.0}, {"sinks": True}]
)
def test_flashinfer_refuses_windows_caps_and_sinks(changes):
    shape = replace(small_shape(torch.bfloat16, num_layers=2), **changes)
    with pytest.raises(OptionError, match=r"flashinfer, .* no sliding windows, .*; use torch"):
        make_backend("flashinfer", shape)


@pytest.mark.parametrize(
    ("hip", "found", "served"),
    [
        (None, {"major": 9, "minor": 0}, True),
        (None, {"major": 8, "minor": 9}, True),
        (None, {"major": 8, "minor": 6}, False),
        ("6.4", {"gcnArchName": "gfx942:sramecc+:xnack-"}, False),
        ("7.0", {"gcnArchName": "gfx950:sramecc+"}, True),
    ],
)
def test_triton_refuses_8_bits_on_a_gpu_without_that_format(monkeypatch, hip, found, served):
    """gfx942 has floats of 8 bits of its own, which are others."""
    monkeypatch.setattr("batchradix.engine.attention.triton_backend.serves", lambda _: True)
    monkeypatch.setattr("batchradix.engine.attention.triton_backend.is_installed", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**found))
    monkeypatch.setattr(torch.version, "hip", hip)
    cuda = replace(small_shape(torch.bfloat16), device=torch.device("cuda:0"))
    assert TritonAttention.missing(cuda) is None
    why = TritonAttention.missing(replace(cuda, kv_dtype=FLOAT8))
    assert (
        why is None if served else "no float8_e4m3fn, which `kv_dtype` fp8 stores; use torch" in why
    )


def test_without_the_c_kernels_torch_serves(monkeypatch):
    monkeypatch.setattr("batchradix_kernels.tree_attention.cpu.library", lambda: None)
    assert isinstance(make_backend("auto", small_shape(torch.float32)), TorchAttention)
    with pytest.raises(
        OptionError, match=r"they were not built, which takes a C compiler .*; use torch"
    ):
        make_backend("cpu", small_shape(torch.float32))


def test_missing_c_kernels_are_told_where_they_would_have_served(monkeypatch):
    monkeypatch.setattr("batchradix.engine.attention.registry.library", lambda: None)
    told = missing_kernels("auto", "cpu")
    assert told is not None
    assert "install a C compiler" in told
    assert missing_kernels("torch", "cpu") is None
    assert missing_kernels("auto", "cuda") is None


@pytest.mark.skipif(interprets(), reason="the interpreter stands in for a GPU")
def test_triton_is_refused_without_a_gpu():
    with pytest.raises(OptionError, match="kernels for GPUs, cannot be used here: it needs a GPU"):
        make_backend("triton", small_shape(torch.float32))


def test_triton_is_refused_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr("batchradix.engine.attention.triton_backend.is_installed", lambda: False)
    with pytest.raises(OptionError, match="not installed; run pip install triton, or use torch"):
        make_backend("triton", small_shape(torch.float32))
