"""Answers held against a column of right ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
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
from batchradix.errors import InputError, OptionError
from batchradix.report.gold import BadGold, GoldScores, read_gold
from batchradix.schema.answer_format import answer_format
from batchradix.trial import TrialOptions

MakeTinyModel = Callable[..., Path]
FIELDS = "kind: cat | dog | cow, paid: bool, total: float?, who: str"
ANSWERS = [
    {"kind": "cat", "paid": True, "total": 1.5, "who": "Ann"},
    {"kind": "dog", "paid": True, "total": None, "who": "Bob"},
    {"kind": "dog", "paid": False, "total": 2.0, "who": "Cid"},
    {"kind": "cow", "paid": False, "total": 3.25, "who": "Dan"},
    {"kind": "cat", "paid": True, "total": 4.0, "who": "Eve"},
]
GOLDS: list[Any] = [
    {"kind": "cat", "paid": True, "total": 1.5, "who": "Ann"},  # right
    {"kind": "cat", "paid": True, "total": None, "who": "Bob"},  # another kind
    {"kind": "dog", "paid": True, "total": 2, "who": "Cid"},  # another truth
    None,
    {"kind": "cat", "paid": True, "total": 4.5, "who": "Eve "},  # two others
]


class Says(InstantEngine):
    def __init__(self, texts: list[str]) -> None:
        super().__init__()
        self.texts = texts

    def text(self, row: int) -> str:
        return self.texts[row]


@pytest.fixture(scope="module")
def markov(tiny_model_folder: MakeTinyModel) -> str:
    return str(tiny_model_folder("markov"))


def run(
    model: str, rows: Any, texts: list[str], *, path: Path | None = None, **changes: Any
) -> Any:
    trial = changes.pop("trial", TrialOptions(gold="gold"))
    output = changes.pop("output", OutputOptions(path=path))
    config = RunConfig(
        input=rows,
        model=model,
        engine=EngineOptions(dtype="float32", num_threads=1),
        sampling=SamplingOptions(max_tokens=100),
        trial=trial,
        output=output,
        **changes,
    )
    return pipeline.run(config, engines=lambda *_: Says(texts))


def animals(golds: list[Any]) -> list[dict[str, Any]]:
    return [{"prompt": f"row {n}", "gold": gold} for n, gold in enumerate(golds)]


def counts(scores: GoldScores) -> dict[str, tuple[int, int]]:
    return {name: (one.correct, one.compared) for name, one in scores.fields.items()}


@pytest.mark.parametrize("form", ["struct", "json text", "parquet"])
def test_each_field_is_counted_whatever_the_right_answers_are_written_in(
    markov: str, tmp_path: Path, form: str
) -> None:
    texts = [json.dumps(answer) for answer in ANSWERS]
    rows: Any = animals(GOLDS)
    if form == "json text":
        rows = animals([gold and json.dumps(gold) for gold in GOLDS])
    if form == "parquet":
        rows = str(tmp_path / "in.parquet")
        pl.DataFrame(animals(GOLDS)).write_parquet(rows)
    schema = answer_format(fields=FIELDS)
    scores = run(markov, rows, texts, path=tmp_path / "o.jsonl", schema=schema).summary.gold
    assert (scores.rows, scores.compared, scores.missing, scores.exact) == (5, 4, 1, 1)
    assert counts(scores) == {"kind": (3, 4), "paid": (3, 4), "total": (3, 4), "who": (3, 4)}
    assert scores.fields["total"].pairs is None
    cat = scores.fields["kind"].classes()["cat"]
    assert cat == {"gold": 3, "answered": 2, "correct": 2, "precision": 1.0, "recall": 2 / 3}
    assert scores.fields["paid"].pairs == {("true", "true"): 3, ("true", "false"): 1}
    beside = json.loads((tmp_path / "o.jsonl.gold.json").read_text())
    assert beside == scores.to_json()


def test_rows_without_an_ok_answer_count_as_wrong(markov: str) -> None:
    texts = ["dog", "not one of them", "cat"]
    choices = answer_format(choices=["cat", "dog"])
    outcome = run(markov, animals(["dog", "cat", "cat"]), texts, schema=choices)
    scores = outcome.summary.gold
    assert (scores.compared, scores.unanswered, scores.exact) == (3, 1, 2)
    assert scores.fields["value"].pairs == {
        ("dog", "dog"): 1,
        ("cat", "(none)"): 1,
        ("cat", "cat"): 1,
    }
    assert scores.fields["value"].classes()["cat"]["recall"] == 0.5
    assert outcome.summary.to_json()["gold"]["accuracy"] == pytest.approx(2 / 3)
    assert ("gold", "2 of 3 answers right (66.7%); 1 rows without an answer") in (
        outcome.summary.table()
    )


def test_rows_with_schemas_of_their_own_are_compared_by_the_fields_they_have(markov: str) -> None:
    def own(name: str) -> dict[str, Any]:
        schema = {
            "type": "object",
            "properties": {name: {"type": "integer"}},
            "required": [name],
            "additionalProperties": False,
        }
        return {"type": "json_schema", "json_schema": {"name": "own", "schema": schema}}

    rows = [
        {"prompt": "a", "response_format": own("a"), "gold": '{"a": 1}'},
        {"prompt": "b", "response_format": own("b"), "gold": '{"b": 3}'},
    ]
    scores = run(markov, rows, ['{"a": 1}', '{"b": 2}']).summary.gold
    assert (scores.kind, scores.exact) == ("any", 1)
    assert counts(scores) == {"a": (1, 1), "b": (0, 1)}


def test_texts_are_compared_without_the_space_around_them(markov: str) -> None:
    scores = run(markov, animals(["yes", "no", "7"]), [" yes\n", "No", "7"]).summary.gold
    assert counts(scores) == {"value": (2, 3)}


@pytest.mark.parametrize(
    ("raw", "kind", "expected"),
    [
        ('{"a": 1}', "object", {"a": 1}),
        ("[1]", "array", [1]),
        ("True", "boolean", True),
        (" 12 ", "number", 12),
        (5, "string", "5"),
        ("true", "string", "true"),
        (True, "text", "true"),
        ("not json", "any", "not json"),
    ],
)
def test_right_answers_are_read_as_what_answers_are(raw: Any, kind: Any, expected: Any) -> None:
    found = read_gold(raw, kind)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("raw", "kind"),
    [("x", "object"), ([1], "object"), ("yes", "boolean"), (1, "boolean"), (True, "number"),
     ("1", "array"), ({"a": 1}, "string")],
)  # fmt: skip
def test_right_answers_that_are_none_are_counted_and_the_first_is_named(
    raw: Any, kind: Any
) -> None:
    with pytest.raises(BadGold):
        read_gold(raw, kind)
    scores = GoldScores(column="g", kind=kind)
    scores.add(3, None, raw, is_ok=False)
    scores.add(4, None, raw, is_ok=False)
    assert (scores.invalid, scores.compared, scores.fields) == (2, 0, {})
    assert scores.first_invalid is not None
    assert scores.first_invalid.startswith("row 3: ")


def test_the_column_of_right_answers_is_no_part_of_the_job(markov: str, tmp_path: Path) -> None:
    path = tmp_path / "o.arrow"
    rows = animals(["yes", "no", "yes", "yes"])
    first = Says(["yes"] * 4)
    base = RunConfig(
        input=rows,
        model=markov,
        engine=EngineOptions(dtype="float32", num_threads=1),
        output=OutputOptions(path=path),
    )
    pipeline.run(base, engines=lambda *_: first)
    again = Says([])
    for keep in ((), "all", ("gold",)):
        config = RunConfig(
            input=rows,
            model=markov,
            engine=base.engine,
            output=OutputOptions(path=path, keep=keep),  # type: ignore[arg-type]
            trial=TrialOptions(gold="gold"),
        )
        summary = pipeline.run(config, engines=lambda *_: again).summary
        assert summary.gold is not None
        assert counts(summary.gold) == {"value": (3, 4)}
    assert again.submitted == []


def test_a_sample_is_scored_by_its_own_rows(markov: str, tmp_path: Path) -> None:
    rows = animals([("yes" if n % 2 else "no") for n in range(30)])
    trial = TrialOptions(sample=9, gold="gold")
    for path in (None, tmp_path / "o.arrow"):
        outcome = run(markov, rows, ["yes"] * 30, path=path, trial=trial)
        scores = outcome.summary.gold
        table = outcome.table if path is None else pipeline.open_results(path).rows()
        numbers = table["row"].to_pylist() if path is None else [row["row"] for row in table]
        assert (scores.rows, scores.exact) == (9, sum(n % 2 for n in numbers))


def test_a_column_that_cannot_hold_right_answers_is_refused(markov: str) -> None:
    rows = animals(["yes"])
    with pytest.raises(InputError, match="no column 'nothing' of right answers"):
        run(markov, rows, ["yes"], trial=TrialOptions(gold="nothing"))
    leaks = PromptOptions(template="{{ prompt }} is {{ gold }}")
    with pytest.raises(OptionError, match="prompts are made of the column 'gold'"):
        run(markov, rows, ["yes"], prompt=leaks)
