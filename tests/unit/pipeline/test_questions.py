"""Several questions to a row: one prefix, a field an answer, none lost by another's failure."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchradix import pipeline
from batchradix.config import (
    EngineOptions,
    OutputOptions,
    PromptOptions,
    RunConfig,
    SamplingOptions,
)
from batchradix.errors import (
    InputError,
    OptionError,
    OutputMismatchError,
    SchemaError,
    TemplateError,
)
from batchradix.row_options import Question
from batchradix.schema.questions import read_questions

MakeTinyModel = Callable[..., Path]
# The tiny model continues the alphabet from the last character.
QUESTIONS = {
    "next": "What comes after b",
    "pick": {"question": "Which of them", "choices": ["yes", "no"]},
    "count": {"question": "How many", "fields": "n: int", "max_tokens": 30},
}
LIST = {"question": "List", "fields": "all: [str]"}  # which the tiny model does not end
ROWS = [
    {"id": f"row {i}", "text": f"The text of {i} is {'long ' * 9}", "kept": i} for i in range(4)
]


@pytest.fixture(scope="module")
def markov(tiny_model_folder: MakeTinyModel) -> str:
    return str(tiny_model_folder("markov", context_length=256))


def config(model: str, rows: Any = None, questions: Any = None, **changes: Any) -> RunConfig:
    options: dict[str, Any] = {
        "engine": EngineOptions(dtype="float32", num_threads=1),
        "sampling": SamplingOptions(max_tokens=6),
        "prompt": PromptOptions(template="{{ text }}"),
        "questions": read_questions(QUESTIONS if questions is None else questions),
    }
    return RunConfig(input=ROWS if rows is None else rows, model=model, **options | changes)


def run(job: RunConfig) -> pipeline.Outcome:
    return pipeline.run(job)


def stop_after(steps: int) -> Callable[[], int | None]:
    left = iter(range(steps))
    return lambda: 15 if next(left, None) is None else None


def table(job: RunConfig) -> pa.Table:
    found = run(job).table
    assert found is not None
    return found


def test_every_question_is_a_typed_field_of_the_value(markov: str) -> None:
    found = table(config(markov))
    assert found.num_rows == len(ROWS)
    assert found.schema.field("value").type == pa.struct(
        [
            ("next", pa.string()),
            ("pick", pa.dictionary(pa.int32(), pa.string())),
            ("count", pa.struct([("n", pa.int64())])),
        ]
    )
    for row in found.to_pylist():
        assert row["status"] == "ok"
        assert row["value"]["next"] == "cdefgh"
        assert row["value"]["pick"] in ("yes", "no")
        assert isinstance(row["value"]["count"]["n"], int)
        assert json.loads(row["text"])["next"] == "cdefgh"
        assert row["questions"]["next"]["finish_reason"] == "length"
        each = [row["questions"][name]["completion_tokens"] for name in QUESTIONS]
        assert row["completion_tokens"] == sum(each)


def test_the_text_of_a_row_is_computed_once_for_all_questions(markov: str) -> None:
    job = config(markov, questions={"a": "What is a", "b": "Who is b", "c": "When was c"})
    usage = pipeline.run(job).summary.usage
    ids = [shown.view.ids for row in ROWS for shown in pipeline.previews(job, row["id"])]
    distinct = {prompt[:end] for prompt in ids for end in range(1, len(prompt) + 1)}
    assert usage.computed_tokens == len(distinct)
    assert usage.recomputed_tokens == 0
    longest = sum(max(map(len, ids[i : i + 3])) for i in range(0, len(ids), 3))
    assert usage.computed_tokens < longest + len(ROWS) * 2 * len("When was c")


def test_the_prompt_is_the_text_and_then_the_question_and_its_schema(markov: str) -> None:
    views = [shown.view for shown in pipeline.previews(config(markov), "row 1")]
    texts = [view.text for view in views]
    assert len(texts) == len(QUESTIONS)
    assert all(text.startswith(f"<bos>{ROWS[1]['text']}\n\n") for text in texts)
    assert texts[0].endswith("What comes after b")
    assert texts[1].endswith('["yes","no"]')
    assert '"n"' in texts[2]


@pytest.mark.parametrize(
    ("prompt", "begins", "ends"),
    [
        (PromptOptions(column="text"), "<|user|>The text", "after b<|end|><|assistant|>"),
        (
            PromptOptions(instruction="Read it.", column="text"),
            "<|user|>Read it.\n\nThe text",
            "after b<|end|><|assistant|>",
        ),
        (
            PromptOptions(template="{{ text }} Q: {{ question }}. A: "),
            "The text",
            "Q: What comes after b. A: ",
        ),
    ],
)
def test_questions_stand_behind_whatever_makes_the_prompt(
    markov: str, prompt: PromptOptions, begins: str, ends: str
) -> None:
    view = pipeline.preview(config(markov, prompt=prompt)).view
    assert view.text.removeprefix("<bos>").startswith(begins)
    assert view.text.endswith(ends)


def test_prompts_and_messages_of_the_input_are_asked_too(markov: str) -> None:
    rows = [
        {"prompt": "Some text"},
        {"messages": [{"role": "user", "content": "Hello"}]},
        {"messages": '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'},
    ]
    job = config(markov, rows, {"q": "After b"}, prompt=PromptOptions())
    texts = [pipeline.preview(job, str(i)).view.text for i in range(3)]
    assert texts == [
        "<bos>Some text\n\nAfter b",
        "<bos><|user|>Hello\n\nAfter b<|end|><|assistant|>",
        "<bos><|user|>a<|end|><|assistant|>b<|end|><|user|>After b<|end|><|assistant|>",
    ]
    assert table(job)["value"].to_pylist() == [{"q": "cdefgh"}, {"q": "abcdef"}, {"q": "abcdef"}]


def test_a_question_that_fails_loses_no_other_answer(markov: str) -> None:
    questions = {"good": "After b", "bad": "Tell {{ missing }} of b", "other": "After c"}
    rows = [{"text": "t", "missing": "all"}, {"text": "t", "missing": None}]
    good, failed = table(config(markov, rows, questions)).to_pylist()
    assert good["status"] == "ok"
    assert (failed["status"], failed["error"]["code"]) == ("error", "null_field")
    assert failed["error"]["message"].startswith('question "bad": row 1')
    assert failed["value"] == {"good": "cdefgh", "bad": None, "other": "defghi"}
    statuses = {name: one["status"] for name, one in failed["questions"].items()}
    assert statuses == {"good": "ok", "bad": "error", "other": "ok"}


def test_a_truncated_answer_of_one_question_is_that_alone(markov: str) -> None:
    questions = {"list": {**LIST, "max_tokens": 20}, "next": "After b"}
    for keeps in (False, True):
        output = OutputOptions(keep_truncated=keeps)
        row = table(config(markov, ROWS[:1], questions, output=output)).to_pylist()[0]
        assert row["status"] == "truncated"
        assert row["value"]["next"] == "cdefgh"
        assert (row["value"]["list"] is not None) == keeps
        if keeps:
            assert row["cut"].startswith("/list")
            assert row["questions"]["next"]["cut"] is None


def test_questions_of_one_text_and_one_format_keep_their_own_columns(markov: str) -> None:
    questions = {
        name: {"question": "Which", "choices": ["yes", "no"]} for name in ("first", "second")
    }
    for row in table(config(markov, ROWS, questions)).to_pylist():
        assert row["value"]["first"] == row["value"]["second"] is not None


def test_a_question_has_the_format_of_the_run_unless_it_has_its_own(markov: str) -> None:
    from batchradix.schema.answer_format import answer_format

    job = config(markov, schema=answer_format(choices=["a", "b"]))
    type_ = table(job).schema.field("value").type
    assert pa.types.is_dictionary(type_.field("next").type)
    assert pa.types.is_struct(type_.field("count").type)


@pytest.mark.parametrize("ending", ["arrow", "parquet", "jsonl", "csv"])
def test_all_formats_keep_unnested_columns_and_kept_ones(
    markov: str, tmp_path: Path, ending: str
) -> None:
    plain = {"next": "After b", "other": "After c"}
    questions = plain if ending == "csv" else QUESTIONS
    path = tmp_path / f"out.{ending}"
    output = OutputOptions(path=path, unnest=True, keep=("kept",))
    assert run(config(markov, questions=questions, output=output)).summary.ok == len(ROWS)
    from batchradix.sink.formats import read_table

    found = read_table(path)
    assert found["next"].to_pylist() == ["cdefgh"] * len(ROWS)
    assert found["kept"].to_pylist() == [0, 1, 2, 3]


def test_a_run_goes_on_wherever_it_was_stopped(markov: str, tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    job = config(markov, output=OutputOptions(path=path))
    whole = table(config(markov))
    for steps in range(0, 40, 3):
        outcome = pipeline.run(job, stop_requested=stop_after(steps))
        if outcome.summary.stopped_by is None:
            break
    outcome = pipeline.run(job)
    assert outcome.summary.resumed_rows + outcome.summary.rows >= len(ROWS)
    found = pq.read_table(path)
    assert found.select(whole.column_names).to_pylist() == whole.to_pylist()


def test_retry_runs_the_questions_that_failed_and_no_other(markov: str, tmp_path: Path) -> None:
    questions = {"list": {**LIST, "max_tokens": 20}, "next": "After b"}
    output = OutputOptions(path=tmp_path / "out.arrow")
    first = config(markov, ROWS[:2], questions, output=output)
    assert run(first).summary.truncated == 2
    again = replace(first, output=replace(output, retry=("truncated",)))
    summary = run(again).summary
    assert (summary.rows, summary.truncated) == (2, 2)
    with pa.memory_map(str(output.path)) as source:
        found = pa.ipc.open_file(source).read_all()["questions"].to_pylist()
    assert summary.usage.completion_tokens == sum(row["list"]["completion_tokens"] for row in found)


def test_rows_that_cannot_be_read_fail_in_every_question(markov: str, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a"}\nnot json\n')
    rows = table(config(markov, str(path))).to_pylist()
    assert [row["status"] for row in rows] == ["ok", "error"]
    assert rows[1]["value"] is None
    assert {one["error"]["code"] for one in rows[1]["questions"].values()} == {"bad_line"}


def test_limits_and_empty_inputs_hold(markov: str) -> None:
    assert table(config(markov, limit=2)).num_rows == 2
    assert table(config(markov, limit=0)).num_rows == 0


def test_plan_and_check_count_a_prompt_a_question(markov: str) -> None:
    assert pipeline.plan(config(markov)).rows == len(ROWS) * len(QUESTIONS)
    assert pipeline.check(config(markov)).num_rows == len(ROWS)


def test_other_questions_are_another_job(markov: str, tmp_path: Path) -> None:
    output = OutputOptions(path=tmp_path / "out.arrow")
    run(config(markov, output=output))
    with pytest.raises(OutputMismatchError, match="questions"):
        run(config(markov, questions={"next": "After c"}, output=output))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"schema_column": "s"}, "schema_column"),
        ({"sampling": SamplingOptions(probabilities=True)}, "probabilities"),
    ],
)
def test_what_questions_do_not_go_with_is_refused(markov: str, changes: Any, told: str) -> None:
    from batchradix.schema.answer_format import answer_format

    if "sampling" in changes:
        changes = {**changes, "schema": answer_format(choices=["a", "b"])}
    with pytest.raises(OptionError, match=told):
        run(config(markov, **changes))


def test_a_place_that_no_row_has_is_told_with_its_question(markov: str) -> None:
    for text, told in (("Who is {{ who }}", "question 'b': "), ("Who", "the template names")):
        template = "{{ text }}" if "{{" in text else "{{ txt }}"
        job = config(
            markov,
            questions={"a": "What", "b": text},
            prompt=PromptOptions(template=template),
        )
        with pytest.raises(TemplateError, match=f"^{told}"):
            pipeline.check(job)


def test_requests_and_rows_with_schemas_are_refused(markov: str) -> None:
    request = {
        "custom_id": "1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": [{"role": "user", "content": "a"}]},
    }
    with pytest.raises(OptionError, match="OpenAI batch file"):
        run(config(markov, [request], prompt=PromptOptions()))
    with pytest.raises(OptionError, match="response_format"):
        run(config(markov, [{"text": "a", "response_format": {"type": "text"}}]))


def test_a_file_of_questions_is_toml_or_json_with_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "object", "properties": {"a": {}}}')
    (tmp_path / "q.toml").write_text(
        'short = "Say it."\n[long]\nquestion = "What?"\nschema = "schema.json"\nmax_tokens = 5\n'
    )
    found = read_questions(tmp_path / "q.toml")
    assert found[0] == Question(name="short", text="Say it.")
    assert (found[1].name, found[1].text, found[1].max_tokens) == ("long", "What?", 5)
    assert found[1].answers["schema"]["type"] == "object"
    (tmp_path / "q.json").write_text(json.dumps({"a": {"question": "b", "choices": ["c", "d"]}}))
    assert read_questions(tmp_path / "q.json")[0].answers == {"choices": ["c", "d"]}
    (tmp_path / "q.json").write_text('{"a": "one", "b": "two", "a": "three"}')
    with pytest.raises(InputError, match="'a' is there twice"):
        read_questions(tmp_path / "q.json")


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({}, OptionError, "there are none"),
        ({"a": 1}, OptionError, "question 'a'"),
        ({"a": {"question": " "}}, OptionError, "must be the text"),
        ({"a": {"question": "b", "schemas": {}}}, OptionError, "'schemas'"),
        ({"a": {"question": "b", "max_tokens": True}}, OptionError, "max_tokens"),
        ({"a": {"question": "b", "regex": "("}}, SchemaError, "question 'a'"),
        ({"a": {"question": "b", "regex": "c", "fields": "d"}}, OptionError, "exclude"),
        ({"a\ud800": "b"}, OptionError, "needs a name"),
        ("missing.toml", InputError, "missing.toml"),
        ("a\0b", InputError, "cannot be read"),
        ("", OptionError, "must be a file or a mapping"),
        (5, OptionError, "must be a file or a mapping"),
        ([{"a": "b"}], OptionError, "must be a file or a mapping"),
    ],
)
def test_questions_that_are_none_are_refused_by_name(given: Any, error: Any, told: str) -> None:
    with pytest.raises(error, match=told):
        read_questions(given)
