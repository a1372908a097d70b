"""LoRA adapters as PEFT saves them: what they scale by, what names them, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from batchradix.checkpoint.adapter import Adapter, open_adapter
from batchradix.errors import ModelError

CONFIG = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 6,
    "target_modules": ["q_proj", "down_proj"],
    "bias": "none",
    "init_lora_weights": True,
    "base_model_name_or_path": "some/model",
}
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"


def matrices(rank: int, number: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    return np.full((rank, 8), number, np.float32), np.full((16, rank), number, np.float32)


def save(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray] | None = None) -> str:
    if tensors is None:
        tensors = {}
        for layer in (Q, DOWN):
            tensors[f"base_model.model.{layer}.lora_A.weight"] = matrices(4)[0]
            tensors[f"base_model.model.{layer}.lora_B.weight"] = matrices(4)[1]
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


@pytest.mark.parametrize(
    ("change", "scales"),
    [
        ({}, {Q: 1.5, DOWN: 1.5}),
        ({"use_rslora": True}, {Q: 6 / math.sqrt(4), DOWN: 6 / math.sqrt(4)}),
        ({"alpha_pattern": {"layers.0.mlp.down_proj": 2}}, {Q: 1.5, DOWN: 0.5}),
        ({"r": 9, "rank_pattern": {".*_proj": 4}}, {Q: 1.5, DOWN: 1.5}),
        ({"target_modules": r".*\.(q|down)_proj"}, {Q: 1.5, DOWN: 1.5}),
    ],
)
def test_each_layer_has_its_scale(
    tmp_path: Path, change: dict[str, Any], scales: dict[str, float]
) -> None:
    assert open_adapter(save(tmp_path, CONFIG | change)).scales == scales


def test_whole_tensors_stand_in_for_the_models(tmp_path: Path) -> None:
    tensors = {"base_model.model.lm_head.weight": np.zeros((4, 8), np.float32)}
    adapter = open_adapter(save(tmp_path, CONFIG | {"target_modules": None}, tensors))
    assert adapter.replaced == {"lm_head.weight"}
    assert Adapter.replacement_name("lm_head.weight") in tensors


def test_the_hash_is_of_what_decides_the_weights(tmp_path: Path) -> None:
    first = open_adapter(save(tmp_path / "a", CONFIG)).content_hash
    moved = CONFIG | {"base_model_name_or_path": "elsewhere", "r": 4, "inference_mode": True}
    assert open_adapter(save(tmp_path / "b", moved)).content_hash == first
    assert open_adapter(save(tmp_path / "c", CONFIG | {"lora_alpha": 7})).content_hash != first
    a, b = matrices(4, 0.25)
    tensors = {
        f"base_model.model.{layer}.lora_{side}.weight": values
        for layer in (Q, DOWN)
        for side, values in (("A", a), ("B", b))
    }
    assert open_adapter(save(tmp_path / "d", CONFIG, tensors)).content_hash != first


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"peft_type": "PREFIX_TUNING"}, "PREFIX_TUNING.*merge_and_unload"),
        ({"use_dora": True}, "use_dora.*merge_and_unload"),
        ({"bias": "lora_only"}, "bias 'lora_only'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4.*changed too"),
        ({"target_modules": ["q_proj", "o_proj"]}, "target o_proj, of which"),
        ({"r": 8}, "has rank 8, and its weights have 4"),
        ({"lora_alpha": "16"}, "alpha_pattern or its default is '16'"),
        ({"lora_alpha": 10**400}, "alpha_pattern or its default is 1000"),
        ({"rank_pattern": {"(": 2}}, "rank_pattern is"),
        ({"rank_pattern": [1]}, "rank_pattern is"),
    ],
)
def test_what_cannot_be_merged_is_refused(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    with pytest.raises(ModelError, match=says):
        open_adapter(save(tmp_path, CONFIG | change))


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({"base_model.model.a.lora_A.weight": 0}, "no a.lora_B.weight"),
        ({"base_model.model.a.lora_B.weight": 1}, "a.lora_B.weight has no lora_A"),
        ({"base_model.model.a.lora_embedding_A": 0}, "only LoRA of linear layers"),
        ({"a.lora_A.weight": 0, "a.lora_B.weight": 1}, "not named as PEFT does"),
        ({}, "holds no weights"),
    ],
)
def test_names_that_do_not_pair_are_refused(
    tmp_path: Path, names: dict[str, int], says: str
) -> None:
    tensors = {name: matrices(4)[side] for name, side in names.items()}
    with pytest.raises(ModelError, match=says):
        open_adapter(save(tmp_path, CONFIG | {"target_modules": None}, tensors))


@pytest.mark.parametrize("down", [(), (4,), (4, 8, 1), (3, 8)])
def test_matrices_that_do_not_fit_are_refused(tmp_path: Path, down: tuple[int, ...]) -> None:
    tensors = {
        f"base_model.model.{Q}.lora_A.weight": np.zeros(down, np.float32),
        f"base_model.model.{Q}.lora_B.weight": np.zeros((16, 4), np.float32),
    }
    with pytest.raises(ModelError, match=r"no model\.layers.*lora_B\.weight that fits"):
        open_adapter(save(tmp_path, CONFIG | {"target_modules": None}, tensors))


def test_folders_without_an_adapter_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no adapter_config\.json; give the folder"):
        open_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ModelError, match=r"no adapter_model\.safetensors; save"):
        open_adapter(tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelError, match=r"only adapter_model\.bin.*never opened"):
        open_adapter(tmp_path)
