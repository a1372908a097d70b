from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchradix.checkpoint.hf_config import hf_config
from batchradix.checkpoint.hf_fields import Fields
from batchradix.checkpoint.model_config import RopeConfig
from batchradix.errors import ModelError

PATH = Path("model/config.json")
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_a_llama_is_read_with_its_defaults(llama_config: dict[str, Any]) -> None:
    config = hf_config(PATH, llama_config)
    assert config.architecture == "LlamaForCausalLM"
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 4)
    assert config.context_length == 128
    assert config.rope == RopeConfig(theta=10000.0)
    assert config.tie_embeddings
    flags = (config.attention_bias, config.output_bias, config.mlp_bias, config.qk_norm)
    assert flags == (False, False, False, False)
    assert config.sliding_window is None


def test_absent_and_null_fields_mean_what_transformers_takes_them_for(
    llama_config: dict[str, Any],
) -> None:
    del llama_config["num_key_value_heads"], llama_config["rope_theta"]
    del llama_config["tie_word_embeddings"], llama_config["max_position_embeddings"]
    llama_config.update(head_dim=None, rope_scaling=None)
    config = hf_config(PATH, llama_config)
    assert config.num_kv_heads == 4
    assert config.head_dim == 4
    assert not config.tie_embeddings
    assert config.context_length == 2048
    assert config.rope.theta == 10000.0


def test_head_dim_need_not_be_a_share_of_the_hidden_size(llama_config: dict[str, Any]) -> None:
    assert hf_config(PATH, {**llama_config, "head_dim": 32}).head_dim == 32


@pytest.mark.parametrize("kind_key", ["type", "rope_type"])
def test_both_spellings_of_rotary_scaling_give_the_same(
    llama_config: dict[str, Any], kind_key: str
) -> None:
    del llama_config["rope_theta"]
    old = {**llama_config, "rope_theta": 5e5, "rope_scaling": {kind_key: "llama3", **LLAMA3}}
    new = {**llama_config, "rope_parameters": {kind_key: "llama3", "rope_theta": 5e5, **LLAMA3}}
    assert hf_config(PATH, old) == hf_config(PATH, new)
    assert hf_config(PATH, new).rope == RopeConfig(
        theta=5e5,
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_context_length=8192,
    )


def test_linear_scaling_keeps_its_factor(llama_config: dict[str, Any]) -> None:
    config = hf_config(PATH, {**llama_config, "rope_scaling": {"type": "linear", "factor": 2}})
    assert (config.rope.kind, config.rope.factor) == ("linear", 2.0)


def test_biases_are_where_each_family_has_them(llama_config: dict[str, Any]) -> None:
    def biases(name: str, **more: Any) -> tuple[bool, bool, bool, bool]:
        c = hf_config(PATH, {**llama_config, "architectures": [name], **more})
        return c.attention_bias, c.output_bias, c.mlp_bias, c.qk_norm

    both = {"attention_bias": True, "mlp_bias": True}
    assert biases("LlamaForCausalLM", **both) == (True, True, True, False)
    assert biases("MistralForCausalLM") == (False, False, False, False)
    assert biases("Qwen2ForCausalLM") == (True, False, False, False)
    assert biases("Qwen3ForCausalLM") == (False, False, False, True)
    assert biases("Qwen3ForCausalLM", attention_bias=True) == (True, True, False, True)


def test_qwen3_has_heads_of_128_unless_it_says_otherwise(llama_config: dict[str, Any]) -> None:
    assert hf_config(PATH, {**llama_config, "architectures": ["Qwen3ForCausalLM"]}).head_dim == 128


@pytest.mark.parametrize(
    ("name", "more", "window"),
    [
        ("MistralForCausalLM", {"sliding_window": 64}, 64),
        ("MistralForCausalLM", {"sliding_window": 128}, None),
        ("MistralForCausalLM", {"sliding_window": None}, None),
        ("MistralForCausalLM", {}, None),
        ("LlamaForCausalLM", {"sliding_window": 64}, None),
        ("Qwen2ForCausalLM", {"sliding_window": 64, "use_sliding_window": False}, None),
        ("Qwen2ForCausalLM", {"sliding_window": 64}, None),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0},
            64,
        ),
        (
            "Qwen3ForCausalLM",
            {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2},
            None,
        ),
    ],
)
def test_a_sliding_window_counts_where_it_is_used_and_smaller_than_the_context(
    llama_config: dict[str, Any], name: str, more: dict[str, Any], window: int | None
) -> None:
    config = hf_config(PATH, {**llama_config, "architectures": [name], **more})
    assert config.sliding_window == window


