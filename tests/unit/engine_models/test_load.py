"""Reading weights: every layout gives the same model, and every flaw is named."""

from __future__ import annotations

import json
import shutil

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from batchradix.checkpoint.checkpoint import open_checkpoint
from batchradix.checkpoint.model_config import ModelConfig, RopeConfig
from batchradix.engine.models.gguf_source import GgufSource, hugging_face_name
from batchradix.engine.models.load import Weights
from batchradix.engine.models.registry import load_model
from batchradix.engine.models.safetensors_source import SafetensorsSource
from batchradix.errors import ModelError

CPU = torch.device("cpu")
PROMPT = list(range(3, 30))


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of the plain model's folder, to be spoilt."""
    return shutil.copytree(saved("llama")[0], tmp_path / "copy")


def rewrite(folder, change) -> None:
    """Passes the tensors of the folder's one file through ``change`` and saves them again."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def whole_prompt(lab, runner) -> torch.Tensor:
    n = len(PROMPT)
    return lab.run(runner, PROMPT, range(n), range(n), causal=[(0, n, 0, n)], logits=range(n))


def test_a_sharded_checkpoint_gives_the_same_logits_as_a_single_file(
    lab, saved, expected, tmp_path
):
    lab.save_model(saved("qwen2")[1], tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    logits = whole_prompt(lab, lab.open_runner(tmp_path))
    assert (logits - expected("qwen2", PROMPT)).abs().max().item() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_run_in_float32(lab, saved, tmp_path, dtype):
    lab.save_model(lab.build_model("llama").to(dtype), tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        wanted = model(torch.tensor([PROMPT])).logits[0]
    logits = whole_prompt(lab, lab.open_runner(tmp_path))
    assert (logits - wanted).abs().max().item() < 1e-4


def test_a_missing_tensor_is_named(folder):
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    checkpoint = open_checkpoint(str(folder))
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*safetensors"):
        load_model(checkpoint, torch.float32, CPU)


def test_a_tensor_of_another_shape_is_named_with_its_file(folder):
    name = "model.layers.2.self_attn.k_proj.weight"

    def shorten(tensors):
        tensors[name] = tensors[name][:-1].contiguous()

    rewrite(folder, shorten)
    with pytest.raises(
        ModelError, match=rf"model\.safetensors: tensor {name} has shape \[23, 48\]"
    ):
        load_model(open_checkpoint(str(folder)), torch.float32, CPU)


def test_a_tensor_that_no_layer_takes_is_named(folder):
    name = "model.layers.0.self_attn.q_proj.bias"
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(48)}))
    with pytest.raises(ModelError, match=name):
        load_model(open_checkpoint(str(folder)), torch.float32, CPU)


def test_stored_rotary_tables_are_ignored(folder):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(6)}))
    load_model(open_checkpoint(str(folder)), torch.float32, CPU)


def test_an_output_layer_beside_tied_embeddings_is_ignored(lab, saved, expected, tmp_path):
    folder = shutil.copytree(saved("llama-tied")[0], tmp_path / "copy")
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": torch.ones(lab.vocab, 48)}))
    logits = whole_prompt(lab, lab.open_runner(folder))
    assert (logits - expected("llama-tied", PROMPT)).abs().max().item() < 1e-4


def test_a_tensor_in_two_files_is_refused(tmp_path):
    for name in ("a", "b"):
        save_file({"same": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelError, match="same is in"):
        SafetensorsSource(sorted(tmp_path.glob("*.safetensors")))


def test_integers_are_refused_as_weights(tmp_path):
    save_file({"w": torch.zeros(2, 3, dtype=torch.int8)}, tmp_path / "q.safetensors")
    source = SafetensorsSource([tmp_path / "q.safetensors"])
    with pytest.raises(ModelError, match=r"q\.safetensors: tensor w is stored as int8"):
        Weights(source, torch.float32, CPU).take("w", (2, 3))


@pytest.mark.parametrize(("source", "suffix"), [(SafetensorsSource, "safetensors")])
def test_a_file_that_is_something_else_is_refused(tmp_path, source, suffix):
    path = tmp_path / f"broken.{suffix}"
    path.write_bytes(b"not a model at all, only some text that is long enough")
    with pytest.raises(ModelError, match="broken"):
        source([path])


def test_weights_are_converted_while_they_are_stacked(tmp_path):
    first, second = torch.randn(2, 3), torch.randn(4, 3)
    save_file({"a": first, "b": second}, tmp_path / "w.safetensors")
    weights = Weights(SafetensorsSource([tmp_path / "w.safetensors"]), torch.bfloat16, CPU)
    stacked = weights.take_stacked(["a", "b"], [(2, 3), (4, 3)])
    assert torch.equal(stacked, torch.cat((first, second)).to(torch.bfloat16))
    weights.finish()


GGUF_CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=8,
    hidden_size=32,
    intermediate_size=32,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    context_length=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    tie_embeddings=True,
)


def write_gguf(path, tensors) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for name, (values, kind) in tensors.items():
        data = gguf.quantize(values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows as llama.cpp's converter lays them: 0, E/2, 1, E/2 + 1, ... within each head."""
    head_dim = weight.shape[0] // num_heads
    rows = np.arange(head_dim).reshape(2, -1).T.ravel()
    return np.concatenate([weight[h * head_dim + rows] for h in range(num_heads)])


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_only_llama_files_have_the_rows_of_q_and_k_put_back(tmp_path, architecture):
    from dataclasses import replace

    rng = np.random.default_rng(0)
    q = rng.standard_normal((32, 32), dtype=np.float32)
    k = rng.standard_normal((16, 32), dtype=np.float32)
    path = tmp_path / "m.gguf"
    f32 = gguf.GGMLQuantizationType.F32
    swap = interleaved if architecture == "LlamaForCausalLM" else lambda weight, _: weight
    write_gguf(
        path,
        {
            "blk.0.attn_q.weight": (swap(q, 4), f32),
            "blk.0.attn_k.weight": (swap(k, 2), f32),
            "blk.0.attn_v.weight": (k, f32),
            "blk.0.attn_q.bias": (swap(q[:, 0], 4), f32),
        },
    )
    source = GgufSource([path], replace(GGUF_CONFIG, architecture=architecture))
    name = "model.layers.0.self_attn."
    assert torch.equal(source.read(name + "q_proj.weight"), torch.from_numpy(q))
    assert torch.equal(source.read(name + "k_proj.weight"), torch.from_numpy(k))
    assert torch.equal(source.read(name + "v_proj.weight"), torch.from_numpy(k))
    assert torch.equal(source.read(name + "q_proj.bias"), torch.from_numpy(q[:, 0].copy()))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_quantised_tensors_come_back_near_what_was_stored(tmp_path, kind):
    values = np.random.default_rng(0).standard_normal((8, 64), dtype=np.float32)
    write_gguf(tmp_path / "m.gguf", {"output.weight": (values, gguf.GGMLQuantizationType[kind])})
    read = GgufSource([tmp_path / "m.gguf"], GGUF_CONFIG).read("lm_head.weight")
    assert read.dtype == torch.float32
    cosine = torch.nn.functional.cosine_similarity(
        read.flatten(), torch.from_numpy(values).flatten(), dim=0
    )
    assert cosine.item() > 0.99


def test_a_quantisation_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    values = np.zeros((8, 64), dtype=np.float32)
    write_gguf(tmp_path / "m.gguf", {"output.weight": (values, gguf.GGMLQuantizationType.Q8_0)})
    source = GgufSource([tmp_path / "m.gguf"], GGUF_CONFIG)
    source._tensors["lm_head.weight"] = source._tensors["lm_head.weight"]._replace(
        tensor_type=gguf.GGMLQuantizationType.Q8_1
    )
    with pytest.raises(ModelError, match=r"output\.weight is quantised as Q8_1"):
        source.read("lm_head.weight")


def test_gguf_names_become_hugging_face_names():
    assert hugging_face_name("blk.12.ffn_down.weight") == "model.layers.12.mlp.down_proj.weight"
    assert hugging_face_name("output.weight") == "lm_head.weight"
    assert hugging_face_name("blk.0.unheard_of.weight") == "blk.0.unheard_of.weight"
    with_index = json.dumps([hugging_face_name("blk.3.attn_q_norm.weight")])
    assert "model.layers.3.self_attn.q_norm.weight" in with_index
