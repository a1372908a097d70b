"""Writing to a pool and moving within it in Triton, bit for bit, and nothing else touched."""

from __future__ import annotations

import math

import pytest
import torch

from batchradix_kernels.float8 import FLOAT8, as_bytes, stored
from batchradix_kernels.kv_move import kv_move, kv_move_reference
from batchradix_kernels.kv_store import kv_store, kv_store_reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16, FLOAT8]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "head_dim"), [(1, 64), (7, 80), (70, 128), (3, 20)])
def test_keys_and_values_are_rounded_once_and_go_to_their_slots(
    dtype, source_dtype, num_tokens, head_dim
):
    torch.manual_seed(num_tokens)
    qkv = torch.randn(num_tokens, 9, head_dim).to(source_dtype)  # views with other heads between
    k, v = qkv[:, 2:5], qkv[:, 6:9]
    slots = torch.randperm(2 * num_tokens + 3)[:num_tokens].int()
    pool = torch.full((2, 3, 2 * num_tokens + 3, head_dim), math.nan, dtype=dtype)
    wanted = pool.clone()
    kv_store(k, v, slots, pool)
    kv_store_reference(k, v, slots, wanted)
    assert torch.equal(pool.float().nan_to_num(99), wanted.float().nan_to_num(99))
    assert torch.equal(as_bytes(pool[1, 2, slots]), as_bytes(stored(v[:, 2], dtype)))


def test_padding_goes_nowhere():
    k, v = torch.randn(2, 5, 2, 16)
    slots = torch.tensor([3, -1, 0, -1, -1], dtype=torch.int32)
    pool = torch.full((2, 2, 4, 16), math.nan)
    kv_store(k, v, slots, pool)
    assert torch.equal(pool[0, :, 3], k[0])
    assert torch.equal(pool[1, :, 0], v[2])
    assert pool[:, :, 1:3].isnan().all()


def test_without_tokens_nothing_is_written():
    pool = torch.full((2, 2, 4, 16), math.nan)
    kv_store(torch.empty(0, 2, 16), torch.empty(0, 2, 16), torch.empty(0, dtype=torch.int32), pool)
    assert pool.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 2, 2, 100, 64), (100, 20)])
def test_moves_read_all_before_they_write(dtype, shape):
    pool = torch.randn(shape).to(dtype)
    wanted = pool.clone()
    sources = torch.tensor([*range(10, 76), 90, 99], dtype=torch.int32)
    targets = torch.tensor([*range(5, 71), 10 + 70, 0], dtype=torch.int32)
    kv_move(pool, sources, targets)
    kv_move_reference(wanted, sources, targets)
    assert torch.equal(as_bytes(pool), as_bytes(wanted))
    nothing = torch.empty(0, dtype=torch.int32)
    kv_move(pool, nothing, nothing)
    assert torch.equal(as_bytes(pool), as_bytes(wanted))
