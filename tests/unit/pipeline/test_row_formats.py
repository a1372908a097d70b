"""Jobs whose rows have schemas of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
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
from batchradix.errors import InputError, OutputMismatchError
from batchradix.report.progress import Silent

MakeTinyModel = Callable[..., Path]


@pytest.fixture(scope="module")
def sevens(tiny_model_folder: MakeTinyModel) -> str:
    """A model that writes 7 wherever it may."""
    return str(tiny_model_folder("const", prefer='7}"1'))


def config(model: str, rows: Any, **changes: Any) -> RunConfig:
    options: dict[str, Any] = {
        "engine": EngineOptions(dtype="float32", num_threads=1),
        "sampling": SamplingOptions(max_tokens=12),
    }
    return RunConfig(input=rows, model=model, **options | changes)


def run_rows(job: RunConfig) -> list[dict[str, Any]]:
    table = pipeline.run(job).table
    assert table is not None
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def openai(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


def digit(name: str) -> dict[str, Any]:
    value = {"type": "integer", "minimum": 0, "maximum": 9}
    return {"type": "object", "properties": {name: value}, "required": [name]}


ROWS: list[dict[str, Any]] = [
    {"prompt": "x", "response_format": openai(digit("a"))},
    {"prompt": "x", "response_format": openai(digit("bcd"))},
    {"prompt": "x", "response_format": {"type": "text"}},
    {"prompt": "x", "response_format": openai({"type": "nonsense"})},
    {"prompt": "x", "response_format": None},
    {"prompt": "y", "response_format": openai(digit("a"))},
]


def test_each_row_is_answered_under_its_own_schema_as_json_text(sevens: str) -> None:
    rows = run_rows(config(sevens, ROWS))
    assert [row["value"] for row in rows] == ['{"a":7}', '{"bcd":7}', None, None, None, '{"a":7}']
    assert [row["status"] for row in rows] == ["ok", "ok", "ok", "error", "ok", "ok"]
    assert rows[2]["text"] == rows[4]["text"] == "7" * 12
    assert rows[3]["error"]["code"] == "bad_setting"
    assert "row 3, column response_format: " in rows[3]["error"]["message"]
    assert "nonsense" in rows[3]["error"]["message"]


def test_a_null_means_the_run_s_own_schema(sevens: str) -> None:
    rows = run_rows(config(sevens, ROWS, schema=digit("own")))
    assert rows[4]["value"] == '{"own":7}'
    assert rows[0]["value"] == '{"a":7}'


def test_the_answers_do_not_depend_on_forced_text(sevens: str) -> None:
    plain = EngineOptions(dtype="float32", num_threads=1, forced_text=False)
    found = run_rows(config(sevens, ROWS, engine=plain))
    assert [row["value"] for row in found] == [
        row["value"] for row in run_rows(config(sevens, ROWS))
    ]


def test_each_opening_stands_behind_its_own_prompts(sevens: str) -> None:
    summary = pipeline.plan(config(sevens, ROWS))
    assert summary.opening_tokens == 2 * len('{"a":') + len('{"bcd":')


def test_rows_of_one_grammar_and_two_schemas_are_judged_apart(sevens: str) -> None:
    pair = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
    pair["items"] = {"enum": [7]}
    rows = [
        {"prompt": "x", "wanted": pair},
        {"prompt": "x", "wanted": {**pair, "uniqueItems": True}},
    ]
    found = run_rows(config(sevens, rows, schema_column="wanted"))
    assert [row["status"] for row in found] == ["ok", "error"]


def test_schemas_come_from_struct_columns_of_parquet(sevens: str, tmp_path: Path) -> None:
    path = tmp_path / "jobs.parquet"
    cells = [openai(digit("a")), openai({"type": "array", "items": {"const": 7}, "maxItems": 1})]
    pq.write_table(pa.table({"prompt": ["x", "x"], "response_format": pa.array(cells)}), path)
    found = run_rows(config(sevens, str(path)))
    assert found[0]["value"] == '{"a":7}'
    assert found[1]["status"] == "ok"


def test_json_lines_hold_values_as_json_and_null_for_text(sevens: str, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    pipeline.run(config(sevens, ROWS, output=OutputOptions(path=path)))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["value"] for line in lines] == [{"a": 7}, {"bcd": 7}, None, None, None, {"a": 7}]


def test_an_edited_schema_runs_its_row_again(sevens: str, tmp_path: Path) -> None:
    output = OutputOptions(path=tmp_path / "out.arrow")
    pipeline.run(config(sevens, ROWS, output=output))
    edited = [{"prompt": "x", "response_format": openai(digit("new"))}, *ROWS[1:]]
    outcome = pipeline.run(config(sevens, edited, output=output))
    assert outcome.summary.resumed_rows == len(ROWS) - 1
    assert pa.ipc.open_file(output.path).read_all()["value"][0].as_py() == '{"new":7}'


def test_rows_with_schemas_and_rows_without_make_different_tables(
    sevens: str, tmp_path: Path
) -> None:
    output = OutputOptions(path=tmp_path / "out.arrow")
    pipeline.run(config(sevens, [{"prompt": "x"}], schema=digit("a"), output=output))
    with pytest.raises(OutputMismatchError):
        pipeline.run(config(sevens, ROWS, schema=digit("a"), output=output))


def test_a_schema_column_that_is_not_there_is_refused(sevens: str) -> None:
    with pytest.raises(InputError, match="no column 'nope' to read schemas from"):
        pipeline.run(config(sevens, [{"prompt": "x"}], schema_column="nope"))


class Heard(Silent):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def test_what_decoding_does_not_enforce_in_a_row_s_schema_is_said(sevens: str) -> None:
    heard = Heard()
    word = {"type": "string", "maxLength": 2}
    unique = {"type": "array", "items": word, "uniqueItems": True, "maxItems": 2}
    pipeline.plan(config(sevens, [{"prompt": "x", "s": unique}], schema_column="s"), progress=heard)
    assert any("in schemas of rows: not enforced" in text for text in heard.warnings)
    outcome = pipeline.run(config(sevens, [{"prompt": "x", "s": unique}], schema_column="s"))
    assert any("in schemas of rows: not enforced" in text for text in outcome.summary.warnings)


@pytest.mark.parametrize("template", ["{{ x }} {{ schema }}", "{{ x }} a {{ response_format }}"])
def test_the_run_s_schema_in_prompts_of_rows_with_another_is_said(
    sevens: str, template: str
) -> None:
    heard = Heard()
    rows = [{"x": "x", "response_format": openai(digit("a"))}]
    prompt = PromptOptions(template=template)
    pipeline.plan(config(sevens, rows, schema=digit("own"), prompt=prompt), progress=heard)
    said = any("prompts show the run's schema" in text for text in heard.warnings)
    assert said is ("{{ schema }}" in template)


def test_a_row_can_show_its_own_schema_in_its_prompt(sevens: str) -> None:
    prompt = PromptOptions(template="{{ x }} {{ response_format }}")
    rows = [{"x": "x", "response_format": openai(digit("a"))}]
    view = pipeline.preview(config(sevens, rows, prompt=prompt), None).view
    assert '"properties"' in view.marked()
