"""Thinking where rows have several questions, or texts that are too long."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import batchradix
from batchradix.integrations.hf_datasets import Extractor

MakeModel = Callable[..., Path]
MOOD = {"question": "Which?", "choices": ["yes", "no"]}
CONTEXT = 512  # of the tiny models
LONG = "x" * 900


@pytest.fixture(scope="module")
def thinker(thinker_folder: MakeModel) -> Path:
    return thinker_folder("switch")


@pytest.fixture(scope="module")
def rambler(thinker_folder: MakeModel) -> Path:
    """Goes on with the alphabet, in its thoughts and behind them."""
    return thinker_folder("switch", text="a", ends=False)


def run(rows: Any, model: Path, **options: Any) -> batchradix.RunResult:
    options = {"sampling": batchradix.SamplingOptions(max_tokens=20), "keep": (), **options}
    return batchradix.run(rows, model=model, **options)


@pytest.mark.parametrize(
    ("questions", "is_said", "thinks"),
    [
        ({"what": "What?"}, False, True),
        ({"mood": MOOD}, True, False),
        ({"what": "What?", "mood": MOOD}, True, True),
    ],
)
def test_of_several_questions_those_with_free_answers_are_thought_about(
    thinker: Path, questions: Any, is_said: bool, thinks: bool
) -> None:
    asked = {"questions": questions, "column": "text"}
    done = run([{"text": "ab"}], thinker, **asked)
    said = any("--thinking on lets it" in text for text in done.summary.warnings)
    assert said == is_said
    (row,) = done.table.to_pylist()
    assert ("reasoning" in row) == thinks
    if "what" in questions:
        assert row["questions"]["what"]["reasoning"] == "um"
    fields = Extractor(model=thinker, **asked).answer_schema(["text"]).names
    assert ("reasoning" in fields) == thinks


def test_questions_about_a_column_are_asked_of_rows_in_memory(thinker: Path) -> None:
    extractor = Extractor(
        model=thinker,
        questions={"mood": MOOD},
        column="text",
        thinking="on",
        unnest=True,
        result_columns=["reasoning"],
        kv_tokens=4096,
    )
    answers = extractor({"text": ["ab", "c"]})
    assert {answer in ("yes", "no") for answer in answers["mood"]} == {True}
    assert list(answers["reasoning"]) == ["um", "um"]


@pytest.mark.parametrize("overflow", ["truncate-left", "truncate-middle", "chunk"])
@pytest.mark.parametrize("said", [60, None, 10_000])
def test_long_texts_leave_room_for_thinking_and_answer(
    rambler: Path, overflow: str, said: int | None
) -> None:
    done = run(
        [{"text": LONG}],
        rambler,
        template="{{ text }}",
        chat=True,
        overflow=overflow,
        thinking_tokens=said,
        engine=batchradix.EngineOptions(repetition_guard=False),
    )
    (row,) = done.table.to_pylist()
    closing = len("\n\n\n") + 1
    free = {60: 60, None: CONTEXT // 4, 10_000: CONTEXT // 2}[said]
    results = row["parts"] if overflow == "chunk" else [row]
    for result in results[:-1] or results:
        assert result["finish_reason"] == "length"
        assert result["completion_tokens"] == free + closing + 20
        assert result["reasoning_tokens"] == free + closing


def test_a_row_without_messages_is_told_so_and_not_that_its_prompt_is_raw(thinker: Path) -> None:
    rows = [{"messages": None}, {"messages": [{"role": "user", "content": "ab"}]}]
    for thinking in ("on", "auto"):
        found = run(rows, thinker, thinking=thinking).table.to_pylist()
        assert [row["status"] for row in found] == ["error", "ok"]
        assert "messages" in found[0]["error"]["message"]
        assert "raw" not in found[0]["error"]["message"]
