"""The checkpoints of `tests/conftest.py` do what they promise, through the front door."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchradix.api import LLM
from batchradix.config import EngineOptions, SamplingOptions
from batchradix.types import FinishReason, Result


def answer(
    folder: Path, prompts: Any, *, max_tokens: int = 8, dtype: Any = "float32"
) -> list[Result]:
    with LLM(str(folder), engine=EngineOptions(dtype=dtype, num_threads=1)) as llm:
        return llm.generate(prompts, sampling=SamplingOptions(max_tokens=max_tokens))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_const_model_always_wants_its_preferred_byte(tiny_model_folder: Any, dtype: str) -> None:
    folder = tiny_model_folder("const", prefer="za")
    for result in answer(folder, ["a", "something else"], dtype=dtype):
        assert result.text == "zzzzzzzz"
        assert result.finish_reason is FinishReason.LENGTH


def test_a_const_model_ranks_preferred_bytes_then_all_others_then_the_ends(
    tiny_model_folder: Any,
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = tiny_model_folder("const", prefer="za")
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        with torch.inference_mode():
            logits = model(torch.tensor([[257, 65, 66]])).logits[0]
        for scores in logits.float():
            order = scores.argsort(descending=True).tolist()
            others = [byte for byte in range(256) if byte not in b"za"]
            assert order[:256] == [ord("z"), ord("a"), *others]
            assert order[-2:] == [258, 263]
            assert len(set(scores.tolist())) == 264


def test_a_markov_model_counts_through_letters_and_digits(tiny_model_folder: Any) -> None:
    folder = tiny_model_folder("markov")
    results = answer(folder, ["x", "7", "Y", "?"])
    assert [result.text for result in results] == ["yzabcdef", "89012345", "ZABCDEFG", ""]
    assert results[3].finish_reason is FinishReason.STOP
    assert results[3].completion_tokens == 1


def test_a_markov_model_says_its_text_to_a_chat_and_stops(tiny_model_folder: Any) -> None:
    folder = tiny_model_folder("markov", text="[7,25]")
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]
    (result,) = answer(folder, [chat], max_tokens=50)
    assert result.text == "[7,25]"
    assert result.finish_reason is FinishReason.STOP
    # <bos>, two turns between their role and <|end|>, <|assistant|>
    assert result.prompt_tokens == 1 + (2 + len("Be brief.")) + (2 + len("Hello?")) + 1


def test_a_template_without_a_system_role_makes_such_a_chat_an_error(
    tiny_model_folder: Any,
) -> None:
    folder = tiny_model_folder("markov", system_role=False)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]
    refused, answered = answer(folder, [chat, chat[1:]])
    assert refused.error is not None
    assert "System role not supported" in refused.error.message
    assert answered.text == "abcdefgh"


@pytest.mark.parametrize("prepend_bos", [True, False])
def test_a_raw_prompt_begins_with_bos_where_the_tokenizer_says_so(
    tiny_model_folder: Any, prepend_bos: bool
) -> None:
    folder = tiny_model_folder("const", prefer="a", prepend_bos=prepend_bos)
    (result,) = answer(folder, ["four"])
    assert result.prompt_tokens == 4 + prepend_bos


def test_the_same_call_gives_the_same_folder(tiny_model_folder: Any) -> None:
    assert tiny_model_folder("const", prefer="a") == tiny_model_folder("const", prefer="a")
    assert tiny_model_folder("const", prefer="a") != tiny_model_folder("const", prefer="b")
