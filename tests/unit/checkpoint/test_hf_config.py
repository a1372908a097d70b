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
    assert config.layer_windows == ()


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
        ("Qwen3MoeForCausalLM", {"sliding_window": 64, "use_sliding_window": True}, 64),
        ("Phi3ForCausalLM", {"sliding_window": 64}, 64),
        ("Phi3ForCausalLM", {}, None),
    ],
)
def test_a_sliding_window_counts_where_it_is_used_and_smaller_than_the_context(
    llama_config: dict[str, Any], name: str, more: dict[str, Any], window: int | None
) -> None:
    config = hf_config(PATH, {**llama_config, "architectures": [name], **more})
    assert config.layer_windows == (() if window is None else (window, window))


def test_the_model_type_serves_where_no_architecture_is_named(
    llama_config: dict[str, Any],
) -> None:
    del llama_config["architectures"]
    llama_config["model_type"] = "qwen2"
    assert hf_config(PATH, llama_config).architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*supported are Llama"),
        ({"architectures": ["Gemma3nForCausalLM"]}, "Gemma3nForCausalLM.*supported are Llama"),
        ({"architectures": ["BertModel"]}, "not a text generation model"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "not a text generation model"),
        ({"architectures": "LlamaForCausalLM"}, "not a list"),
        ({"vision_config": {}}, "vision"),
        ({"quantization_config": {"quant_method": "hqq"}}, "hqq.*GGUF"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 4.0}}, "mrope.*yarn, longrope and dyn"),
        ({"rope_scaling": {"type": "linear"}}, "factor of rope_scaling is missing"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differs between layers"),
        ({"partial_rotary_factor": 0.5}, "over 0.5 of a head"),
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
                "layer_types": ["full_attention", "chunked_attention"],
            },
            "layers of kind 'chunked_attention'",
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


def windows(theirs: Any) -> list[int | None]:
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * theirs.num_hidden_layers
    window = theirs.sliding_window
    if window is None or window >= theirs.max_position_embeddings:
        return []
    return [window if kind == "sliding_attention" else None for kind in kinds]


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("name", ["Gemma", "Gemma2", "Gemma3", "Phi3", "GptOss", "SmolLM3", "Olmo2",
                                  "Olmo3", "Granite"])  # fmt: skip
def test_defaults_of_families_are_those_of_transformers(
    tmp_path: Path, name: str, small: bool
) -> None:
    """As it writes them all, and, ``small``, where the file names little but sizes."""
    transformers = pytest.importorskip("transformers")
    from batchradix.checkpoint.json_file import read_json

    kind = "Gemma3Text" if name == "Gemma3" else name
    theirs = getattr(transformers, f"{kind}Config")(architectures=[f"{name}ForCausalLM"])
    theirs.save_pretrained(tmp_path)
    config = read_json(tmp_path / "config.json")
    if small:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
        config = {key: config[key] for key in (*sizes, "num_attention_heads", "architectures")}
    ours = hf_config(tmp_path / "config.json", config)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (
        getattr(theirs, "head_dim", None) or theirs.hidden_size // ours.num_heads
    )
    assert ours.context_length == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    if name in ("Gemma2", "Gemma3", "Phi3", "GptOss", "Olmo3"):
        assert list(ours.layer_windows) == windows(theirs)
    ropes = theirs.rope_parameters
    of_full = ropes.get("full_attention", ropes)
    assert ours.rope.theta == of_full["rope_theta"]
    assert ours.rope.kind == of_full["rope_type"]
    if "sliding_attention" in ropes:
        local = {rope.theta for rope in ours.layer_ropes if rope is not None}
        assert local == {ours.rope.theta, ropes["sliding_attention"]["rope_theta"]}
    if name == "GptOss":
        assert (ours.moe.num_experts, ours.moe.num_experts_per_token) == (128, 4)
        assert ours.attention_bias
    if name == "SmolLM3":
        assert [int(rope is not None) for rope in ours.layer_ropes] == theirs.no_rope_layers
    if name.startswith("Gemma"):
        assert ours.activation == "gelu_tanh"
        assert ours.embedding_scale == theirs.hidden_size**0.5
    if name in ("Gemma2", "Gemma3"):
        assert ours.logit_softcap == theirs.final_logit_softcapping
        assert ours.attention_scale == theirs.query_pre_attn_scalar**-0.5


def test_the_text_part_of_a_gemma_that_sees_may_say_little(tmp_path: Path) -> None:
    """As in the published ones."""
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152},
    }
    ours = hf_config(PATH, config)
    assert ours.text_part
    assert (ours.vocab_size, ours.num_heads, ours.num_kv_heads, ours.head_dim) == (
        262208,
        8,
        4,
        256,
    )
    assert ours.layer_windows[:7] == (1024,) * 5 + (None, 1024)
    assert ours.rope == RopeConfig(theta=1e6, kind="linear", factor=8.0)
    assert ours.layer_ropes[:6] == (RopeConfig(theta=1e4),) * 5 + (ours.rope,)
    assert ours.context_length == 131072


