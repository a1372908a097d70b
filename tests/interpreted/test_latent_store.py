"""Writing latents to a pool in Triton, bit for bit, and nothing else touched."""

from __future__ import annotations

import math

import pytest
import torch

from batchradix_kernels.latent_store import latent_store, latent_store_reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "dims"), [(1, (512, 64)), (7, (24, 8)), (70, (512, 64))])
def test_latents_and_rope_keys_are_rounded_once_and_go_to_their_slots(
    dtype, source_dtype, num_tokens, dims
):
    torch.manual_seed(num_tokens)
    source = torch.randn(num_tokens, sum(dims) + 3).to(source_dtype)
    latents, ropes = source[:, : dims[0]], source[:, dims[0] : sum(dims)]  # views of wider rows
    num_slots = 2 * num_tokens + 3
    slots = torch.randperm(num_slots)[:num_tokens].int()
    pool = torch.full((num_slots, sum(dims)), math.nan, dtype=dtype)
    wanted = pool.clone()
    latent_store(latents, ropes, slots, pool)
    latent_store_reference(latents, ropes, slots, wanted)
    assert torch.equal(pool.nan_to_num(99), wanted.nan_to_num(99))
    assert torch.equal(pool[slots], source[:, : sum(dims)].to(dtype))


def test_padding_goes_nowhere():
    latents, ropes = torch.randn(5, 24), torch.randn(5, 8)
    pool = torch.full((4, 32), math.nan)
    latent_store(latents, ropes, torch.tensor([3, -1, 0, -1, -1], dtype=torch.int32), pool)
    assert torch.equal(pool[3], torch.cat((latents[0], ropes[0])))
    assert torch.equal(pool[0], torch.cat((latents[2], ropes[2])))
    assert pool[1:3].isnan().all()


def test_without_tokens_nothing_is_written():
    pool = torch.full((4, 32), math.nan)
    none = torch.empty(0, dtype=torch.int32)
    latent_store(torch.empty(0, 24), torch.empty(0, 8), none, pool)
    assert pool.isnan().all()
