"""The joints: rows, prompts, plan, engine and sink as one job, on tiny checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from instant_engine import InstantEngine

from batchradix import pipeline
from batchradix.checkpoint.checkpoint import Checkpoint
from batchradix.config import EngineOptions, OutputOptions, RunConfig, SamplingOptions
from batchradix.errors import InputError, OutputMismatchError, SchemaError, TemplateError
from batchradix.schema.output_schema import OutputSchema

MakeTinyModel = Callable[..., Path]
DIGIT = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
}


@pytest.fixture(scope="module")
def markov(tiny_model_folder: MakeTinyModel) -> str:
    return str(tiny_model_folder("markov"))


def config(model: str, rows: Any, **changes: Any) -> RunConfig:
    options: dict[str, Any] = {
        "engine": EngineOptions(dtype="float32", num_threads=1),
        "sampling": SamplingOptions(max_tokens=4),
    }
    return RunConfig(input=rows, model=model, **options | changes)


def run_table(job: RunConfig) -> list[dict[str, Any]]:
    outcome = pipeline.run(job)
    assert outcome.table is not None
    rows: list[dict[str, Any]] = outcome.table.to_pylist()
    return rows


def test_each_row_gets_its_own_answer_in_input_order(markov: str) -> None:
    rows = [{"id": c, "prompt": f"shared {c}"} for c in "xbqa"]
    found = run_table(config(markov, rows))
    assert [(row["id"], row["text"]) for row in found] == [
        ("x", "yzab"),
        ("b", "cdef"),
        ("q", "rstu"),
        ("a", "bcde"),
    ]
    assert [row["row"] for row in found] == [0, 1, 2, 3]


def test_equal_rows_run_once_and_answer_each(markov: str) -> None:
    rows = [{"id": i, "prompt": "same a"} for i in range(5)]
    outcome = pipeline.run(config(markov, rows))
    assert outcome.table is not None
    assert outcome.table["text"].to_pylist() == ["bcde"] * 5
    assert outcome.summary.duplicate_rows == 4
    assert outcome.summary.usage.completion_tokens == 4
    assert outcome.summary.usage.computed_tokens == outcome.summary.distinct_tokens == 7


def test_rows_that_differ_in_settings_alone_are_kept_apart(markov: str) -> None:
    rows = [{"prompt": "a"}, {"prompt": "a", "max_tokens": 2}, {"prompt": "a", "stop": "d"}]
    assert [row["text"] for row in run_table(config(markov, rows))] == ["bcde", "bc", "bc"]


def test_every_kind_of_bad_row_is_an_error_row_and_the_rest_are_answered(
    markov: str, tmp_path: Path
) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text(
        '{"id": "good", "prompt": "a"}\n'
        "{torn\n"
        '{"id": "none"}\n'
        '{"id": "null", "prompt": null}\n'
        '{"id": "setting", "prompt": "a", "temperature": "hot"}\n'
        f'{{"id": "long", "prompt": "{"x" * 600}"}}\n'
        '{"id": "last", "prompt": "b"}\n'
    )
    found = run_table(config(markov, str(path)))
    codes = [row["error"] and row["error"]["code"] for row in found]
    assert codes == [
        None,
        "bad_line",
        "missing_field",
        "null_field",
        "bad_setting",
        "prompt_too_long",
        None,
    ]
    assert [row["status"] for row in found] == ["ok", *["error"] * 5, "ok"]
    assert "line 2" in found[1]["error"]["message"]
    assert "row 5" in found[5]["error"]["message"]


def test_an_answer_cut_short_is_ok_as_text_and_truncated_under_a_schema(
    tiny_model_folder: MakeTinyModel,
) -> None:
    model = str(tiny_model_folder("const", prefer='7}"1'))
    schema = {"type": "array", "items": {"enum": [7]}, "maxItems": 4}
    rows = [{"prompt": "x", "max_tokens": n} for n in (4, 64)]
    assert [row["status"] for row in run_table(config(model, rows))] == ["ok", "ok"]
    found = run_table(config(model, rows, schema=schema))
    assert [row["status"] for row in found] == ["truncated", "ok"]
    assert [row["value"] for row in found] == [None, [7, 7, 7, 7]]
    assert found[0]["text"] == "[7]"
    assert [row["finish_reason"] for row in found] == ["length", "stop"]


def test_an_answer_that_only_validation_catches_is_an_error_row(
    tiny_model_folder: MakeTinyModel,
) -> None:
    model = str(tiny_model_folder("const", prefer='7,]"1'))
    schema = {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": 99},
        "minItems": 2,
        "maxItems": 2,
        "uniqueItems": True,
    }
    [row] = run_table(config(model, [{"prompt": "x"}], schema=schema, sampling=SamplingOptions()))
    assert row["status"] == "error"
    assert row["error"]["code"] == "schema_mismatch"
    assert row["value"] is None
    assert row["text"] == "[77,77]"


def test_a_stop_string_that_cuts_a_structured_answer_is_named(
    tiny_model_folder: MakeTinyModel,
) -> None:
    model = str(tiny_model_folder("const", prefer='7,]"1'))
    schema = {"type": "array", "items": {"type": "integer", "maximum": 9}}
    stop = SamplingOptions(stop=(",",), max_tokens=30)
    [row] = run_table(config(model, [{"prompt": "x"}], schema=schema, sampling=stop))
    assert (row["status"], row["error"]["code"]) == ("error", "invalid_json")
    assert "its stop strings (',') may have cut it" in row["error"]["message"]


def test_no_rows_make_an_empty_table_of_the_same_columns(markov: str, tmp_path: Path) -> None:
    empty, one = tmp_path / "empty.jsonl", tmp_path / "one.jsonl"
    empty.write_text("")
    one.write_text('{"prompt": "a"}\n')
    sampling = SamplingOptions(max_tokens=9)
    jobs = [config(markov, str(p), schema=DIGIT, sampling=sampling) for p in (empty, one)]
    tables = [pipeline.run(job).table for job in jobs]
    assert tables[0] is not None
    assert tables[1] is not None
    assert tables[0].num_rows == 0
    assert tables[0].schema.equals(tables[1].schema)


def test_kept_columns_stand_beside_their_rows(markov: str) -> None:
    table = pa.table({"id": [7, 8], "prompt": ["a", "b"], "tag": ["x", None]})
    found = run_table(config(markov, table, output=OutputOptions(keep=("tag",))))
    assert [(row["id"], row["tag"], row["text"]) for row in found] == [
        (7, "x", "bcde"),
        (8, None, "cdef"),
    ]


def test_bad_jobs_are_refused_before_an_engine_is_made(markov: str, tmp_path: Path) -> None:
    def never(checkpoint: Checkpoint, schema: OutputSchema | None) -> Any:
        raise AssertionError("the engine was asked for")

    rows = [{"text": "a"}]
    for changes, error in [
        ({"schema": {"type": "nonsense"}}, SchemaError),
        ({"input": str(tmp_path / "missing.parquet")}, InputError),
        ({}, InputError),
    ]:
        job = config(markov, changes.pop("input", rows), **changes)
        with pytest.raises(error):
            pipeline.run(job, engines=never)
    from batchradix.config import PromptOptions

    with pytest.raises(TemplateError, match="nope"):
        pipeline.run(config(markov, rows, prompt=PromptOptions(template="{{ nope }}")))


class Echo(InstantEngine):
    """Answers with the row's number."""

    def text(self, row: int) -> str:
        return f"row {row}"


