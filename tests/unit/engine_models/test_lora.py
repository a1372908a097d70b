"""Adapters merged as weights load: the model is that of weight + scale · up · down."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from batchradix.checkpoint.adapter import open_adapter
from batchradix.checkpoint.checkpoint import open_checkpoint
from batchradix.checkpoint.stored_weights import StoredWeights
from batchradix.engine.model_runner import ModelRunner
from batchradix.engine.models.gguf_source import GgufSource
from batchradix.engine.models.load import open_source
from batchradix.engine.models.lora_source import LoraSource
from batchradix.engine.models.packed_source import PackedSource
from batchradix.engine.models.safetensors_source import SafetensorsSource
from batchradix.errors import ModelError
from batchradix.settings import EngineSettings

PROMPT = list(range(3, 30))
RANK, ALPHA = 3, 5.0
TARGETS = ("q_proj", "k_proj", "down_proj", "lm_head", "kv_a_proj_with_mqa")
TARGETS += ("qkv_proj", "gate_up_proj")


def save_adapter(folder, layers, *, replaced=(), **config):
    """An adapter with random matrices for ``layers`` (name → shape of its weight), and what each
    adds to its weight."""
    folder.mkdir()
    tensors, added = {}, {}
    for name, (num_outputs, num_inputs) in layers.items():
        down, up = torch.randn(RANK, num_inputs), 0.2 * torch.randn(num_outputs, RANK)
        tensors[f"base_model.model.{name}.lora_A.weight"] = down
        tensors[f"base_model.model.{name}.lora_B.weight"] = up
        added[name] = ALPHA / RANK * (up @ down)
    tensors |= {f"base_model.model.{name}": values for name, values in dict(replaced).items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.rpartition(".")[2] for name in layers})
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    return added


def logits(lab, checkpoint):
    n = len(PROMPT)
    settings = EngineSettings(
        dtype="float32",
        device="cpu",
        attention="auto",
        batch_size=8,
        prefill_tokens=64,
        kv_tokens=64,
        prefix_cache=True,
        num_threads=1,
    )
    runner = ModelRunner(checkpoint, settings)
    return lab.run(runner, PROMPT, range(n), range(n), causal=[(0, n, 0, n)], logits=range(n))


@pytest.mark.parametrize(
    "kind", ["llama", "qwen3", "deepseek-v3", "phi3", "phi3-partial-longrope", "gemma2"]
)
def test_a_model_with_an_adapter_is_the_merged_one(lab, saved, tmp_path, kind):
    """With rows of latents and queries, whose order differs from the file's, too."""
    folder, model = saved(kind)
    torch.manual_seed(0)
    merged = copy.deepcopy(model)
    linears = {
        name: module
        for name, module in merged.named_modules()
        if isinstance(module, torch.nn.Linear)
        and name.endswith(TARGETS)
        and not (name == "lm_head" and model.config.tie_word_embeddings)
    }
    embedding = torch.randn_like(merged.get_input_embeddings().weight)
    added = save_adapter(
        tmp_path / "adapter",
        {name: module.weight.shape for name, module in linears.items()},
        replaced={"model.embed_tokens.weight": embedding},
    )
    with torch.no_grad():
        merged.get_input_embeddings().weight.copy_(embedding)
        for name, module in linears.items():
            module.weight += added[name]
        wanted = merged(torch.tensor([PROMPT])).logits[0]
    checkpoint = open_checkpoint(str(folder), lora=tmp_path / "adapter")
    assert (logits(lab, checkpoint) - wanted).abs().max() < 1e-3
    assert checkpoint.content_hash != open_checkpoint(str(folder)).content_hash


