"""What a config.json says of experts and latent attention, its defaults, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchradix.checkpoint.hf_config import hf_config
from batchradix.checkpoint.model_config import MlaConfig, MoeConfig
from batchradix.checkpoint.stored_weights import StoredWeights
from batchradix.errors import ModelError

PATH = Path("model/config.json")
DEPLOYED = Path(__file__).parents[2] / "deployed"
ABSENT = object()


def read(name: str, **changes: Any) -> dict[str, Any]:
    config = json.loads((DEPLOYED / f"{name}.json").read_text()) | changes
    return {field: value for field, value in config.items() if value is not ABSENT}


def moe_of(name: str, **changes: Any) -> MoeConfig | None:
    return hf_config(PATH, read(name, **changes)).moe


def layers_of(name: str, **changes: Any) -> tuple[int, ...]:
    moe = moe_of(name, num_hidden_layers=6, **changes)
    return () if moe is None else moe.layers


def test_deepseek_v3_chooses_by_biased_sigmoids_within_its_best_groups() -> None:
    config = hf_config(PATH, read("deepseek-v3", num_hidden_layers=5))
    assert config.mla == MlaConfig(
        q_lora_rank=1536,
        kv_lora_rank=512,
        nope_dim=128,
        rope_dim=64,
        v_dim=128,
        rope_interleaved=True,
        scale=pytest.approx(0.135234, abs=1e-6),
    )
    assert config.moe == MoeConfig(
        layers=(3, 4),
        num_experts=256,
        num_experts_per_token=8,
        intermediate_size=2048,
        scoring="sigmoid",
        num_groups=8,
        num_groups_kept=4,
        group_score="best_two",
        correction_bias=True,
        normalise=True,
        scaling=2.5,
        float32_router=True,
        shared_intermediate_size=2048,
    )
    assert config.num_prediction_layers == 1
    assert config.stored == StoredWeights(layout="scaled", block=(128, 128))


def test_deepseek_v2_chooses_by_softmax_and_by_groups_where_it_says_so() -> None:
    whole, lite = moe_of("deepseek-v2"), moe_of("deepseek-v2-lite", n_group=8, topk_group=3)
    assert whole is not None
    assert lite is not None
    assert (whole.scoring, whole.num_groups, whole.num_groups_kept) == ("softmax", 8, 3)
    assert (whole.group_score, whole.normalise, whole.scaling) == ("best", False, 16.0)
    assert (lite.num_groups, lite.num_groups_kept) == (1, 1)  # greedy: groups do not count
    assert lite.shared_intermediate_size == 2 * 1408


def test_layers_with_experts_are_where_each_family_has_them() -> None:
    assert layers_of("deepseek-v3") == (3, 4, 5)
    assert layers_of("deepseek-v3", first_k_dense_replace=0, moe_layer_freq=2) == (0, 2, 4)
    assert layers_of("deepseek-v3", n_routed_experts=None) == ()
    assert layers_of("mixtral-8x7b") == (0, 1, 2, 3, 4, 5)
    assert layers_of("qwen1.5-moe-a2.7b", decoder_sparse_step=2) == (1, 3, 5)
    assert layers_of("qwen3-30b-a3b", mlp_only_layers=[0, 4]) == (1, 2, 3, 5)
    assert layers_of("qwen3-30b-a3b", num_experts=0) == ()


def test_absent_fields_mean_what_transformers_takes_them_for() -> None:
    names = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
             "n_group", "topk_group", "n_routed_experts", "n_shared_experts", "norm_topk_prob",
             "moe_intermediate_size", "num_experts_per_tok", "routed_scaling_factor",
             "first_k_dense_replace", "scoring_func", "topk_method", "moe_layer_freq")  # fmt: skip
    bare = read("deepseek-v3", **dict.fromkeys(names, ABSENT))
    assert hf_config(PATH, bare) == hf_config(PATH, read("deepseek-v3"))


def test_an_expert_that_all_take_is_there_only_where_the_config_has_one() -> None:
    for number in (0, None):
        moe = moe_of("deepseek-v3", n_shared_experts=number)
        assert moe is not None
        assert moe.shared_intermediate_size == 0


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ("deepseek-v2", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
        ("deepseek-v2", {"num_experts_per_tok": ABSENT}, "num_experts_per_tok is missing"),
        ("deepseek-v2", {"n_group": None}, "n_group is missing"),
        ("deepseek-v3", {"topk_method": "greedy"}, "topk_method 'greedy'"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ("deepseek-v3", {"n_group": 7}, "do not fit together"),
        ("deepseek-v3", {"topk_group": 9}, "do not fit together"),
        ("deepseek-v3", {"n_group": 256, "topk_group": 9}, "no best two"),
        ("deepseek-v3", {"num_experts_per_tok": 129}, "129 experts a token"),
        ("deepseek-v3", {"qk_rope_head_dim": 63}, "odd size 63"),
        ("deepseek-v3", {"first_k_dense_replace": 0.5}, "first_k_dense_replace"),
        ("deepseek-v3", {"architectures": ["DeepseekV32ForCausalLM"]}, "DeepseekV32ForCausalLM"),
        ("mixtral-8x7b", {"num_experts_per_tok": 9}, "9 experts a token"),
        ("qwen3-30b-a3b", {"mlp_only_layers": 3}, "mlp_only_layers"),
        (
            "deepseek-v3",
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
            r"weight_block_size is \[128\]",
        ),
        ("deepseek-v3", {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "e5m2"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(
    name: str, change: dict[str, Any], says: str
) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        hf_config(PATH, read(name, **change))
    assert str(PATH) in str(caught.value)
