"""What one attention backend has computed, another can go on with: the layout between is common."""

import numpy as np
import pytest
import torch

from batchradix.engine.attention.base import AttentionShape
from batchradix.engine.attention.cpu_backend import CpuAttention
from batchradix.engine.attention.torch_backend import TorchAttention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 48])
def test_keys_and_values_move_between_the_pools_bit_for_bit(dtype, head_dim):
    shape = AttentionShape(
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        scale=1.0,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    if not CpuAttention.serves(shape):
        pytest.skip(CpuAttention.missing(shape))
    backends = (TorchAttention(shape), CpuAttention(shape))
    plain, paired = (backend.allocate(100) for backend in backends)
    for backend, pool in zip(backends, (plain, paired), strict=True):
        backend.poison(pool, 0, 100)
    k, v = torch.randn(2, 3, 2, 21, head_dim).to(dtype)
    backends[0].load(plain, 5, k, v)
    backends[1].load(paired, 40, *backends[0].export(plain, np.arange(5, 26)))
    slots = np.array([60, 41, 40, 47])
    for side, wanted in zip(backends[1].export(paired, slots), (k, v), strict=True):
        assert side.shape == (3, 2, 4, head_dim)
        assert torch.equal(side, wanted[:, :, slots - 40])
    outside = np.r_[0:40, 61:100]
    assert all(torch.isnan(side).all() for side in backends[1].export(paired, outside))
