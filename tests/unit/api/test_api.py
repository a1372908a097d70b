"""The Python face on tiny checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import polars as pl
import pydantic
import pytest

import batchradix
from batchradix.engine.model_runner import ModelRunner
from batchradix.errors import EngineError, OptionError, SchemaError
from batchradix.types import Status

MakeTinyModel = Callable[..., Path]
FLOAT32 = batchradix.EngineOptions(dtype="float32", num_threads=1, kv_tokens=2000)
FOUR = batchradix.SamplingOptions(max_tokens=4)


@pytest.fixture(scope="module")
def markov(tiny_model_folder: MakeTinyModel) -> str:
    return str(tiny_model_folder("markov"))


@pytest.fixture(scope="module")
def llm(markov: str) -> Iterator[batchradix.LLM]:
    with batchradix.LLM(markov, engine=FLOAT32) as opened:
        yield opened


def test_run_takes_a_frame_and_keeps_its_columns(markov: str) -> None:
    frame = pl.DataFrame({"id": [1, 2], "prompt": ["a", "z"], "text": ["kept", "too"]})
    result = batchradix.run(frame, model=markov, sampling=FOUR, engine=FLOAT32)
    assert result.path is None
    found = result.to_polars()
    assert found["text"].to_list() == ["bcde", "abcd"]
    assert found["input_text"].to_list() == ["kept", "too"]
    assert found["id"].to_list() == [1, 2]


@pytest.mark.parametrize("extension", [".arrow", ".parquet", ".jsonl", ".csv"])
def test_run_reads_back_what_it_wrote(markov: str, tmp_path: Path, extension: str) -> None:
    result = batchradix.run(
        [{"prompt": "a"}, {"prompt": "b"}],
        model=markov,
        output=tmp_path / f"out{extension}",
        sampling=FOUR,
        engine=FLOAT32,
    )
    assert result.to_polars()["text"].to_list() == ["bcde", "cdef"]
    assert result.summary.ok == 2


def test_plan_counts_without_weights(markov: str) -> None:
    summary = batchradix.plan([{"text": "ab"}, {"text": "ac"}], model=markov, template="{{ text }}")
    assert (summary.prompt_tokens, summary.distinct_tokens) == (6, 4)


def test_generate_answers_in_order_and_keeps_prefixes_between_calls(llm: batchradix.LLM) -> None:
    first = llm.generate(["shared a", "shared b", "shared a"], sampling=FOUR)
    assert [r.text for r in first] == ["bcde", "cdef", "bcde"]
    before = llm.usage.computed_tokens
    assert before > 0
    [again] = llm.generate("shared c", sampling=FOUR)
    assert again.text == "defg"
    assert llm.usage.computed_tokens - before == 1


def test_generate_takes_conversations(llm: batchradix.LLM) -> None:
    [answer] = llm.generate([[{"role": "user", "content": "hi"}]], sampling=FOUR)
    assert answer.text == "abcd"
    assert answer.prompt_tokens == 6


def test_a_failed_prompt_is_a_result_with_an_error(llm: batchradix.LLM) -> None:
    good, bad = llm.generate(["a", "x" * 600], sampling=FOUR)
    assert good.status is Status.OK
    assert bad.status is Status.ERROR
    assert bad.error is not None
    assert bad.error.code == "prompt_too_long"


def test_generate_of_nothing_is_nothing(llm: batchradix.LLM) -> None:
    assert llm.generate([]) == []


def test_generate_refuses_a_mixture_and_a_bad_schema(llm: batchradix.LLM) -> None:
    with pytest.raises(OptionError):
        llm.generate(["a", [{"role": "user", "content": "b"}]])  # type: ignore[list-item]
    with pytest.raises(SchemaError):
        llm.generate(["a"], schema={"type": "nonsense"})


def test_a_pydantic_model_is_a_schema(tiny_model_folder: MakeTinyModel) -> None:
    class Digit(pydantic.BaseModel):
        n: int = pydantic.Field(ge=0, le=9)

    model = str(tiny_model_folder("const", prefer='7}"1'))
    with batchradix.LLM(model, engine=FLOAT32) as llm:
        [answer] = llm.generate(["x"], schema=Digit)
        assert Digit.model_validate(answer.value) == Digit(n=7)
    with pytest.raises(EngineError, match="closed"):
        llm.generate(["x"])


def test_threads_take_turns_with_one_model(markov: str, llm: batchradix.LLM) -> None:
    prompts = {first: [f"{first} {i % 10}" for i in range(40)] for first in "abcd"}
    wanted = {
        first: [r.text for r in llm.generate(p, sampling=FOUR)] for first, p in prompts.items()
    }
    with ThreadPoolExecutor(4) as pool:
        calls = [(f, pool.submit(llm.generate, p, sampling=FOUR)) for f, p in prompts.items()] * 2
        for first, call in calls:
            assert [r.text for r in call.result(timeout=60)] == wanted[first]


@pytest.mark.parametrize("step", [1, 2, 4])
def test_an_interrupted_call_leaves_nothing_behind(
    markov: str, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    with batchradix.LLM(markov, engine=FLOAT32) as llm:
        llm.generate(["warm"], sampling=FOUR)
        assert llm.usage.forward_steps > 0
        real, num_steps = ModelRunner.launch, 0

        def interrupted(self: ModelRunner, *args: Any, **kwargs: Any) -> Any:
            nonlocal num_steps
            num_steps += 1
            if num_steps == step:
                raise KeyboardInterrupt
            return real(self, *args, **kwargs)

        monkeypatch.setattr(ModelRunner, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "ab", "warm b"], sampling=FOUR)
        monkeypatch.undo()
        results = llm.generate(["a", "warm", "ab"], sampling=FOUR)
        assert [r.text for r in results] == ["bcde", "nopq", "cdef"]


@pytest.mark.parametrize("prompts", [None, 5, b"bytes"])
def test_prompts_of_no_known_kind_are_refused(llm: batchradix.LLM, prompts: Any) -> None:
    with pytest.raises(OptionError, match="prompts must be texts or conversations"):
        llm.generate(prompts)


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("sampling", {"max_tokens": 3}, "sampling must be SamplingOptions"),
        ("engine", {"dtype": "float32"}, "engine must be EngineOptions"),
        ("model", None, "model must be a name or a path"),
        ("output", 5, "output must be a name or a path"),
        ("template", 5, "template must be text"),
        ("limit", "1", "limit must be an integer"),
        ("chat", "yes", "chat must be True or False"),
        ("shard", 5, "shard must be a part"),
        ("keep", 5, "keep must be names of columns"),
        ("chat_template_kwargs", {"a": object()}, "must hold what JSON can"),
    ],
)
def test_an_argument_of_another_type_is_refused(
    markov: str, option: str, value: Any, sentence: str
) -> None:
    arguments: dict[str, Any] = {"model": markov, option: value}
    with pytest.raises(OptionError, match=sentence):
        batchradix.run([{"prompt": "a"}], **arguments)


def test_a_model_may_be_given_as_a_path(markov: str) -> None:
    assert batchradix.plan([{"prompt": "a"}], model=Path(markov)).rows == 1