@pytest.mark.parametrize("beginning", ["model.language_model.", "language_model.model.", "model."])
def test_adapters_of_a_model_that_sees_change_its_text_part(lab, saved, tmp_path, beginning):
    """Under the names of any age, what they change of other parts left aside."""
    folder, model = saved("gemma3")
    tensors = load_file(folder / "model.safetensors")
    seeing = shutil.copytree(folder, tmp_path / "model")
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    renamed["vision_tower.encoder.q_proj.weight"] = torch.zeros(8, 8)
    save_file(renamed, seeing / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    both = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config}
    (seeing / "config.json").write_text(json.dumps(both))
    ours = {"layers.1.self_attn.q_proj": (64, 48), "layers.2.mlp.down_proj": (48, 88)}
    torch.manual_seed(0)
    added = save_adapter(
        tmp_path / "adapter",
        {f"{beginning}{name}": shape for name, shape in ours.items()}
        | {"model.vision_tower.encoder.q_proj": (8, 8)},
    )
    merged = copy.deepcopy(model)
    with torch.no_grad():
        for name in ours:
            merged.get_submodule(f"model.{name}").weight += added[f"{beginning}{name}"]
        wanted = merged(torch.tensor([PROMPT])).logits[0]
    checkpoint = open_checkpoint(str(seeing), lora=tmp_path / "adapter")
    assert (logits(lab, checkpoint) - wanted).abs().max() < 2e-4


def test_single_rows_are_merged_too(saved, tmp_path):
    added = save_adapter(tmp_path / "adapter", {"lm_head": (97, 48)})
    checkpoint = open_checkpoint(str(saved("llama")[0]), lora=tmp_path / "adapter")
    rows = open_source(checkpoint).read_rows("lm_head.weight", [5, 90])
    plain = saved("llama")[1].lm_head.weight.detach()
    assert torch.allclose(rows, (plain + added["lm_head"])[[5, 90]], atol=1e-6)


def test_quantised_weights_are_merged_after_dequantising(saved, tmp_path):
    numbers = torch.randint(-127, 128, (8, 32), dtype=torch.int8)
    scales = torch.rand(8, 1)
    name = "model.layers.0.self_attn.q_proj"
    save_file(
        {f"{name}.weight": numbers, f"{name}.weight_scale": scales}, tmp_path / "m.safetensors"
    )
    added = save_adapter(tmp_path / "adapter", {name: (8, 32)})
    base = PackedSource(
        SafetensorsSource([tmp_path / "m.safetensors"]), StoredWeights(layout="scaled")
    )
    config = open_checkpoint(str(saved("llama")[0])).config
    read = LoraSource(base, open_adapter(tmp_path / "adapter"), config).read(f"{name}.weight")
    assert torch.equal(read, numbers * scales + added[name])


def test_rows_of_gguf_files_are_put_back_before_they_are_merged(saved, tmp_path):
    config = replace(open_checkpoint(str(saved("llama")[0])).config, num_heads=2)
    values = np.random.default_rng(0).standard_normal((32, 32), dtype=np.float32)
    rows = np.concatenate([16 * head + np.arange(16).reshape(2, 8).T.ravel() for head in (0, 1)])
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    kind = gguf.GGMLQuantizationType.F32
    writer.add_tensor("blk.0.attn_q.weight", values[rows], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    name = "model.layers.0.self_attn.q_proj"
    added = save_adapter(tmp_path / "adapter", {name: (32, 32)})
    source = GgufSource([tmp_path / "m.gguf"], config)
    read = LoraSource(source, open_adapter(tmp_path / "adapter"), config).read(f"{name}.weight")
    assert torch.allclose(read, torch.from_numpy(values) + added[name], atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "layer", "shape", "says"),
    [
        ("llama", "model.layers.9.mlp.up_proj", (88, 48), r"changes model\.layers\.9.*base model"),
        ("llama-tied", "lm_head", (97, 48), "output layer is its embeddings"),
        ("llama", "model.layers.0.mlp.up_proj", (88, 40), "88 outputs and 40 inputs"),
    ],
)
def test_the_adapter_of_another_model_is_refused(lab, saved, tmp_path, kind, layer, shape, says):
    save_adapter(tmp_path / "adapter", {layer: shape})
    checkpoint = open_checkpoint(str(saved(kind)[0]), lora=tmp_path / "adapter")
    with pytest.raises(ModelError, match=says):
        logits(lab, checkpoint)
