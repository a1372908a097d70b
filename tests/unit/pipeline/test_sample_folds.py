"""A sample, right answers and looks at jobs whose rows have several results."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from instant_engine import InstantEngine

from batchradix import pipeline
from batchradix.config import (
    EngineOptions,
    OutputOptions,
    PromptOptions,
    RunConfig,
    SamplingOptions,
)
from batchradix.errors import OptionError
from batchradix.pipeline import Wanted
from batchradix.pipeline.sample import choose_rows
from batchradix.row_options import LongRows
from batchradix.schema.questions import read_questions
from batchradix.scratch import Scratch
from batchradix.sink.formats import read_table
from batchradix.trial import TrialOptions

MakeTinyModel = Callable[..., Path]
QUESTIONS = {"next": "After b", "pick": {"question": "Which", "choices": ["yes", "no"]}}
# A token is a byte; every third text does not fit the context and is cut, or read in parts.
ROWS = [
    {"id": f"r{i}", "text": f"{i} {'some text ' * (30 if i % 3 == 0 else 2)} {i}", "kept": i}
    for i in range(12)
]
SIZE = 5
KINDS: dict[str, dict[str, Any]] = {
    "questions": {"questions": read_questions(QUESTIONS)},
    "parts": {"long_rows": LongRows(overflow="chunk", chunk_overlap=5)},
    "parts asked": {"long_rows": LongRows(overflow="chunk", combine=(("", "ask"),))},
    "cut": {"long_rows": LongRows(overflow="truncate-middle")},
    "questions and parts": {
        "questions": read_questions(QUESTIONS),
        "long_rows": LongRows(overflow="chunk"),
    },
    "questions and cut": {
        "questions": read_questions(QUESTIONS),
        "long_rows": LongRows(overflow="truncate-left"),
    },
}


@pytest.fixture(scope="module")
def markov(tiny_model_folder: MakeTinyModel) -> str:
    return str(tiny_model_folder("markov", context_length=160))


@pytest.fixture(scope="module")
def roomy(tiny_model_folder: MakeTinyModel) -> str:
    return str(tiny_model_folder("markov", context_length=320))


def config(model: str, rows: Any = None, path: Path | None = None, **changes: Any) -> RunConfig:
    options: dict[str, Any] = {
        "engine": EngineOptions(dtype="float32", num_threads=1),
        "sampling": SamplingOptions(max_tokens=4),
        "prompt": PromptOptions(template="{{ text }}"),
        "output": OutputOptions(path=path, keep=("kept",)),
    }
    return RunConfig(input=ROWS if rows is None else rows, model=model, **options | changes)


def chosen() -> list[int]:
    mask = choose_rows(len(ROWS), SIZE, 0, Scratch(least_bytes=None))
    return np.flatnonzero(mask).tolist()


def rows_of(found: Any, *, with_cache: bool) -> list[dict[str, Any]]:
    rows = found.to_pylist()
    return rows if with_cache else [{**row, "cached_tokens": None} for row in rows]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sampled_row_has_all_its_results_and_the_whole_run_goes_on(
    markov: str, tmp_path: Path, kind: str
) -> None:
    assert {row % 3 == 0 for row in chosen()} == {True, False}
    # What rows asked over answers share depends on which of them are asked together.
    with_cache = kind != "parts asked"
    alone, path = tmp_path / "alone.arrow", tmp_path / "out.arrow"
    pipeline.run(config(markov, path=alone, **KINDS[kind]))
    whole = rows_of(read_table(alone), with_cache=with_cache)
    job = config(markov, path=path, trial=TrialOptions(sample=SIZE), **KINDS[kind])
    first = pipeline.run(job).summary
    expected = [whole[row] for row in chosen()]
    assert rows_of(read_table(path), with_cache=with_cache) == expected
    memory = pipeline.run(replace(job, output=OutputOptions(keep=("kept",)))).table
    assert rows_of(memory, with_cache=with_cache) == expected
    assert (first.rows, first.resumed_rows) == (SIZE, 0)
    num_long = sum(row % 3 == 0 for row in chosen())
    assert first.cut_rows + first.parted_rows == (0 if kind == "questions" else num_long)
    assert first.estimate is not None
    assert (first.estimate.rows, first.estimate.sampled_rows) == (len(ROWS), SIZE)
    assert any("combine" in text for text in first.warnings) == (kind == "parts asked")
    rest = pipeline.run(replace(job, trial=TrialOptions())).summary
    assert (rest.rows, rest.resumed_rows) == (len(ROWS), SIZE)
    assert rows_of(read_table(path), with_cache=with_cache) == whole


class Says(InstantEngine):
    def __init__(self, texts: list[str]) -> None:
        super().__init__()
        self.texts = texts

    def text(self, row: int) -> str:
        return self.texts[row]


ASKED = {
    "pet": {"question": "Which", "choices": ["cat", "dog"]},
    "size": {"question": "How many", "fields": "n: int"},
    "say": "What",
}
ANSWERS = [
    ["cat", '{"n": 1}', "one"],
    ["dog", '{"n": 2}', "two"],
    ["no pet", '{"n": 3}', "three"],  # the first question fails
    ["dog", '{"n": 4}', "four"],
]
GOLDS = [
    {"pet": "cat", "size": {"n": 1}, "say": "one"},
    {"pet": "cat", "size": {"n": 2}, "say": "2"},
    {"pet": "cat", "size": {"n": 3}, "say": "three"},
    {"size": {"n": 4}},
]


def asked(model: str, folder: Path, **changes: Any) -> tuple[Any, Path]:
    rows = [{"id": f"r{i}", "text": f"t{i}", "gold": gold} for i, gold in enumerate(GOLDS)]
    source = folder / "in.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    path = folder / "out.jsonl"
    trial = changes.pop("trial", TrialOptions(gold="gold"))
    options = {
        "questions": read_questions(ASKED),
        "sampling": SamplingOptions(max_tokens=50),
        "output": OutputOptions(path=path),
        "trial": trial,
    }
    return config(model, str(source), **options | changes), path


def test_right_answers_are_held_against_each_question(roomy: str, tmp_path: Path) -> None:
    job, path = asked(roomy, tmp_path)
    texts = [text for row in ANSWERS for text in row]
    scores = pipeline.run(job, engines=lambda *_: Says(texts)).summary.gold
    assert scores is not None
    assert (scores.rows, scores.compared, scores.unanswered, scores.exact) == (4, 4, 1, 2)
    counts = {name: (one.correct, one.compared) for name, one in scores.fields.items()}
    # Row 2 lacks its pet, and has its other answers all the same.
    assert counts == {"pet": (1, 3), "size": (4, 4), "say": (2, 3)}
    assert scores.fields["pet"].pairs == {
        ("cat", "cat"): 1,
        ("cat", "dog"): 1,
        ("cat", "(none)"): 1,
    }
    shown = list(pipeline.look(path, Wanted(wrong=True), None).rows)
    assert [row["id"] for row in shown] == ["r1", "r2"]
    assert [row["text"] for row in pipeline.look(path, Wanted(id="r1"), ["text"]).rows]
    assert shown[0]["questions"]["pet"]["status"] == "ok"
    assert shown[1]["value"] == {"pet": None, "size": {"n": 3}, "say": "three"}


def test_right_answers_of_a_sample_are_those_of_its_rows(roomy: str, tmp_path: Path) -> None:
    job, _ = asked(roomy, tmp_path, trial=TrialOptions(gold="gold", sample=2))
    texts = [text for row in ANSWERS for text in row]
    outcome = pipeline.run(job, engines=lambda *_: Says(texts))
    here = choose_rows(len(ANSWERS), 2, 0, Scratch(least_bytes=None))
    rows = np.flatnonzero(here).tolist()
    assert outcome.summary.gold is not None
    assert outcome.summary.gold.compared == 2
    assert outcome.summary.gold.exact == len({0, 3} & set(rows))


class Stops(Says):
    """Answers some, and then never again."""

    def step(self) -> list[Any]:
        if len(self._waiting) <= 4:
            raise KeyboardInterrupt
        return super().step()


def test_results_of_a_run_that_goes_on_stand_beside_their_rows(roomy: str, tmp_path: Path) -> None:
    job, path = asked(roomy, tmp_path)
    texts = [text for row in ANSWERS for text in row]
    with pytest.raises(KeyboardInterrupt):
        pipeline.run(job, engines=lambda *_: Stops(texts))
    shown = pipeline.look(path, Wanted(), None)
    assert "has committed 8 results" in shown.note
    rows = list(shown.rows)
    assert len(rows) == 8
    assert {row["id"] for row in rows} <= {"r0", "r1", "r2", "r3"}
    for row in rows:
        assert row["id"] == f"r{row['row']}"
        assert row["gold"] == GOLDS[row["row"]]
    with pytest.raises(OptionError, match="several results"):
        list(pipeline.look(path, Wanted(wrong=True), None).rows)


def test_tables_with_questions_are_compared_field_by_field(roomy: str, tmp_path: Path) -> None:
    job, path = asked(roomy, tmp_path)
    other = [list(row) for row in ANSWERS]
    other[1][0] = "cat"
    tables = []
    for number, answers in enumerate([ANSWERS, other]):
        path = tmp_path / f"out{number}.arrow"
        texts = [text for row in answers for text in row]
        engines = Says(texts)
        output = OutputOptions(path=path)
        pipeline.run(replace(job, output=output), engines=lambda *_, e=engines: e)
        tables.append(path)
    found = pipeline.diff(*tables)
    assert (found.rows_a, found.rows_b, found.equal, found.different) == (4, 4, 3, 1)
    differ = {name for name, one in found.fields.items() if one.different}
    assert differ == {"pet", "text", "questions"}
    assert found.fields["size"].equal == 4
    assert [row.id for row in found.first] == ["r1"]
    only = pipeline.diff(*tables, columns=["size", "say"])
    assert (only.equal, only.different) == (4, 0)


@pytest.mark.parametrize("with_parts", [False, True])
def test_a_preview_has_a_prompt_for_each_question_and_part(markov: str, with_parts: bool) -> None:
    kind = "questions and parts" if with_parts else "questions"
    job = config(markov, ROWS[:4] if with_parts else ROWS[1:3], **KINDS[kind])
    shown = pipeline.previews(job, None if with_parts else "r2")
    names = [one.question for one in shown]
    parts = len(shown) // 2
    assert (parts > 1) == with_parts
    assert names == ["next"] * parts + ["pick"] * parts
    assert [one.part for one in shown] == [*range(1, parts + 1)] * 2
    assert {one.num_parts for one in shown} == {parts}
    for one in shown:
        assert (one.id, one.row) == (("r0", 0) if with_parts else ("r2", 1))
        assert one.view.text.startswith("<bos>")
        found = one.to_json()
        assert found["question"] == one.question
        assert ("parts" in found) == with_parts
        assert one.neighbour is not None
        assert one.neighbour.row != one.row
        assert one.view.text.startswith(one.neighbour.shared_text)
    assert shown[0].opening == ()
    if not with_parts:  # "1 some text some text " and "2 some ..." share no more than <bos>
        assert {one.neighbour.shared_tokens for one in shown if one.neighbour} == {1}
