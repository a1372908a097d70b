"""Weights through two buffers are those of a plain copy, bit for bit, however late copies run."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from batchradix.checkpoint.checkpoint import open_checkpoint
from batchradix.checkpoint.model_config import ModelConfig, RopeConfig
from batchradix.engine.models.gguf_source import GgufSource
from batchradix.engine.models.load import Weights
from batchradix.engine.models.safetensors_source import SafetensorsSource
from batchradix.engine.models.staging import Staging
from batchradix.errors import ModelError

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(7, 3), (1,), (0,), (0, 5), (3, 0), (64, 33), (257,), (2, 3, 5)]


class LateCopies:
    """Copies no sooner than somebody waits for them, and fills the buffer with NaN right after."""

    def __init__(self) -> None:
        self.pending = 0
        self.most_pending = 0
        self.most_bytes = 0

    def __call__(self, buffer: torch.Tensor, target: torch.Tensor):
        self.pending += 1
        self.most_pending = max(self.most_pending, self.pending)
        self.most_bytes = max(self.most_bytes, buffer.nbytes)

        def wait() -> None:
            self.pending -= 1
            target.copy_(buffer)
            buffer.fill_(torch.nan)

        return wait


def same_bits(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    as_bits = {4: torch.int32, 2: torch.int16}[expected.itemsize]
    return actual.dtype == expected.dtype and torch.equal(
        actual.view(as_bits), expected.view(as_bits)
    )


@pytest.mark.parametrize("num_bytes", [8, 30, 1000, 1 << 16])
@pytest.mark.parametrize("target_dtype", DTYPES)
@pytest.mark.parametrize("source_dtype", DTYPES)
def test_tensors_of_any_size_arrive_bit_for_bit(source_dtype, target_dtype, num_bytes):
    copies = LateCopies()
    staging = Staging(CPU, num_bytes, start=copies)
    sources = [torch.randn(shape).mul_(70_000).to(source_dtype) for shape in SHAPES]
    targets = [torch.full(shape, torch.nan, dtype=target_dtype) for shape in SHAPES]
    for source, target in zip(sources, targets, strict=True):
        staging.copy(source, target)
    staging.finish()
    for source, target in zip(sources, targets, strict=True):
        assert same_bits(target, source.to(target_dtype))
    assert copies.pending == 0
    assert copies.most_pending == 2
    assert copies.most_bytes <= num_bytes


def test_a_copy_is_under_way_while_the_next_buffer_is_filled():
    copies = LateCopies()
    staging = Staging(CPU, 8, start=copies)
    target = torch.zeros(5)
    staging.copy(torch.arange(1.0, 6.0), target)
    assert copies.pending == 2  # of three parts the first has been waited for
    assert target.tolist() == [1, 2, 0, 0, 0]
    staging.finish()
    assert target.tolist() == [1, 2, 3, 4, 5]
    staging.finish()
    assert target.tolist() == [1, 2, 3, 4, 5]


def test_without_a_device_of_its_own_a_copy_is_done_when_it_returns():
    target = torch.zeros(9, dtype=torch.bfloat16)
    Staging(CPU, 8).copy(torch.arange(9.0), target)
    assert target.tolist() == list(range(9))


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_weights_of_a_checkpoint_are_those_of_the_plain_path(saved, dtype):
    files = open_checkpoint(str(saved("qwen2")[0])).weight_files
    shapes = {name: tuple(held.shape) for name, held in saved("qwen2")[1].state_dict().items()}
    copies = LateCopies()
    taken: list[dict[str, torch.Tensor]] = []
    for staging in (None, Staging(CPU, 1000, start=copies)):
        weights = Weights(SafetensorsSource(files), dtype, CPU, staging=staging)
        tensors = {name: weights.take(name, shape) for name, shape in shapes.items()}
        heads = [f"model.layers.0.self_attn.{side}_proj.weight" for side in "qkv"]
        tensors["stacked"] = weights.take_stacked(heads, [shapes[name] for name in heads])
        weights.finish()
        taken.append(tensors)
    plain, staged = taken
    assert len(plain) > 20
    assert copies.most_pending == 2
    assert copies.pending == 0
    assert all(same_bits(staged[name], tensor) for name, tensor in plain.items())


def test_quantised_weights_arrive_as_they_are_dequantised(tmp_path):
    values = np.random.default_rng(0).standard_normal((24, 64), dtype=np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.attn_q.weight", gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=8,
        hidden_size=64,
        intermediate_size=32,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        context_length=64,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        tie_embeddings=True,
    )
    source = GgufSource([tmp_path / "m.gguf"], config)
    name = "model.layers.0.self_attn.q_proj.weight"
    weights = Weights(source, torch.bfloat16, CPU, staging=Staging(CPU, 500, start=LateCopies()))
    taken = weights.take(name, (24, 64))
    weights.finish()
    assert same_bits(taken, source.read(name).to(torch.bfloat16))


def test_a_tensor_that_no_layer_takes_is_still_told(tmp_path):
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "w.safetensors")
    copies = LateCopies()
    weights = Weights(
        SafetensorsSource([tmp_path / "w.safetensors"]),
        torch.float32,
        CPU,
        staging=Staging(CPU, 8, start=copies),
    )
    taken = weights.take("a", (2,))
    with pytest.raises(ModelError, match="the tensor b"):
        weights.finish()
    assert taken.tolist() == [1, 1]
