"""The column of probabilities, through the whole pipeline and a real, if tiny, model."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchradix import pipeline
from batchradix.api import LLM
from batchradix.config import EngineOptions, OutputOptions, RunConfig, SamplingOptions
from batchradix.errors import OptionError, OutputMismatchError, SchemaError
from batchradix.sink.columns import NORMALISER
from batchradix.sink.formats import read_table

KINDS = {"enum": ["spam", "ham", "spare", 'say "é"']}
CHOICES = KINDS["enum"]
FLAG = {"type": "boolean"}
COLUMN = pa.list_(pa.struct([("choice", pa.string()), ("probability", pa.float64())]))


@pytest.fixture(scope="module")
def model(tiny_model_folder: Callable[..., Path]) -> str:
    return str(tiny_model_folder("random", prepend_bos=False))


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.jsonl"
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("ab", "b", "ab", "cab")))
    return path


def config(model: str, source: Any, output: Path | None = None, **changes: Any) -> RunConfig:
    sampling = {"probabilities": True, "max_tokens": 40, **changes.pop("sampling", {})}
    options = changes.pop("output_options", {})
    return RunConfig(
        input=str(source) if isinstance(source, Path) else source,
        model=model,
        schema=changes.pop("schema", KINDS),
        sampling=SamplingOptions(**sampling),
        engine=EngineOptions(dtype="float32", num_threads=1),
        output=OutputOptions(path=output, **options),
    )


def table_of(configured: RunConfig) -> pa.Table:
    table = pipeline.run(configured).table
    assert table is not None
    return table


def test_every_choice_has_its_probability_in_the_order_of_the_schema(
    model: str, jobs: Path
) -> None:
    outcome = pipeline.run(config(model, jobs))
    table = outcome.table
    assert table is not None
    field = table.schema.field("probabilities")
    assert field.type == COLUMN
    assert field.metadata[b"batchradix.normaliser"].decode() == NORMALISER
    assert table.schema.names.index("probabilities") == table.schema.names.index("value") + 1
    rows = table["probabilities"].to_pylist()
    for row in rows:
        assert [entry["choice"] for entry in row] == CHOICES
        assert math.isclose(sum(entry["probability"] for entry in row), 1)
    assert rows[0] == rows[2]  # the same prompt, answered once
    assert rows[0] != rows[1]
    plain = table_of(config(model, jobs, sampling={"probabilities": False}))
    assert "probabilities" not in plain.schema.names
    assert plain["text"] == table["text"]
    assert plain["completion_tokens"] == table["completion_tokens"]
    # s, h / p, a / a, "\"" part: three places, the first where the opening ends.
    assert outcome.summary.usage.decode_steps == 3 * 2


def test_joint_takes_the_likeliest_choice(model: str, jobs: Path) -> None:
    prompts = [{"prompt": f"{n}"} for n in range(30)]
    table = table_of(config(model, prompts, sampling={"choose": "joint"}))
    for row in table.to_pylist():
        best = max(row["probabilities"], key=lambda entry: entry["probability"])
        assert row["value"] == best["choice"]


@pytest.mark.parametrize("ending", ["arrow", "parquet", "jsonl", "csv"])
def test_every_format_holds_the_column_and_rows_that_were_committed_keep_it(
    ending: str, model: str, jobs: Path, tmp_path: Path
) -> None:
    output = tmp_path / f"out.{ending}"
    pipeline.run(config(model, jobs, output))
    with jobs.open("a") as file:
        file.write('{"prompt": "new"}\n{"prompt": null}\n')
    summary = pipeline.run(config(model, jobs, output)).summary
    assert summary.resumed_rows == 4
    expected = table_of(config(model, jobs))["probabilities"].to_pylist()
    assert expected[-1] is None
    if ending == "jsonl":
        lines = output.read_text().splitlines()
        found = [json.loads(line).get("probabilities") for line in lines]
    elif ending == "csv":
        with output.open(newline="") as file:
            cells = [row["probabilities"] for row in csv.DictReader(file)]
        found = [json.loads(cell) if cell else None for cell in cells]
    else:
        table = read_table(output)
        assert table.schema.field("probabilities").type == COLUMN
        found = table["probabilities"].to_pylist()
    assert len(found) == len(expected) == 6
    for ours, theirs in zip(found[:5], expected[:5], strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a["choice"] == b["choice"]
            assert math.isclose(a["probability"], b["probability"], rel_tol=1e-5)
    assert not found[-1]
    with pytest.raises(OutputMismatchError, match="probabilities"):
        pipeline.run(config(model, jobs, output, sampling={"probabilities": False}))


def test_the_column_has_its_type_when_every_row_failed(model: str) -> None:
    table = table_of(config(model, [{"prompt": None}, {"prompt": None}]))
    assert table.schema.field("probabilities").type == COLUMN
    assert table["probabilities"].to_pylist() == [None, None]


def test_objects_are_named_by_their_json_and_unnest_beside_it(model: str) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": FLAG, "n": {"enum": [1, None]}},
        "required": ["ok"],
    }
    table = table_of(
        config(model, [{"prompt": "x"}], schema=schema, output_options={"unnest": True})
    )
    assert table.schema.names[3:6] == ["ok", "n", "probabilities"]
    [row] = table["probabilities"].to_pylist()
    assert [entry["choice"] for entry in row] == [
        '{"ok":true,"n":1}', '{"ok":true,"n":null}', '{"ok":true}',
        '{"ok":false,"n":1}', '{"ok":false,"n":null}', '{"ok":false}',
    ]  # fmt: skip
    with pytest.raises(OptionError, match="probabilities; rename"):
        pipeline.run(config(model, [{"prompt": "x", "probabilities": 1}], output_options={
            "keep": ("probabilities",)}))  # fmt: skip


def test_an_llm_gives_them_too(model: str) -> None:
    sampling = SamplingOptions(probabilities=True, max_tokens=40)
    with LLM(model, engine=EngineOptions(dtype="float32", num_threads=1, kv_tokens=500)) as llm:
        for _ in range(2):
            [one, other] = llm.generate(["a", "b"], schema=KINDS, sampling=sampling)
            assert one.probabilities is not None
            assert math.isclose(sum(one.probabilities), 1)
            assert one.probabilities != other.probabilities
        [plain] = llm.generate(["a"], schema=KINDS, sampling=SamplingOptions(max_tokens=40))
        assert plain.probabilities is None
        assert plain.text == one.text
        with pytest.raises(SchemaError, match="at most 256 are allowed"):
            llm.generate(["a"], schema=many(300), sampling=sampling)


def many(num_pairs: int) -> dict[str, Any]:
    """An enum of twice as many texts, every two of which part at a place of their own."""
    return {"enum": [f"{chr(0x4E00 + n)}{end}" for n in range(num_pairs) for end in "ab"]}


@pytest.mark.parametrize("sampling", [{}, {"probabilities": False, "choose": "joint"}])
@pytest.mark.parametrize(
    ("schema", "error", "message"),
    [
        (None, OptionError, "needs answers out of a few"),
        ({"type": "string"}, OptionError, "this one is more open"),
        (many(300), SchemaError, "at most 256"),
    ],
)
def test_what_has_no_few_choices_is_refused_before_weights_load(
    sampling: dict[str, Any], schema: Any, error: type[Exception], message: str, model: str
) -> None:
    class NoEngine(pipeline.RadixEngines):
        def __call__(self, settings: Any) -> Any:
            raise AssertionError("weights were loaded")

    with pytest.raises(error, match=message):
        pipeline.run(
            config(model, [{"prompt": "x"}], schema=schema, sampling=sampling), engines=NoEngine
        )


def test_keywords_that_the_list_of_choices_enforces_are_not_said_to_be_unenforced(
    model: str,
) -> None:
    schema = {"type": "integer", "minimum": 0, "maximum": 9, "not": {"enum": [3]}}
    open_schema = {"type": "integer", "not": {"enum": [3]}}
    for asked, is_said in ((schema, False), (open_schema, True)):
        rows = [{"prompt": "x"}]
        configured = config(model, rows, schema=asked, sampling={"probabilities": not is_said})
        warnings = pipeline.run(configured).summary.warnings
        assert any("not enforced" in text for text in warnings) == is_said


def test_a_row_that_wants_to_draw_where_the_likeliest_is_taken_is_an_error_row(
    model: str,
) -> None:
    rows = [{"prompt": "x", "temperature": 0.5}, {"prompt": "x"}]
    first, second = table_of(config(model, rows, sampling={"choose": "joint"})).to_pylist()
    assert first["error"]["code"] == "bad_setting"
    assert "column temperature: choose joint" in first["error"]["message"]
    assert second["status"] == "ok"
    with pytest.raises(OptionError, match="temperature must be 0"):
        SamplingOptions(choose="joint", temperature=1.0)


def test_a_row_whose_budget_is_below_the_longest_choice_is_an_error_row(model: str) -> None:
    rows = [{"prompt": "x", "max_tokens": 6}, {"prompt": "x", "max_tokens": 40}]
    first, second = table_of(config(model, rows)).to_pylist()
    assert first["error"]["code"] == "bad_setting"
    assert first["probabilities"] is None
    assert second["status"] == "ok"
