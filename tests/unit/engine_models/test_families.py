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
