"""Dynamic scaling behind the original context: answers are those of transformers that goes on from
there token by token."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from batchradix.checkpoint.checkpoint import open_checkpoint

ORIGINAL = 32
TEXTS = [
    "The river and the lamp.",
    "The river and seven.",
    "A stone",
    "The river and the lamp are of stone, and the tea of seven rivers is cold.",
    "The river and the lamp are of stone, and the tea of seven lamps is not.",
    "x" * 90,
]
MAX_TOKENS = [40, 25, 60, 20, 20, 5]


class OneByOne:
    """A model of transformers that is given what stands behind the original context token by token,
    as it generates: a whole prompt it would rotate by its own length, which no prefix that prompts
    share could be. Its frequencies are those of its last call until it sees a short one."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, *, input_ids: Any, past_key_values: Any, **more: Any) -> Any:
        pieces = [input_ids]
        if past_key_values is None:
            first = input_ids[:, : ORIGINAL - 1]
            pieces = [first, *input_ids[:, ORIGINAL - 1 :].split(1, dim=1)]
        out = SimpleNamespace(past_key_values=past_key_values)
        for piece in pieces:
            if piece.shape[1]:
                out = self._model(input_ids=piece, past_key_values=out.past_key_values, **more)
        return out


@pytest.fixture(scope="module")
def model(tiny_model_folder: Any, i3: ModuleType) -> Any:
    folder = tiny_model_folder("random", family="llama-dynamic", prepend_bos=False)
    checkpoint = open_checkpoint(str(folder))
    alone = i3.Alone.load(folder, checkpoint.tokenizer.eos_ids)
    return SimpleNamespace(
        checkpoint=checkpoint,
        alone=i3.Alone(OneByOne(alone._model), checkpoint.tokenizer.eos_ids),
        plain=alone,
    )


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="batched"),
        pytest.param({"prefill_tokens": 7, "batch_size": 2}, id="prefill in small chunks"),
    ],
)
def test_rows_go_on_behind_the_original_context(
    harness: ModuleType, i3: ModuleType, model: Any, changes: dict[str, Any]
) -> None:
    prompts = [list(text.encode()) for text in TEXTS]
    oracle = [model.alone(prompt, n) for prompt, n in zip(prompts, MAX_TOKENS, strict=True)]
    assert sum(len(row.prompt) + len(row.ids) > ORIGINAL for row in oracle) >= 4
    engine = harness.make_engine(
        model.checkpoint, harness.engine_settings(attention="auto", **changes), poison=True
    )
    engine.submit(harness.make_job(prompts, MAX_TOKENS))
    answers = {row: i3.Answer.of(done) for (_, row), done in harness.drain(engine).items()}
    i3.compare(oracle, answers, model.checkpoint.tokenizer.eos_ids, model.alone).check()
    engine.close()


def test_prompts_within_the_original_context_need_no_such_care(model: Any) -> None:
    """transformers itself goes on token by token: the oracle above is what it answers alone."""
    prompt = list(TEXTS[0].encode())
    assert len(prompt) < ORIGINAL
    assert model.plain(prompt, 40) == model.alone(prompt, 40)


def test_the_context_is_as_much_longer_as_the_factor_says(model: Any) -> None:
    assert model.checkpoint.config.context_length == 16 * ORIGINAL
