"""Files that hold weights otherwise than layers take them."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from batchradix.checkpoint.checkpoint import open_checkpoint
from batchradix.engine.models.load import open_source
from batchradix.errors import ModelError

PROMPT = list(range(3, 40))
GPT_OSS = {"hidden_size": 64, "intermediate_size": 96}


def logits(lab, folder):
    runner = lab.open_runner(folder)
    n = len(PROMPT)
    found = lab.run(runner, PROMPT, range(n), range(n), causal=[(0, n, 0, n)], logits=range(n))
    runner.close()
    return found


def close(actual, model):
    with torch.inference_mode():
        wanted = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(actual, wanted, atol=1e-4, rtol=0)


def quantise(lab, folder):
    """A gpt-oss whose experts are random blocks in MXFP4 in ``folder``; the same model as
    transformers unpacks it."""
    model = lab.build_model("gpt-oss", **GPT_OSS)
    lab.save_model(model, folder)
    tensors = load_file(folder / "model.safetensors")
    draw = torch.Generator().manual_seed(5)
    parameters = dict(model.named_parameters())
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=draw, dtype=torch.uint8)
        scales = torch.randint(122, 126, shape, generator=draw, dtype=torch.uint8)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        unpacked = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        parameters[name].data.copy_(unpacked)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return model


def test_experts_in_mxfp4_are_what_transformers_unpacks(lab, tmp_path):
    model = quantise(lab, tmp_path)
    config = open_checkpoint(str(tmp_path)).config
    assert config.mxfp4
    close(logits(lab, tmp_path), model)


def test_blocks_without_scales_are_refused_by_name(lab, tmp_path):
    quantise(lab, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"no tensor model\.layers\.1\.mlp\.experts\.down_proj_sc"):
        lab.open_runner(tmp_path)


def test_bytes_are_refused_where_the_config_does_not_speak_of_mxfp4(lab, tmp_path):
    quantise(lab, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"is stored as U8"):
        open_checkpoint(str(tmp_path))


@pytest.fixture(scope="module")
def seeing():
    """A Gemma 3 that sees, tiny."""
    text = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "sliding_window": 5,
        "sliding_window_pattern": 2,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4
    )
    torch.manual_seed(11)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                (0.3 if name.endswith("norm.weight") else 0.15) * torch.randn_like(parameter)
            )
    return model


def test_the_text_part_of_a_model_that_sees_is_run_alone(lab, tmp_path, seeing):
    lab.save_model(seeing, tmp_path)
    config = open_checkpoint(str(tmp_path)).config
    assert config.architecture == "Gemma3ForCausalLM"
    assert config.layer_windows == (5, None, 5)
    close(logits(lab, tmp_path), seeing)


def test_the_names_of_files_of_another_age_are_known_too(lab, tmp_path, seeing):
    lab.save_model(seeing, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    beginnings = ("language_model.model.", "model.language_model.")
    found = [begin for begin in beginnings if any(name.startswith(begin) for name in tensors)]
    assert len(found) == 1
    other = beginnings[1 - beginnings.index(found[0])]
    renamed = {name.replace(found[0], other): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    close(logits(lab, tmp_path), seeing)


def test_layers_of_a_fused_tensor_are_read_row_by_row_too(lab, saved):
    folder, model = saved("phi3")
    source = open_source(open_checkpoint(str(folder)))
    whole = model.model.layers[1].self_attn.qkv_proj.weight
    name = "model.layers.1.self_attn.k_proj.weight"
    assert torch.equal(source.read(name), whole[48:72])
    assert torch.equal(source.read_rows(name, [3, 1]), whole[[51, 49]])


@pytest.mark.parametrize("change", [1, -1])
def test_fused_tensors_and_stacked_experts_of_another_size_are_refused(lab, tmp_path, change):
    """Of more rows or experts the first would be taken for all."""
    for kind, part, says in (
        ("phi3", "0.self_attn.qkv_proj.weight", "config asks for 96 rows"),
        ("phi3", "1.mlp.gate_up_proj.weight", "config asks for 176 rows"),
        ("gpt-oss", "0.mlp.experts.down_proj", "config asks for 6 experts"),
        ("gpt-oss", "0.mlp.experts.gate_up_proj_bias", "config asks for 6 experts"),
    ):
        folder = lab.save_model(lab.build_model(kind), tmp_path / part)
        tensors = load_file(folder / "model.safetensors")
        name = f"model.layers.{part}"
        whole = torch.cat((tensors[name], tensors[name]))
        tensors[name] = whole[: len(tensors[name]) + change].contiguous()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=f"tensor {name} has shape .*{says}"):
            lab.open_runner(folder)
