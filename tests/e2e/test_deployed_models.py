"""The configs of models that are deployed (`tests/deployed`), whole as numbers and shrunken as
models whose logits are those of transformers; and what comes with their weights: FP8 blocks,
several files, layers that predict tokens further ahead."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from batchradix.checkpoint.hf_config import hf_config
from batchradix.checkpoint.model_config import ModelConfig
from batchradix.errors import ModelError

DEPLOYED = Path(__file__).parent.parent / "deployed"
NAMES = sorted(path.stem for path in DEPLOYED.glob("*.json"))
PROMPT = [3 + (7 * i * i + 5 * i) % 250 for i in range(90)]
CLASSES = {
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "kimi_k2": "DeepseekV3",
    "mixtral": "Mixtral",
    "qwen2_moe": "Qwen2Moe",
    "qwen3_moe": "Qwen3Moe",
}
SMALLER = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_attention_heads": 4,
    "head_dim": 16,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "max_position_embeddings": 2048,
    "bos_token_id": 257,
    "eos_token_id": 258,
}


def read(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((DEPLOYED / f"{name}.json").read_text())
    return config


def config_of(name: str) -> ModelConfig:
    return hf_config(DEPLOYED / f"{name}.json", read(name))


@pytest.mark.parametrize(
    ("name", "billions", "kv_elements", "expanded"),
    [
        ("deepseek-v2-lite", 15.7, 27 * 576, 27 * 16 * 320),
        ("deepseek-v2", 235.7, 60 * 576, 60 * 128 * 320),
        ("deepseek-v3", 671.0, 61 * 576, 61 * 128 * 320),
        ("moonlight-16b-a3b", 15.96, 27 * 576, 27 * 16 * 320),
        ("kimi-k2", 1026.4, 61 * 576, 61 * 64 * 320),
        ("mixtral-8x7b", 46.7, 2 * 32 * 8 * 128, 2 * 32 * 8 * 128),
        ("qwen1.5-moe-a2.7b", 14.3, 2 * 24 * 16 * 128, 2 * 24 * 16 * 128),
        ("qwen3-30b-a3b", 30.5, 2 * 48 * 4 * 128, 2 * 48 * 4 * 128),
    ],
)
def test_sizes_are_those_that_were_published(
    name: str, billions: float, kv_elements: int, expanded: int
) -> None:
    config = config_of(name)
    assert config.num_parameters == pytest.approx(billions * 1e9, rel=0.005)
    assert config.num_kv_elements_per_token == kv_elements
    assert config.num_expanded_kv_elements_per_token == expanded


@pytest.mark.parametrize(
    ("name", "factor", "mscale"),
    [
        ("deepseek-v2-lite", 40, 0.707),
        ("deepseek-v2", 40, 0.707),
        ("deepseek-v3", 40, 1.0),
        ("moonlight-16b-a3b", 1, 0.0),
        ("kimi-k2", 32, 1.0),
    ],
)
def test_scores_are_scaled_as_yarn_asks_and_rotated_parts_are_not(
    name: str, factor: float, mscale: float
) -> None:
    config = config_of(name)
    assert config.mla is not None
    sharper = 0.1 * mscale * math.log(factor) + 1
    assert config.mla.scale == pytest.approx(192**-0.5 * sharper**2)
    assert config.rope.amplitude == 1.0
    if name == "deepseek-v2-lite":
        assert config.mla.scale == pytest.approx(0.114721, abs=1e-6)


def shrunken(name: str) -> dict[str, Any]:
    """The same choices with few and small layers."""
    config = read(name)
    for field, value in SMALLER.items():
        if config.get(field) is not None:
            config[field] = value
    config["num_hidden_layers"] = config.get("first_k_dense_replace", 0) + 2
    config["num_key_value_heads"] = 2 if config["num_key_value_heads"] < 10 else 4
    for field in ("n_routed_experts", "num_experts", "num_local_experts"):
        if field in config:
            config[field] = max(8, 4 * config.get("n_group", 1))
    config["num_experts_per_tok"] = min(4, config["num_experts_per_tok"])
    if config.get("rope_scaling"):
        config["rope_scaling"]["original_max_position_embeddings"] = 40  # the prompt is longer
    config.pop("quantization_config", None)
    return config


def build(folder: Path, config: dict[str, Any]) -> Any:
    """A random model of the config, saved beside a config.json as it was published."""
    import transformers

    name = CLASSES[config["model_type"]]
    torch.manual_seed(sum(map(ord, json.dumps(config))))
    own = {field: value for field, value in config.items() if field != "model_type"}
    theirs = getattr(transformers, f"{name}Config")(**own)
    theirs.dtype = torch.float32
    model = getattr(transformers, f"{name}ForCausalLM")(theirs).float().eval()
    for path, weight in model.named_parameters():
        spread = 0.4 if "embed" in path or "lm_head" in path else 0.2
        weight.data.normal_(1 if "norm" in path else 0, spread)
    for path, buffer in model.named_buffers():
        if path.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.3)
    model.save_pretrained(folder, max_shard_size="300KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    (folder / "config.json").write_text(json.dumps(config))
    return model


def logits_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0, -1]
    return logits


@pytest.fixture
def folder(tmp_path: Path, tiny_model_folder: Any) -> Path:
    """With a tokenizer, for a model to be saved into."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder("markov"), folder)
    (folder / "model.safetensors").unlink()
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_shrunken_models_have_the_logits_of_transformers(
    folder: Path, first_logits: Callable[..., torch.Tensor], name: str
) -> None:
    model = build(folder, shrunken(name))
    assert (first_logits(folder, PROMPT) - logits_of(model)).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3", "qwen1.5-moe-a2.7b"])
