"""Layers in 8 bits: every family stays near float32, with channels as real models have them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

PROMPT = torch.arange(3, 90)
SIZES = {"hidden_size": 192, "intermediate_size": 512}
TIMES = 10


def enlarge_channels(model: transformers.PreTrainedModel) -> None:
    """Makes one channel of what goes into linear layers larger and its weights as much smaller,
    which leaves the model what it is."""
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            behind = {
                layer.input_layernorm: (attention.q_proj, attention.k_proj, attention.v_proj),
                layer.post_attention_layernorm: (mlp.gate_proj, mlp.up_proj),
            }
            for norm, projections in behind.items():
                norm.weight[5] *= TIMES
                for projection in projections:
                    projection.weight[:, 5] /= TIMES
            mlp.up_proj.weight[7] *= TIMES
            if mlp.up_proj.bias is not None:
                mlp.up_proj.bias[7] *= TIMES
            mlp.down_proj.weight[:, 7] /= TIMES


def error(lab, model: transformers.PreTrainedModel, folder: Path, dtype: str) -> float:
    """Of the logits, as a share of their length."""
    runner = lab.open_runner(lab.save_model(model, folder), dtype, quantize="int8")
    n = len(PROMPT)
    logits = lab.run(
        runner, PROMPT.tolist(), range(n), range(n), causal=[(0, n, 0, n)], logits=range(n)
    )
    runner.close()
    with torch.inference_mode():
        wanted = model(PROMPT[None]).logits[0]
    return float((logits - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "llama-biases", "qwen2", "qwen3-tied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_channels_far_larger_than_the_rest_cost_little(lab, tmp_path, kind, dtype):
    model = lab.build_model(kind, **SIZES)
    before = error(lab, model, tmp_path / "before", dtype)
    enlarge_channels(model)
    after = error(lab, model, tmp_path / "after", dtype)
    assert before < 0.12  # random models make much of small differences
    assert after < 1.6 * before
