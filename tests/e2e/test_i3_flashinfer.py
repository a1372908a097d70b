"""The engine with ``attention=flashinfer`` answers as transformers does row by row (I3), on a
stand-in for FlashInfer that keeps its contract in plain torch."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch_flashinfer

from batchradix.checkpoint.checkpoint import open_checkpoint
from batchradix.engine.attention import flashinfer_backend
from batchradix.engine.attention.flashinfer_backend import FlashInferAttention
from batchradix.engine.attention.flashinfer_mla import FlashInferMla

SHARED = "Answer from the text: seven red stones lie by the river. "
OTHER = "Answer from the text: green clouds. "
TEXTS = [SHARED + f"Q: where is stone {number}?" for number in range(12)]
TEXTS += [OTHER + f"Q: {number} clouds?" for number in range(8)]
TEXTS += [SHARED, SHARED + "And more", OTHER, OTHER + "Q: why?", "tea", "x", "x", "42"]


FEW_QUERIES_ON_HOPPER = ("fa2", 0)
CASCADE = ("cascade", 2)
SHARED_LEVEL = ("auto", 1)
OWN_LEVEL = ("auto", 0)


@pytest.mark.parametrize(
    ("family", "texts", "changes", "min_saved_slots", "wrapper"),
    [
        pytest.param("llama", TEXTS, {}, 1, SHARED_LEVEL, id="llama, all that can be shared"),
        pytest.param("llama", TEXTS[:12], {}, 1, CASCADE, id="llama, below one prefix"),
        pytest.param(
            *("llama", TEXTS, {}, 200, FEW_QUERIES_ON_HOPPER), id="llama, what is worth it, Hopper"
        ),
        pytest.param(
            *("mistral", TEXTS, {"prefix_cache": False}, 1, OWN_LEVEL), id="mistral, nothing shared"
        ),
        pytest.param(
            *("qwen3", TEXTS, {"prefill_tokens": 24, "batch_size": 3}, 1, SHARED_LEVEL),
            id="qwen3, in chunks",
        ),
        pytest.param(
            *("qwen2", TEXTS, {"kv_tokens": 160, "batch_size": 7}, 1, SHARED_LEVEL),
            id="qwen2, evicting",
        ),
    ],
)
def test_greedy_answers_are_those_of_each_row_alone(
    harness: ModuleType,
    i3: ModuleType,
    tiny_model_folder: Any,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    texts: list[str],
    changes: dict[str, Any],
    min_saved_slots: int,
    wrapper: tuple[str, int],
) -> None:
    torch_flashinfer.install(monkeypatch, min_saved_slots=min_saved_slots)
    if wrapper == FEW_QUERIES_ON_HOPPER:
        monkeypatch.setattr(flashinfer_backend, "capability", lambda device: (9, 0))
    attention = _answer_all(harness, i3, tiny_model_folder, family, texts, changes)
    assert isinstance(attention, FlashInferAttention)
    assert wrapper in attention._wrappers


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param("deepseek-v2", {}, id="v2, all that can be shared"),
        pytest.param("deepseek-v3", {"prefill_tokens": 24, "batch_size": 3}, id="v3, in chunks"),
        pytest.param("deepseek-v2-lite", {"kv_tokens": 160, "batch_size": 7}, id="lite, evicting"),
    ],
)
def test_with_latent_attention_too(
    harness: ModuleType,
    i3: ModuleType,
    tiny_model_folder: Any,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    changes: dict[str, Any],
) -> None:
    torch_flashinfer.install(monkeypatch)
    attention = _answer_all(harness, i3, tiny_model_folder, family, TEXTS, changes)
    assert isinstance(attention, FlashInferMla)
    assert len(attention._wrappers) > 1


def _answer_all(
    harness: ModuleType,
    i3: ModuleType,
    tiny_model_folder: Any,
    family: str,
    texts: list[str],
    changes: dict[str, Any],
) -> Any:
    """Holds every answer to transformers'; returns the backend that attended."""
    folder = tiny_model_folder("random", family=family, prepend_bos=False)
    checkpoint = open_checkpoint(str(folder))
    alone = i3.Alone.load(folder, checkpoint.tokenizer.eos_ids)
    oracle = [alone(list(text.encode()), 2 + number % 9) for number, text in enumerate(texts)]
    settings = harness.engine_settings(attention="flashinfer", **changes)
    engine = harness.make_engine(checkpoint, settings, poison=True)
    attention = engine._runner._attention
    prompts, max_tokens = zip(*((row.prompt, row.max_tokens) for row in oracle), strict=True)
    engine.submit(harness.make_job(prompts, max_tokens, prefix_cache=settings.prefix_cache))
    answers = {row: i3.Answer.of(done) for (_, row), done in harness.drain(engine).items()}
    i3.compare(oracle, answers, checkpoint.tokenizer.eos_ids, alone).check()
    engine.close()
    return attention