@pytest.fixture
def echo() -> Echo:
    return Echo()


def stop_after(steps: int) -> Callable[[], int | None]:
    counted: Iterator[int] = iter(range(10**9))
    return lambda: 15 if next(counted) >= steps else None


def test_a_stopped_run_goes_on_with_the_rows_that_are_left(
    markov: str, tmp_path: Path, echo: Echo
) -> None:
    rows = [{"id": f"r{i}", "prompt": f"p {i}"} for i in range(6)]
    job = config(markov, rows, output=OutputOptions(path=tmp_path / "out.parquet"))
    first = pipeline.run(job, engines=echo, stop_requested=stop_after(4))
    assert first.summary.stopped_by == 15
    assert first.summary.rows == 4
    assert echo.closed
    assert not (tmp_path / "out.parquet").exists()
    again = Echo()
    second = pipeline.run(job, engines=again)
    assert (echo.submitted, again.submitted) == ([0, 1, 2, 3, 4, 5], [4, 5])
    assert (second.summary.rows, second.summary.ok, second.summary.resumed_rows) == (6, 6, 4)
    table = pq.read_table(tmp_path / "out.parquet")
    assert table["id"].to_pylist() == [f"r{i}" for i in range(6)]
    assert table["text"].to_pylist() == [f"row {i}" for i in range(6)]


