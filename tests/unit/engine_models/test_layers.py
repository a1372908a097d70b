"""Layers against the same thing in torch and transformers."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from batchradix.checkpoint.model_config import RopeConfig
from batchradix.engine.layers.linear import PackedLinear, PlainLinear, can_pack, make_linear
from batchradix.engine.layers.norm import RMSNorm
from batchradix.engine.layers.rotary import Rotary, inverse_frequencies
from batchradix_kernels.rope import rope

needs_packing = pytest.mark.skipif(
    not can_pack("cpu", torch.float32), reason="this torch has no packed linear layers"
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_size", [48, 576, 1536, 2048])
def test_a_batch_invariant_row_is_the_same_bit_for_bit_whatever_the_number_of_rows(dtype, in_size):
    torch.manual_seed(0)
    weight, bias = torch.randn(96, in_size).to(dtype), torch.randn(96).to(dtype)
    layer = make_linear(weight, bias, batch_invariant=True)
    x = torch.randn(130, in_size).to(dtype)
    whole = layer(x)
    for rows in (1, 2, 3, 5, 8, 15, 16, 17, 64, 65, 129):
        assert torch.equal(layer(x[:rows]), whole[:rows]), rows
        assert torch.equal(layer(x[-rows:]), whole[-rows:]), rows


@needs_packing
@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 33)])
@pytest.mark.parametrize("rows", [1, 7])
def test_a_packed_layer_gives_what_a_plain_one_gives(bias, rows):
    weight, x = torch.randn(33, 47), torch.randn(2 * rows, 47)[::2]  # strided input too
    packed, plain = PackedLinear(weight, bias)(x), PlainLinear(weight, bias)(x)
    torch.testing.assert_close(packed, plain, rtol=1e-5, atol=1e-5)


def test_a_device_without_packing_gets_plain_layers():
    assert not can_pack("cuda", torch.float32)
    meta = make_linear(torch.empty(3, 4, device="meta"))
    assert isinstance(meta, PlainLinear)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_that_of_transformers(dtype):
    theirs = LlamaRMSNorm(48, eps=1e-5)
    weight = torch.randn(48).to(dtype)
    theirs.weight.data = weight
    x = (3 * torch.randn(5, 48)).to(dtype)
    torch.testing.assert_close(RMSNorm(weight, 1e-5)(x), theirs(x).detach())


ROPES = {
    "default": (RopeConfig(theta=5e5), {"rope_type": "default", "rope_theta": 5e5}),
    "linear": (
        RopeConfig(kind="linear", factor=4.0),
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    ),
    "llama3": (
        RopeConfig(
            theta=5e5,
            kind="llama3",
            factor=32.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_context_length=8192,
        ),
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "yarn": (
        RopeConfig(
            kind="yarn",
            factor=4.0,
            original_context_length=8192,
            amplitude=0.1 * math.log(4.0) + 1.0,
        ),
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "yarn, a blend of no width": (  # Kimi-K2
        RopeConfig(
            theta=5e4,
            kind="yarn",
            factor=32.0,
            original_context_length=4096,
            fast_rotations=1.0,
        ),
        {
            "rope_type": "yarn",
            "rope_theta": 5e4,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    ),
    "yarn, not truncated": (
        RopeConfig(
            kind="yarn",
            factor=40.0,
            original_context_length=4096,
            slow_rotations=2.0,
            whole_dimensions=False,
            amplitude=1.5,
        ),
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_slow": 2.0,
            "truncate": False,
            "attention_factor": 1.5,
        },
    ),
}


@pytest.mark.parametrize("kind", list(ROPES))
@pytest.mark.parametrize("head_dim", [20, 64, 128])
def test_rotation_and_its_scaling_are_those_of_transformers(kind, head_dim):
    ours, theirs = ROPES[kind]
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=theirs,
    )
    reference = LlamaRotaryEmbedding(config)
    assert torch.equal(inverse_frequencies(ours, head_dim), reference.inv_freq)

    positions = torch.tensor([0, 1, 17, 4095, 8191, 100_000])
    x = torch.randn(6, 3, head_dim)
    cos, sin = reference(x, positions[None])
    wanted, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    rope(x, *Rotary(ours, head_dim, torch.device("cpu")).angles(positions), 2, 1)
    torch.testing.assert_close(x, wanted[0].transpose(0, 1), rtol=1e-5, atol=1e-5)
