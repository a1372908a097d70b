"""Truncated rows in the table, and budgets that are too small for any answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchradix import pipeline
from batchradix.api import LLM
from batchradix.checkpoint.checkpoint import Checkpoint
from batchradix.config import EngineOptions, OutputOptions, RunConfig
from batchradix.config import SamplingOptions as Sampling
from batchradix.errors import OptionError, OutputMismatchError
from batchradix.schema.output_schema import OutputSchema
from batchradix.settings import EngineSettings
from batchradix.types import Engine, GrammarSpec, Status

MakeTinyModel = Callable[..., Path]
STRING = {"type": "string"}


def object_of(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


NOTE = object_of(note=STRING, tags={"type": "array", "items": {"enum": ["x"]}})


@pytest.fixture(scope="module")
def model(tiny_model_folder: MakeTinyModel) -> str:
    """Writes ``a`` for ever where it may."""
    return str(tiny_model_folder("const", prefer="a"))


def config(model: str, max_tokens: int | None = 40, **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "input": [{"id": "r", "prompt": "x"}],
        "model": model,
        "schema": NOTE,
        "sampling": Sampling(max_tokens=max_tokens),
        "engine": EngineOptions(dtype="float32", num_threads=1),
    }
    return RunConfig(**(values | changes))


def rows_of(job: RunConfig, **how: Any) -> list[dict[str, Any]]:
    table = pipeline.run(job, **how).table
    assert table is not None
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


class NoEngines:
    """Refuses to load weights."""

    def __init__(self, checkpoint: Checkpoint, schema: OutputSchema | None) -> None:
        self.opening = pipeline.RadixEngines(checkpoint, schema).opening

    def check_scores(self, spec: GrammarSpec) -> None:
        return

    def __call__(self, settings: EngineSettings) -> Engine:
        raise AssertionError("weights were loaded")


WHOLE = '{"note":"' + "a" * 19 + '","tags":[]}'


def test_a_truncated_row_has_closed_text_and_no_value(model: str) -> None:
    [row] = rows_of(config(model))
    assert (row["status"], row["finish_reason"]) == ("truncated", "length")
    assert (row["value"], row["error"]) == (None, None)
    assert row["text"] == WHOLE
    assert row["completion_tokens"] == len(WHOLE) == 40
    assert "cut" not in row


def test_kept_truncated_rows_have_the_closed_value_and_say_where_it_was_cut(model: str) -> None:
    rows = [{"prompt": "x"}, {"prompt": "x", "max_tokens": 2}]
    job = config(model, input=rows, output=OutputOptions(keep_truncated=True))
    kept, failed = rows_of(job)
    assert kept["status"] == "truncated"
    assert kept["value"] == {"note": "a" * 19, "tags": []}
    assert kept["cut"] == "/note"
    assert (failed["status"], failed["value"], failed["cut"]) == ("error", None, None)
    assert list(kept)[:6] == ["id", "row", "status", "value", "cut", "text"]


def test_a_whole_answer_was_cut_nowhere(model: str) -> None:
    schema = object_of(s={"type": "string", "maxLength": 3})
    [row] = rows_of(config(model, schema=schema, output=OutputOptions(keep_truncated=True)))
    assert (row["status"], row["cut"]) == ("ok", None)


def test_a_closed_value_that_only_validation_catches_is_not_kept(
    tiny_model_folder: MakeTinyModel,
) -> None:
    schema = {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 9},
        "minItems": 2,
        "uniqueItems": True,
    }
    model = str(tiny_model_folder("const", prefer="7,]"))
    output = OutputOptions(keep_truncated=True)
    [row] = rows_of(config(model, 8, schema=schema, output=output))
    assert (row["status"], row["error"], row["value"]) == ("truncated", None, None)
    assert (row["text"], row["cut"]) == ("[7,7,7]", "/2")


def test_unnested_fields_of_a_truncated_row_are_null_unless_kept(model: str) -> None:
    [plain] = rows_of(config(model, output=OutputOptions(unnest=True)))
    assert (plain["note"], plain["tags"]) == (None, None)
    [kept] = rows_of(config(model, output=OutputOptions(unnest=True, keep_truncated=True)))
    assert (kept["note"], kept["tags"], kept["cut"]) == ("a" * 19, [], "/note")


@pytest.mark.parametrize("extension", ["arrow", "parquet", "jsonl", "csv"])
def test_the_option_can_change_on_a_finished_run_without_running_a_row_again(
    model: str, tmp_path: Path, extension: str
) -> None:
    path = tmp_path / f"out.{extension}"
    outputs = [OutputOptions(path=path, keep_truncated=keep) for keep in (False, True, False)]
    first = pipeline.run(config(model, output=outputs[0]))
    assert (first.summary.truncated, first.summary.resumed_rows) == (1, 0)
    before = path.read_bytes()
    second = pipeline.run(config(model, output=outputs[1]), engines=NoEngines)
    assert (second.summary.truncated, second.summary.resumed_rows) == (1, 1)
    assert b"/note" in path.read_bytes() or extension in ("arrow", "parquet")
    if extension == "parquet":
        [row] = pq.read_table(path).to_pylist()
        assert (row["value"], row["cut"]) == ({"note": "a" * 19, "tags": []}, "/note")
    pipeline.run(config(model, output=outputs[2]), engines=NoEngines)
    assert path.read_bytes() == before


def test_without_a_schema_there_is_nothing_to_keep(model: str) -> None:
    job = config(model, schema=None, output=OutputOptions(keep_truncated=True))
    with pytest.raises(OptionError, match="keep_truncated needs a schema"):
        pipeline.run(job, engines=NoEngines)


def test_the_column_s_name_may_not_be_taken(model: str) -> None:
    job = config(
        model,
        input=pa.table({"prompt": ["x"], "cut": [1]}),
        output=OutputOptions(keep=("cut",), keep_truncated=True),
    )
    with pytest.raises(OptionError, match="cut"):
        pipeline.run(job, engines=NoEngines)


def test_an_llm_keeps_closed_values_when_asked(model: str) -> None:
    options = EngineOptions(dtype="float32", num_threads=1, kv_tokens=600)
    with LLM(model, engine=options) as llm:
        for keep, value, cut in (
            (False, None, None),
            (True, {"note": "a" * 19, "tags": []}, "/note"),
        ):
            [result] = llm.generate(
                "x", schema=NOTE, sampling=Sampling(max_tokens=40), keep_truncated=keep
            )
            assert result.status is Status.TRUNCATED
            assert (result.value, result.cut, result.text) == (value, cut, WHOLE)
        with pytest.raises(OptionError, match="max_tokens is 3"):
            llm.generate("x", schema=NOTE, sampling=Sampling(max_tokens=3))


def test_answers_in_circles_are_truncated_with_their_reason_unless_allowed(model: str) -> None:
    [row] = rows_of(config(model, None))
    assert (row["status"], row["finish_reason"]) == ("truncated", "repetition")
    assert row["completion_tokens"] < 200
    allowed = EngineOptions(dtype="float32", num_threads=1, repetition_guard=False)
    [row] = rows_of(config(model, None, engine=allowed))
    assert (row["status"], row["finish_reason"]) == ("truncated", "length")
    assert row["completion_tokens"] > 400
    [row] = rows_of(config(model, 300, schema=None))
    assert (row["status"], row["finish_reason"]) == ("ok", "length")


def test_the_guard_is_part_of_what_a_table_is(model: str, tmp_path: Path) -> None:
    output = OutputOptions(path=tmp_path / "out.jsonl")
    pipeline.run(config(model, output=output))
    allowed = EngineOptions(dtype="float32", num_threads=1, repetition_guard=False)
    with pytest.raises(OutputMismatchError, match="repetition_guard"):
        pipeline.run(config(model, output=output, engine=allowed), engines=NoEngines)


def test_a_budget_below_every_answer_is_refused_before_weights_load(
    model: str, tmp_path: Path
) -> None:
    shortest = '{"note":"","tags":[]}'
    output = OutputOptions(path=tmp_path / "out.jsonl")
    with pytest.raises(OptionError) as refused:
        pipeline.run(config(model, len(shortest) - 1, output=output), engines=NoEngines)
    assert f"max_tokens is 20, and the shortest answer of the schema, {shortest}, takes 21" in str(
        refused.value
    )
    assert not (tmp_path / "out.jsonl").exists()
    [row] = rows_of(config(model, len(shortest)))
    assert (row["status"], row["text"]) == ("truncated", shortest)


def test_rows_without_room_for_an_answer_are_errors_and_stop_no_other(model: str) -> None:
    rows = [
        {"prompt": "x", "max_tokens": 20},
        {"prompt": "y" * 500},  # one of 512 tokens is <bos>
        {"prompt": "z"},
    ]
    small, long, fine = rows_of(config(model, input=rows))
    assert small["error"]["code"] == "bad_setting"
    assert "row 0: max_tokens is 20" in small["error"]["message"]
    assert long["error"]["code"] == "prompt_too_long"
    assert "501 tokens and leaves 11 of the context" in long["error"]["message"]
    assert fine["status"] == "truncated"
