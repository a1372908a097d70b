"""Each thing that a family does otherwise than a Llama is seen when it is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from batchradix.checkpoint.checkpoint import open_checkpoint
from batchradix.checkpoint.model_config import ClampedSwiglu, RopeConfig
from batchradix.engine.model_runner import ModelRunner

PROMPT = [int(i) for i in torch.randint(3, 97, (37,), generator=torch.Generator().manual_seed(3))]


def logits_with(lab, folder, **changes):
    """Logits [V] behind the prompt, of the checkpoint with parts of its config changed."""
    checkpoint = open_checkpoint(str(folder))
    checkpoint = replace(checkpoint, config=replace(checkpoint.config, **changes))
    runner = ModelRunner(checkpoint, lab.settings())
    n = len(PROMPT)
    logits = lab.run(runner, PROMPT, range(n), range(n), causal=[(0, n, 0, n)], logits=[n - 1])
    runner.close()
    return logits[0]


def without(moe):
    return replace(moe, clamped=ClampedSwiglu(1.702, 100.0))


@pytest.mark.parametrize(
    ("kind", "part", "instead"),
    [
        ("mistral-sliding", "layer_windows", ()),
        ("mistral-sliding", "layer_windows", (6, 6, 6)),
        ("qwen2-sliding", "layer_windows", (5, 5, 5)),
        ("gemma2", "layer_windows", ()),
        ("gemma2", "attention_softcap", None),
        ("gemma2", "logit_softcap", None),
        ("gemma2", "attention_scale", None),
        ("gemma2", "embedding_scale", 1.0),
        ("gemma2", "activation", "silu"),
        ("gemma2", "norm_offset", 0.0),
        ("gemma3", "layer_windows", ()),
        ("gemma3", "layer_ropes", ()),
        ("gemma3-capped", "logit_softcap", None),
        ("phi3-sliding", "layer_windows", ()),
        ("phi3-sliding", "rms_norm_eps", 1e-5),
        ("phi3-partial-longrope", "rope", RopeConfig(rotated_dim=12)),
        ("gpt-oss", "layer_windows", ()),
        ("gpt-oss", "moe", without),
        ("smollm3", "layer_ropes", ()),
        ("smollm3-sliding", "layer_windows", ()),
        ("olmo3", "layer_ropes", ()),
        ("granite", "attention_scale", None),
        ("granite", "residual_scale", 1.0),
        ("granite", "logit_scale", 1.0),
    ],
)
def test_a_part_of_a_family_that_is_left_out_changes_what_comes_out(
    lab, saved, expected, kind, part, instead
):
    folder = saved(kind)[0]
    if callable(instead):
        instead = instead(open_checkpoint(str(folder)).config.moe)
    wrong = logits_with(lab, folder, **{part: instead})
    assert (wrong - expected(kind, PROMPT)[-1]).abs().max().item() > 1e-2


@pytest.mark.parametrize("kind", ["gemma3", "gpt-oss", "olmo2", "granite", "phi3-partial-longrope"])
def test_logits_of_few_tokens_are_those_of_all(lab, saved, expected, kind):
    import numpy as np

    runner = lab.open_runner(saved(kind)[0])
    n = len(PROMPT)
    lab.run(runner, PROMPT, range(n), range(n), causal=[(0, n, 0, n)], logits=[n - 1])
    few = runner.collect_few(np.array([0]), np.array([5, 90, 17]))
    runner.close()
    torch.testing.assert_close(few[0], expected(kind, PROMPT)[-1][[5, 90, 17]], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "kind", ["gemma", "gemma3", "phi3-partial-longrope", "gpt-oss", "smollm3", "olmo2", "granite"]
)
def test_weights_are_counted_as_transformers_has_them(saved, kind):
    folder, model = saved(kind)
    theirs = sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and not name.endswith("bias")
    )
    assert open_checkpoint(str(folder)).config.num_parameters == theirs


SIZES = {"hidden_size": 192, "intermediate_size": 512}
KINDS = ["gemma2", "gemma3", "phi3", "gpt-oss", "smollm3", "olmo3", "granite"]


def error(logits, wanted):
    """As a share of their length."""
    return float((logits.float() - wanted).norm() / wanted.norm())


def theirs(model):
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0]


def ours(lab, folder, dtype, quantize="off"):
    runner = lab.open_runner(folder, dtype, quantize=quantize)
    n = len(PROMPT)
    logits = lab.run(runner, PROMPT, range(n), range(n), causal=[(0, n, 0, n)], logits=range(n))
    runner.close()
    return logits


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_as_near_to_float32_as_that_of_transformers(lab, tmp_path, kind):
    model = lab.build_model(kind, **SIZES)
    wanted = theirs(model)
    logits = ours(lab, lab.save_model(model, tmp_path), "bfloat16")
    assert error(logits, wanted) < 1.3 * error(theirs(model.bfloat16()), wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_in_8_bits_stay_near_float32(lab, tmp_path, kind, dtype):
    """Random models make much of small differences; where the residual is small beside what layers
    add, and where experts are chosen, more."""
    model = lab.build_model(kind, **SIZES)
    logits = ours(lab, lab.save_model(model, tmp_path), dtype, "int8")
    assert error(logits, theirs(model)) < (0.25 if kind in ("gpt-oss", "granite") else 0.12)


def test_norms_of_gemma_keep_in_bfloat16_what_1_is_added_to(lab, tmp_path):
    """As transformers computes it: 1 + w is in float32, though the weights are bfloat16."""
    model = lab.build_model("gemma3").bfloat16()
    lab.save_model(model, tmp_path)
    runner = lab.open_runner(tmp_path, "bfloat16")
    norm = runner._model.layers[1].input_norm.weight
    theirs = model.model.layers[1].input_layernorm.weight
    assert norm.dtype == torch.float32
    assert torch.equal(norm, 1 + theirs.float())
    assert not torch.equal(norm, (1 + theirs).float())
    scale = runner._model.embedding.scale
    assert scale == float(model.model.embed_tokens.embed_scale.bfloat16())
    runner.close()
