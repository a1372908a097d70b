"""Latent attention and experts in Triton answer as transformers does row by row (I3)."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import pytest

from batchradix.checkpoint.checkpoint import open_checkpoint
from batchradix.engine.attention import registry
from batchradix.engine.attention.mla_triton import TritonMla
from batchradix.engine.attention.triton_backend import TritonAttention
from batchradix.engine.layers.moe import GroupedExperts

SHARED = "Answer from the text: seven red stones lie by the river. "
TEXTS = [SHARED, SHARED + "Q: where?", SHARED + "Q: what?", SHARED + "And more", "tea", "x"]


def check(
    harness: ModuleType, i3: ModuleType, folder: Any, attention: type, **changes: Any
) -> None:
    checkpoint = open_checkpoint(str(folder))
    alone = i3.Alone.load(folder, checkpoint.tokenizer.eos_ids)
    oracle = [alone(list(text.encode()), 2 + number % 3) for number, text in enumerate(TEXTS)]
    settings = harness.engine_settings(attention="triton", **changes)
    engine = harness.make_engine(checkpoint, settings, poison=True)
    assert isinstance(engine._runner._attention, attention)
    engine.submit(
        harness.make_job([row.prompt for row in oracle], [row.max_tokens for row in oracle])
    )
    answers = {row: i3.Answer.of(done) for (_, row), done in harness.drain(engine).items()}
    i3.compare(oracle, answers, checkpoint.tokenizer.eos_ids, alone).check()
    engine.close()


@pytest.mark.parametrize(
    ("family", "form", "changes"),
    [
        pytest.param("deepseek-v2", None, {}, id="v2, batched"),
        pytest.param(
            "deepseek-v3", None, {"prefill_tokens": 24, "batch_size": 3}, id="v3, in chunks"
        ),
        pytest.param(
            "deepseek-v2-lite", "absorbed", {"kv_tokens": 90}, id="v2-lite, absorbed, evicting"
        ),
        pytest.param("deepseek-v3-plain", "expanded", {}, id="v3, expanded"),
    ],
)
def test_latents_are_attended_to_and_experts_computed_in_triton(
    harness: ModuleType,
    i3: ModuleType,
    tiny_model_folder: Any,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    form: Any,
    changes: dict[str, Any],
) -> None:
    backend = partial(TritonMla, form=form, max_expanded=40 * 4 * 48)  # 40 slots at a time
    monkeypatch.setitem(registry.MLA_BACKENDS, "triton", backend)
    folder = tiny_model_folder("random", family=family, prepend_bos=False)
    check(harness, i3, folder, TritonMla, **changes)


def test_experts_behind_other_attention_are_computed_in_triton(
    harness: ModuleType,
    i3: ModuleType,
    tiny_model_folder: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    plain = GroupedExperts.__call__
    monkeypatch.setattr(GroupedExperts, "__call__", lambda *given: calls.append(1) or plain(*given))
    folder = tiny_model_folder("random", family="qwen2-moe", prepend_bos=False)
    check(harness, i3, folder, TritonAttention)
    assert calls