@pytest.mark.parametrize(
    ("more", "context_length"),
    [
        ({"rope_type": "dynamic", "factor": 4.0}, 512),
        ({"rope_type": "linear", "factor": 4.0}, 128),
        ({"rope_type": "yarn", "factor": 4.0}, 128),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128}, 1024),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0, 2.0],
                "long_factor": [4.0, 8.0],
                "original_max_position_embeddings": 64,
            },
            64,
        ),
    ],
)
def test_the_context_is_as_long_as_the_rotation_goes(
    llama_config: dict[str, Any], more: dict[str, Any], context_length: int
) -> None:
    ours = hf_config(PATH, {**llama_config, "rope_scaling": more})
    assert ours.context_length == context_length


def test_an_integer_too_long_for_python_is_refused_by_name(tmp_path: Path) -> None:
    from batchradix.checkpoint.json_file import read_json

    (tmp_path / "config.json").write_text('{"vocab_size": ' + "1" * 5000 + "}")
    with pytest.raises(ModelError, match=r"config\.json holds an integer that is too long"):
        read_json(tmp_path / "config.json")


def of_family(name: str, **more: Any) -> dict[str, Any]:
    return {"architectures": [f"{name}ForCausalLM"], **more}


DAMAGED = [
    ({"rope_scaling": []}, "rope_scaling is \\[\\], not an object"),
    ({"rope_scaling": ""}, "rope_scaling is '', not an object"),
    ({"rope_parameters": False}, "rope_parameters is False, not an object"),
    ({"rope_scaling": {"rope_type": 3}}, "rope_type of rope_scaling is 3"),
    (
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": "no"}},
        "truncate of rope_scaling is 'no'",
    ),
    (
        of_family("DeepseekV3", rope_scaling={"type": "yarn", "factor": 2.0, "mscale_all_dim": []}),
        "mscale_all_dim of rope_scaling is \\[\\]",
    ),
    (of_family("DeepseekV2", topk_method=[]), "topk_method is \\[\\], not a name"),
    (of_family("DeepseekV3", scoring_func=0), "scoring_func is 0, not a name"),
    ({"rms_norm_eps": 1e308}, "rms_norm_eps is too large"),
    ({"rms_norm_eps": 2}, "rms_norm_eps is 2, but must be 1 or less"),
    ({"hidden_act": 0}, "hidden_act is 0, not a name"),
    ({"architectures": ""}, "architectures is '', not a list"),
    (of_family("Qwen3Moe", mlp_only_layers=0), "mlp_only_layers is 0"),
    (of_family("Mistral", sliding_window="8"), "sliding_window is '8'"),
    (of_family("Mistral", sliding_window=0), "sliding_window is 0"),
    (of_family("Gemma2", hidden_activation="gelu"), "activation 'gelu' is not supported"),
    (of_family("Gemma2", layer_types=["sliding_attention"]), "layer_types does not name"),
    (of_family("Gemma2", layer_types=[[], {}]), "layers of kind \\[\\]"),
    (of_family("Gemma2", attn_logit_softcapping=[]), "attn_logit_softcapping is \\[\\]"),
    (of_family("Gemma2", final_logit_softcapping=0), "final_logit_softcapping is 0"),
    (of_family("Gemma3", use_bidirectional_attention=True), "sees later tokens"),
    (of_family("Gemma3", rope_parameters={"rope_theta": 1e4}), "does not say for full_attention"),
    (of_family("Gemma3", rope_parameters={"full_attention": 1}), "full_attention of rope_para"),
    (of_family("Phi3", partial_rotary_factor=0.75), "parts of heads of odd size 3"),
    (of_family("Phi3", partial_rotary_factor=2), "over 2 of a head"),
    (
        of_family("Phi3", rope_scaling={"type": "su", "short_factor": 1, "long_factor": [1.0]}),
        "short_factor of rope_scaling is 1, not a list",
    ),
    (
        of_family("Phi3", rope_scaling={"type": "su", "short_factor": [1.0], "long_factor": [1]}),
        "short_factor of rope_scaling has 1 numbers, but 4 elements",
    ),
    (of_family("SmolLM3", no_rope_layers=[1, []]), "no_rope_layers is not a list"),
    (of_family("SmolLM3", no_rope_layers={}), "no_rope_layers is not a list"),
    (of_family("Granite", logits_scaling=0), "logits_scaling is 0"),
    (of_family("GptOss", swiglu_limit="7"), "swiglu_limit is '7'"),
    (of_family("Llama", quantization_config={"quant_method": "mxfp4"}), "mxfp4 are not supported"),
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