def test_the_model_type_serves_where_no_architecture_is_named(
    llama_config: dict[str, Any],
) -> None:
    del llama_config["architectures"]
    llama_config["model_type"] = "qwen2"
    assert hf_config(PATH, llama_config).architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM.*supported are Llama"),
        ({"architectures": ["BertModel"]}, "not a text generation model"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "not a text generation model"),
        ({"architectures": "LlamaForCausalLM"}, "not a list"),
        ({"vision_config": {}}, "vision"),
        ({"quantization_config": {"quant_method": "hqq"}}, "hqq.*GGUF"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic.*yarn"),
        ({"rope_scaling": {"type": "linear"}}, "factor of rope_scaling is missing"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differs between layers"),
        ({"partial_rotary_factor": 0.5}, "part of a head"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "16"}, "hidden_size is '16'"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"num_hidden_layers": 1.5}, "num_hidden_layers"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"head_dim": 3}, "odd"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 64,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            "some layers only",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(
    llama_config: dict[str, Any], change: dict[str, Any], says: str
) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        hf_config(PATH, {**llama_config, **change})
    assert str(PATH) in str(caught.value)


def test_configurations_that_transformers_writes_are_read_the_same(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from batchradix.checkpoint.json_file import read_json

    small = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3"):
        theirs = getattr(transformers, f"{name}Config")(
            **small, num_key_value_heads=2, architectures=[f"{name}ForCausalLM"]
        )
        theirs.save_pretrained(tmp_path)
        ours = hf_config(tmp_path / "config.json", read_json(tmp_path / "config.json"))
        assert ours.architecture == f"{name}ForCausalLM"
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or 8)
        assert ours.context_length == theirs.max_position_embeddings
        assert ours.rms_norm_eps == theirs.rms_norm_eps
        assert ours.tie_embeddings == theirs.tie_word_embeddings
        assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
        assert ours.num_kv_heads == theirs.num_key_value_heads


def test_an_integer_too_long_for_python_is_refused_by_name(tmp_path: Path) -> None:
    from batchradix.checkpoint.json_file import read_json

    (tmp_path / "config.json").write_text('{"vocab_size": ' + "1" * 5000 + "}")
    with pytest.raises(ModelError, match=r"config\.json holds an integer that is too long"):
        read_json(tmp_path / "config.json")


DAMAGED = [
    ({"num_hidden_layers": 10**12}, "num_hidden_layers is .* 10,000 or less"),
    ({"num_hidden_layers": 10**400}, "num_hidden_layers is too large"),
    ({"hidden_size": 1e308}, "hidden_size is too large"),
    ({"max_position_embeddings": 10**30}, "max_position_embeddings is too large"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": "fast"}}, "beta_fast"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_slow": -1}}, "beta_slow"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": float("nan")}}, "beta_fast"),
    ({"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_theta above 1"),
    (
        {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 0.5}},
        "original_max_position_embeddings of at least 1",
    ),
]


@pytest.mark.parametrize(("changes", "says"), DAMAGED)
def test_a_damaged_number_is_refused_in_one_sentence(
    llama_config: dict[str, Any], changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ModelError, match=says):
        hf_config(PATH, llama_config | changes)


def test_counts_may_be_null_or_none_and_no_less() -> None:
    fields = Fields(PATH, {"null": None, "zero": 0, "less": -1, "more": 3})
    assert [fields.count(name, 7) for name in ("null", "absent", "zero", "more")] == [7, 7, 0, 3]
    assert fields.count("null", 0) == 0
    with pytest.raises(ModelError, match="less is -1, but must be 0 or more"):
        fields.count("less", 0)
    with pytest.raises(ModelError, match="more is 3, but must be 2 or less"):
        fields.count("more", 0, most=2)


@pytest.mark.parametrize("layers", [None, "x", [], {}])
def test_layers_whose_attention_slides_are_counted(
    llama_config: dict[str, Any], layers: Any
) -> None:
    config = llama_config | {
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": layers,
    }
    if layers is None:
        hf_config(PATH, config)  # 28 layers see everything, which are more than there are
        return
    with pytest.raises(ModelError, match="max_window_layers"):
        hf_config(PATH, config)