def test_layers_in_8_bits_stay_near_the_others(
    folder: Path, first_logits: Callable[..., torch.Tensor], name: str
) -> None:
    build(folder, shrunken(name))
    exact = first_logits(folder, PROMPT)
    rounded = first_logits(folder, PROMPT, quantize="int8")
    assert 0 < (rounded - exact).norm() / exact.norm() < 0.1


def quantise(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 and the scales of its blocks, one block after the other."""
    rows, columns = (-(-size // block) for size in weight.shape)
    stored = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    scales = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            part = (
                slice(row * block, (row + 1) * block),
                slice(column * block, (column + 1) * block),
            )
            scales[row, column] = weight[part].abs().max() / 448
            stored[part] = (weight[part] / scales[row, column]).to(torch.float8_e4m3fn)
    return stored, scales


@pytest.fixture
def fp8_folder(folder: Path) -> tuple[Path, Any]:
    """A DeepSeek-V3 in FP8 as it was published but for blocks of 24, which no layer is a multiple
    of, with the weights of a prediction layer; and the transformers model of the same numbers."""
    config = shrunken("deepseek-v3")
    model = build(folder, config)
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    ours = model.state_dict()
    for name in [name for name in tensors if name.endswith(("_proj.weight", "with_mqa.weight"))]:
        stored, scales = quantise(tensors[name], 24)
        whole = scales.repeat_interleave(24, 0).repeat_interleave(24, 1)
        values = stored.float() * whole[: stored.shape[0], : stored.shape[1]]
        if name in ours:
            ours[name].copy_(values)
        else:  # transformers stacks experts
            block, expert, part = name.removesuffix(".weight").rsplit(".", 2)
            width = config["moe_intermediate_size"]
            stack = ours[f"{block}.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"]
            first = width if part == "up_proj" else 0
            target = stack[int(expert)]
            (target if part == "down_proj" else target[first : first + width]).copy_(values)
        tensors[name], tensors[f"{name}_scale_inv"] = stored, scales
    ahead = f"model.layers.{config['num_hidden_layers']}"
    tensors |= {
        f"{ahead}.eh_proj.weight": torch.full((64, 128), math.nan),
        f"{ahead}.shared_head.head.weight": torch.full((264, 64), math.nan),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fp8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
    config["quantization_config"] = fp8 | {"weight_block_size": [24, 24]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, model


def test_fp8_blocks_are_dequantised_and_prediction_layers_left_out(
    fp8_folder: tuple[Path, Any], first_logits: Callable[..., torch.Tensor]
) -> None:
    folder, model = fp8_folder
    assert (first_logits(folder, PROMPT) - logits_of(model)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t, name: t.pop(f"{name}_scale_inv"), "there is no .*o_proj.weight_scale_inv"),
        (
            lambda t, name: t.update({f"{name}_scale_inv": torch.ones(1, 1)}),
            r"_scale_inv has shape \[1, 1\]",
        ),
    ],
)
def test_fp8_without_fitting_scales_is_refused(
    fp8_folder: tuple[Path, Any],
    first_logits: Callable[..., torch.Tensor],
    change: Callable[[dict[str, torch.Tensor], str], object],
    says: str,
) -> None:
    folder, _ = fp8_folder
    tensors = load_file(folder / "model.safetensors")
    change(tensors, "model.layers.0.self_attn.o_proj.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=says):
        first_logits(folder, PROMPT)
