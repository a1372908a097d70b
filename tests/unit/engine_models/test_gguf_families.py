"""Gemma and Phi-3 as GGUF, written as llama.cpp's converter does, give what transformers gives."""

from __future__ import annotations

import math
from dataclasses import replace

import gguf
import pytest
import torch

from batchradix.checkpoint.checkpoint import open_checkpoint
from batchradix.errors import ModelError

PROMPT = list(range(3, 60))
PHI3 = {
    "hidden_size": 64,
    "sliding_window": 20,
    "original_max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.75,
        "short_factor": [1.0, 1.3, 1.5, 2.0, 2.2, 3.0],
        "long_factor": [9.0] * 6,
    },
}
GEMMA3 = {  # with enough layers for one that does not slide
    "num_hidden_layers": 7,
    "layer_types": None,
    "query_pre_attn_scalar": 16,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
MODELS = {
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3", GEMMA3),
    "phi3": ("phi3-partial-longrope", PHI3),
}


def metadata(arch: str, config) -> dict[str, object]:
    found: dict[str, object] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    if arch.startswith("gemma"):
        found |= {"attention.key_length": 16, "attention.value_length": 16}
    if arch != "gemma":
        found["attention.sliding_window"] = config.sliding_window
    if arch == "gemma2":
        found["attn_logit_softcapping"] = config.attn_logit_softcapping
        found["final_logit_softcapping"] = config.final_logit_softcapping
    if arch == "gemma3":
        found["rope.freq_base"] = 5e4
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    if arch == "phi3":
        found["rope.dimension_count"] = 12
        found["rope.scaling.original_context_length"] = 256
        found["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(2) / math.log(256))
    return found


def write(path, arch: str, model, changes: dict[str, object] | None = None) -> None:
    writer = gguf.GGUFWriter(path, arch)
    values = metadata(arch, model.config) | (changes or {})
    values = {f"{arch}.{key}": value for key, value in values.items()}
    values |= {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [chr(33 + i) for i in range(97)],
        "tokenizer.ggml.scores": [0.0] * 97,
        "tokenizer.ggml.token_type": [1] * 97,
        "tokenizer.ggml.add_space_prefix": False,
    }
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
              str: writer.add_string, list: writer.add_array}  # fmt: skip
    for key, value in values.items():
        adders[type(value)](key, value)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[arch], model.config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if name.endswith("norm.weight") and arch.startswith("gemma"):
            tensor = tensor + 1
        theirs = names.get_name(name, try_suffixes=(".weight",))
        assert theirs is not None, name
        writer.add_tensor(theirs, tensor.contiguous().numpy())
    if arch == "phi3":
        for which in ("short", "long"):
            factors = torch.tensor(model.config.rope_parameters[f"{which}_factor"]).numpy()
            writer.add_tensor(f"rope_factors_{which}.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("arch", MODELS)
def test_a_gguf_file_gives_the_logits_of_transformers(lab, tmp_path, arch):
    kind, changes = MODELS[arch]
    model = lab.build_model(kind, **changes)
    write(tmp_path / "m.gguf", arch, model)
    runner = lab.open_runner(tmp_path / "m.gguf")
    n = len(PROMPT)
    logits = lab.run(runner, PROMPT, range(n), range(n), causal=[(0, n, 0, n)], logits=range(n))
    runner.close()
    with torch.inference_mode():
        wanted = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)


def test_a_safetensors_folder_and_a_gguf_file_of_a_model_are_one_config(lab, tmp_path):
    for arch, (kind, changes) in MODELS.items():
        model = lab.build_model(kind, **changes)
        folder = lab.save_model(model, tmp_path / arch)
        write(tmp_path / f"{arch}.gguf", arch, model)
        theirs = open_checkpoint(str(folder)).config
        ours = open_checkpoint(str(tmp_path / f"{arch}.gguf")).config
        if arch.startswith("gemma"):
            theirs = replace(theirs, norm_offset=0.0)
        assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps, rel=1e-6)
        assert ours.rope.amplitude == pytest.approx(theirs.rope.amplitude, rel=1e-6)
        assert ours.rope.divisors == pytest.approx(theirs.rope.divisors, rel=1e-6)
        for side in (ours, theirs):
            assert side.attention_scale is None or side.attention_scale == 16**-0.5
        assert near(ours) == near(theirs)


def near(config):
    """Without what is rounded to float32 in one of two files, and with scale in one spelling."""
    rope = replace(config.rope, amplitude=1.0, divisors=())
    return replace(
        config,
        rms_norm_eps=1.0,
        rope=rope,
        attention_scale=None,
        attention_softcap=config.attention_softcap and round(config.attention_softcap, 5),
        logit_softcap=config.logit_softcap and round(config.logit_softcap, 5),
    )


def test_the_largest_gemmas_divide_scores_by_the_hidden_size_a_head(lab, tmp_path):
    """Which their files do not say."""
    model = lab.build_model("gemma2", query_pre_attn_scalar=16, hidden_size=48)
    write(tmp_path / "m.gguf", "gemma2", model, {"block_count": 46})
    assert open_checkpoint(str(tmp_path / "m.gguf")).config.attention_scale == 12**-0.5


def test_another_rotary_scaling_is_refused(lab, tmp_path):
    model = lab.build_model("gemma3", **GEMMA3)
    write(tmp_path / "m.gguf", "gemma3", model, {"rope.scaling.type": "yarn"})
    with pytest.raises(ModelError, match="rotary scaling 'yarn' is not supported as GGUF"):
        open_checkpoint(str(tmp_path / "m.gguf"))
