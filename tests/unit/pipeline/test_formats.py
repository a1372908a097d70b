"""Answers of every format, from the options to the finished table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from instant_engine import InstantEngine

import batchradix
from batchradix import pipeline
from batchradix.config import EngineOptions, OutputOptions, RunConfig, SamplingOptions
from batchradix.errors import OptionError, SchemaError
from batchradix.schema.answer_format import answer_format
from batchradix.sink.formats import read_table
from batchradix.types import EngineJob, GrammarSpec

MakeTinyModel = Callable[..., Path]


@pytest.fixture(scope="module")
def sevens(tiny_model_folder: MakeTinyModel) -> str:
    """A model that writes 7 wherever it may."""
    return str(tiny_model_folder("const", prefer='7}"1'))


def config(model: str, rows: Any, **changes: Any) -> RunConfig:
    options: dict[str, Any] = {
        "engine": EngineOptions(dtype="float32", num_threads=1),
        "sampling": SamplingOptions(max_tokens=32),
    }
    return RunConfig(input=rows, model=model, **options | changes)


def run_table(job: RunConfig) -> pa.Table:
    table = pipeline.run(job).table
    assert table is not None
    return table


def test_an_answer_under_a_pattern_is_its_text(sevens: str) -> None:
    table = run_table(config(sevens, [{"prompt": "x"}], schema=answer_format(regex=r"n=\d{3}")))
    assert table["value"].type == pa.string()
    assert table["value"].to_pylist() == table["text"].to_pylist() == ["n=777"]
    assert table["status"].to_pylist() == ["ok"]


def test_an_answer_that_a_stop_string_cut_breaks_its_pattern(sevens: str) -> None:
    job = config(
        sevens,
        [{"prompt": "x"}],
        schema=answer_format(regex=r"n=\d{3}"),
        sampling=SamplingOptions(stop=("=7",)),
    )
    [row] = run_table(job).to_pylist()
    assert (row["status"], row["error"]["code"]) == ("error", "schema_mismatch")


def test_an_answer_under_a_grammar_is_its_text(sevens: str) -> None:
    grammar = 'root ::= num ("+" num){2}\nnum ::= [0-9]\n'
    table = run_table(config(sevens, [{"prompt": "x"}], schema=answer_format(grammar=grammar)))
    assert table["value"].to_pylist() == ["7+7+7"]


def test_a_stop_string_is_refused_beside_a_grammar_of_ones_own(sevens: str) -> None:
    job = config(
        sevens,
        [{"prompt": "x"}],
        schema=answer_format(grammar='root ::= "a"'),
        sampling=SamplingOptions(stop=("x",)),
    )
    with pytest.raises(OptionError, match="stop and grammar exclude each other"):
        pipeline.run(job)


def test_a_row_s_stop_string_beside_a_grammar_is_that_row_s_error(sevens: str) -> None:
    rows = [{"prompt": "x", "stop": "7"}, {"prompt": "x"}]
    found = run_table(config(sevens, rows, schema=answer_format(grammar="root ::= [0-9]")))
    assert found["value"].to_pylist() == [None, "7"]
    error = found["error"][0].as_py()
    assert error["code"] == "bad_setting"
    assert error["message"].startswith("row 0, column stop: ")


def test_a_broken_grammar_is_refused_before_an_engine_is_made(sevens: str) -> None:
    job = config(sevens, [{"prompt": "x"}], schema=answer_format(grammar="root ::= nowhere"))
    with pytest.raises(SchemaError, match="nowhere"):
        pipeline.run(job)


def test_json_lines_quote_an_answer_that_only_looks_like_json(sevens: str, tmp_path: Path) -> None:
    output = OutputOptions(path=tmp_path / "out.jsonl")
    job = config(sevens, [{"prompt": "x"}], schema=answer_format(regex=r"\d"), output=output)
    pipeline.run(job)
    [line] = (tmp_path / "out.jsonl").read_text().splitlines()
    assert json.loads(line)["value"] == "7"


KINDS = {
    "type": "object",
    "properties": {"kind": {"enum": ["7", "8"]}},
    "required": ["kind"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("unnest", [False, True])
@pytest.mark.parametrize("ending", ["arrow", "parquet", "jsonl", "csv"])
def test_texts_to_choose_from_are_a_dictionary_in_every_file(
    sevens: str, tmp_path: Path, ending: str, unnest: bool
) -> None:
    path = tmp_path / f"out.{ending}"
    rows: list[dict[str, Any]] = [{"prompt": "x"}, {"prompt": None}, {"prompt": "y"}]
    output = OutputOptions(path=path, unnest=unnest)
    pipeline.run(config(sevens, rows, schema=KINDS, output=output))
    if ending == "jsonl":
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["kind"] if unnest else line["value"] for line in lines] == (
            ["7", None, "7"] if unnest else [{"kind": "7"}, None, {"kind": "7"}]
        )
        return
    if ending == "csv":
        assert path.read_text().count("7") >= 2
        return
    table = read_table(path)
    column = table["kind"] if unnest else table["value"].combine_chunks().field("kind")
    assert column.type == pa.dictionary(pa.int32(), pa.string())
    assert column.to_pylist() == ["7", None, "7"]


def test_fields_are_a_schema_whose_text_stands_in_the_prompt(sevens: str) -> None:
    table = batchradix.run(
        [{"x": "a"}],
        model=sevens,
        fields="n: int?",
        template="{{ x }} as {{ schema }}",
        sampling=SamplingOptions(max_tokens=8),
    ).to_arrow()
    assert table["value"].type == pa.struct([("n", pa.int64())])
    assert table["prompt_tokens"][0].as_py() > len("a as ")


class Answering(InstantEngine):
    """Answers every row with one text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def submit(self, job: EngineJob) -> int:
        assert {settings.grammar for settings in job.requests.settings} == {
            GrammarSpec(kind="choices", source='["yes","no"]')
        }
        return super().submit(job)

    def text(self, row: int) -> str:
        return self._text


@pytest.mark.parametrize(
    ("text", "value", "code"), [("no", "no", None), ("maybe", None, "schema_mismatch")]
)
def test_an_answer_out_of_choices_is_a_dictionary_and_checked(
    sevens: str, text: str, value: str | None, code: str | None
) -> None:
    job = config(sevens, [{"prompt": "x"}], schema=answer_format(choices=["yes", "no"]))
    table = pipeline.run(job, engines=Answering(text)).table
    assert table is not None
    assert table["value"].type == pa.dictionary(pa.int32(), pa.string())
    assert table["value"].to_pylist() == [value]
    [error] = table["error"].to_pylist()
    assert (error and error["code"]) == code


def test_a_loaded_model_takes_every_format(sevens: str) -> None:
    options = EngineOptions(dtype="float32", num_threads=1, kv_tokens=500)
    short = SamplingOptions(max_tokens=16)
    with batchradix.LLM(sevens, engine=options) as llm:
        [one] = llm.generate("x", regex=r"n=\d", sampling=short)
        [two] = llm.generate("x", grammar='root ::= [0-9] "!"', sampling=short)
        [three] = llm.generate("x", fields="kind: 7|8", retries=1, sampling=short)
    assert (one.value, two.value, three.value) == ("n=7", "7!", {"kind": "7"})