def test_a_killed_run_would_leave_no_token_files_behind(
    markov: str, tmp_path: Path, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left: list[Path] = []

    def look() -> None:
        left.extend(tmp_path.iterdir())

    job = config(markov, [{"prompt": f"p {i}"} for i in range(3)])
    outcome = pipeline.run(job, engines=echo, stop_requested=look)
    assert outcome.summary.ok == 3
    assert left == []


def test_a_finished_run_makes_no_engine_and_leaves_the_file_alone(
    markov: str, tmp_path: Path, echo: Echo
) -> None:
    path = tmp_path / "out.arrow"
    job = config(markov, [{"prompt": "a"}], output=OutputOptions(path=path))
    pipeline.run(job, engines=echo)
    before = (path.stat().st_mtime_ns, path.read_bytes())
    again = Echo()
    outcome = pipeline.run(job, engines=again)
    assert again.submitted == []
    assert outcome.summary.ok == outcome.summary.resumed_rows == 1
    assert (path.stat().st_mtime_ns, path.read_bytes()) == before


def test_an_edited_row_runs_again_and_the_others_do_not(
    markov: str, tmp_path: Path, echo: Echo
) -> None:
    output = OutputOptions(path=tmp_path / "out.jsonl")
    rows = [{"id": i, "prompt": f"p {i}"} for i in range(4)]
    pipeline.run(config(markov, rows, output=output), engines=echo)
    rows[2]["prompt"] = "another"
    again = Echo()
    pipeline.run(config(markov, rows, output=output), engines=again)
    assert again.submitted == [2]
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == [0, 1, 2, 3]


def test_duplicates_left_over_by_a_stop_take_the_answer_that_is_committed(
    markov: str, tmp_path: Path, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"id": i, "prompt": "same"} for i in range(4)]
    job = config(markov, rows, output=OutputOptions(path=tmp_path / "out.jsonl"))
    # As after a kill between the commit of a leader and that of its duplicates.
    monkeypatch.setattr("batchradix.sink.shards.COMMIT_ROWS", 1)
    taken = 0
    from batchradix.sink.shards import ShardWriter

    append = ShardWriter.append

    def failing(self: ShardWriter, result: Any) -> None:
        nonlocal taken
        taken += 1
        if taken > 2:
            raise KeyboardInterrupt
        append(self, result)

    monkeypatch.setattr(ShardWriter, "append", failing)
    with pytest.raises(KeyboardInterrupt):
        pipeline.run(job, engines=echo)
    monkeypatch.setattr(ShardWriter, "append", append)
    again = Echo()
    outcome = pipeline.run(job, engines=again)
    assert again.submitted == []
    assert outcome.summary.rows == outcome.summary.ok == outcome.summary.resumed_rows == 4
    undisturbed = replace(job, output=OutputOptions(path=tmp_path / "whole.jsonl"))
    pipeline.run(undisturbed, engines=Echo())
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_another_job_on_the_same_output_is_refused_and_says_what_changed(
    markov: str, tmp_path: Path, echo: Echo
) -> None:
    output = OutputOptions(path=tmp_path / "out.jsonl")
    rows = [{"prompt": "a"}]
    pipeline.run(config(markov, rows, output=output), engines=echo)
    changed = config(markov, rows, output=output, sampling=SamplingOptions(max_tokens=5))
    with pytest.raises(OutputMismatchError, match="max_tokens: 4 → 5"):
        pipeline.run(changed, engines=Echo())
    restarted = config(
        markov,
        rows,
        output=OutputOptions(path=tmp_path / "out.jsonl", restart=True),
        sampling=SamplingOptions(max_tokens=5),
    )
    assert pipeline.run(restarted, engines=Echo()).summary.ok == 1


def test_plan_counts_what_rows_share(markov: str) -> None:
    rows = [{"prompt": p} for p in ("abc", "abd", "abd", "x")]
    summary = pipeline.plan(config(markov, rows))
    # each prompt begins with one <bos>
    assert (summary.rows, summary.planned_rows, summary.duplicates) == (4, 3, 1)
    assert (summary.prompt_tokens, summary.distinct_tokens) == (14, 6)


def test_preview_shows_the_row_that_was_asked_for(markov: str) -> None:
    rows = [{"id": "one", "prompt": "a"}, {"id": "1", "prompt": "b"}, {"id": "z", "prompt": "c"}]
    job = config(markov, rows)
    assert pipeline.preview(job, None).view.text == "<bos>a"
    assert pipeline.preview(job, "1").view.text == "<bos>b"  # an id goes before a number
    assert pipeline.preview(job, "2").view.text == "<bos>c"
    with pytest.raises(InputError, match="no row with the id or number 'q'"):
        pipeline.preview(job, "q")
