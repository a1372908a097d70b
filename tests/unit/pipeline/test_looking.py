"""Answers beside their rows: of every format, of runs that go on, and what a terminal shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from instant_engine import InstantEngine
from rich.cells import cell_len

from batchradix import pipeline
from batchradix.config import EngineOptions, OutputOptions, RunConfig, SamplingOptions
from batchradix.errors import InputError, OptionError
from batchradix.pipeline import Wanted
from batchradix.report.show import arranged, print_layout, to_json
from batchradix.schema.answer_format import answer_format
from batchradix.trial import TrialOptions

MakeTinyModel = Callable[..., Path]
FIELDS = "kind: cat | dog, n: int"
ROWS = [
    {"id": f"r{n}", "prompt": f"row {n}", "size": n, "gold": {"kind": "cat", "n": n}}
    for n in range(6)
]


class Animals(InstantEngine):
    """Answers even rows rightly, row 3 with no JSON at all."""

    def text(self, row: int) -> str:
        if row == 3:
            return "no"
        return json.dumps({"kind": "dog" if row % 2 else "cat", "n": row})


class Stops(Animals):
    """Answers a few rows, and then never again."""

    def step(self) -> list[Any]:
        if len(self._waiting) <= 3:
            raise KeyboardInterrupt
        return super().step()


@pytest.fixture(scope="module")
def markov(tiny_model_folder: MakeTinyModel) -> str:
    return str(tiny_model_folder("markov"))


def config(model: str, rows: Any, path: Path, **changes: Any) -> RunConfig:
    options: dict[str, Any] = {
        "engine": EngineOptions(dtype="float32", num_threads=1),
        "sampling": SamplingOptions(max_tokens=100),
        "schema": answer_format(fields=FIELDS),
        "output": OutputOptions(path=path),
        "trial": TrialOptions(gold="gold"),
    }
    return RunConfig(input=rows, model=model, **options | changes)


def jsonl(folder: Path, rows: list[Any] = ROWS) -> str:
    path = folder / "in.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def looked(path: Path, columns: list[str] | None = None, **wanted: Any) -> list[dict[str, Any]]:
    return list(pipeline.look(path, Wanted(**wanted), columns).rows)


def ids(rows: list[dict[str, Any]]) -> list[str]:
    return [str(row["id"]) for row in rows]


@pytest.mark.parametrize("extension", [".arrow", ".parquet", ".jsonl", ".csv"])
def test_answers_stand_beside_their_input_in_every_format(
    markov: str, tmp_path: Path, extension: str
) -> None:
    path = tmp_path / f"out{extension}"
    pipeline.run(config(markov, jsonl(tmp_path), path), engines=lambda *_: Animals())
    rows = looked(path)
    assert ids(rows) == [row["id"] for row in ROWS]
    assert [row["size"] for row in rows] == list(range(6))
    assert [(row["value"] or {}).get("kind") for row in rows] == [
        "cat", "dog", "cat", None, "cat", "dog",
    ]  # fmt: skip
    assert list(rows[0])[:4] == ["id", "row", "status", "prompt"]
    assert ids(looked(path, statuses=["error"])) == ["r3"]
    assert ids(looked(path, id="r4")) == ["r4"]
    assert ids(looked(path, wrong=True)) == ["r1", "r3", "r5"]


@pytest.mark.parametrize("keep", ["all", ("gold",)])
def test_what_a_table_kept_needs_no_input(markov: str, tmp_path: Path, keep: Any) -> None:
    path = tmp_path / "out.parquet"
    name = jsonl(tmp_path)
    output = OutputOptions(path=path, keep=keep)
    pipeline.run(config(markov, name, path, output=output), engines=lambda *_: Animals())
    beside = looked(path)
    Path(name).unlink()
    assert ids(looked(path, wrong=True)) == ["r1", "r3", "r5"]
    if keep == "all":
        assert [sorted(row) for row in looked(path)] == [sorted(row) for row in beside]
    with pytest.raises(InputError, match="there is no file"):
        looked(path, input=name)


def test_rows_of_a_run_that_goes_on_are_read_from_its_shards(markov: str, tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    job = config(markov, jsonl(tmp_path), path)
    with pytest.raises(KeyboardInterrupt):
        pipeline.run(job, engines=lambda *_: Stops())
    partial = path.with_name("out.parquet.batchradix") / "tmp" / "shard-000009.partial"
    partial.write_bytes(b"being written by a run that holds the folder")
    shown = pipeline.look(path, Wanted(), None)
    assert "has committed 3 rows" in shown.note
    rows = list(shown.rows)
    assert ids(rows) == ["r0", "r1", "r2"]
    assert rows[1]["value"] == {"kind": "dog", "n": 1}
    assert rows[1]["size"] == 1
    assert "content_key" not in rows[0]
    assert ids(looked(path, wrong=True)) == ["r1"]
    assert partial.exists()
    assert ids(looked(path.with_name("out.parquet.batchradix"))) == ids(rows)
    pipeline.run(job, engines=lambda *_: Animals())
    assert len(looked(path)) == 6
    assert pipeline.look(path, Wanted(), None).note == ""


def test_a_sample_is_shown_beside_its_own_rows(markov: str, tmp_path: Path) -> None:
    path = tmp_path / "out.arrow"
    name = str(tmp_path / "in.parquet")
    pl.DataFrame(ROWS).write_parquet(name)
    trial = TrialOptions(sample=3, gold="gold")
    pipeline.run(config(markov, name, path, trial=trial), engines=lambda *_: Animals())
    rows = looked(path)
    assert len(rows) == 3
    assert all(row["prompt"] == f"row {row['row']}" for row in rows)


def test_answers_of_the_batch_api_are_shown_with_those_that_failed(
    markov: str, tmp_path: Path
) -> None:
    requests = [
        {
            "custom_id": f"r{n}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "m", "prompt": f"ask {n}", **({"best_of": 9} if n == 1 else {})},
        }
        for n in range(3)
    ]
    path = tmp_path / "out.jsonl"
    job = config(
        markov, jsonl(tmp_path, requests), path, schema=None, trial=TrialOptions(),
        output=OutputOptions(path=path, format="openai"),
    )  # fmt: skip
    pipeline.run(job, engines=lambda *_: Animals())
    rows = looked(path)
    assert [(row["id"], row["status"]) for row in rows] == [
        ("r0", "ok"), ("r2", "ok"), ("r1", "error"),
    ]  # fmt: skip
    assert [row["body"]["prompt"] for row in rows] == ["ask 0", "ask 2", "ask 1"]
    assert rows[0]["text"] == Animals().text(0)
    assert rows[2]["error"]["code"] == "unsupported_parameter"


def test_wrong_ones_cannot_be_known_without_right_ones(markov: str, tmp_path: Path) -> None:
    path = tmp_path / "out.arrow"
    job = replace(config(markov, jsonl(tmp_path), path), trial=TrialOptions())
    pipeline.run(job, engines=lambda *_: Animals())
    with pytest.raises(OptionError, match="had no"):
        looked(path, wrong=True)
    assert ids(looked(path, wrong=True, gold="gold")) == ["r1", "r3", "r5"]
    with pytest.raises(InputError, match="no column 'nothing'"):
        looked(path, wrong=True, gold="nothing")
    with pytest.raises(OptionError, match="must be one of"):
        Wanted(statuses=["lost"])


def test_columns_are_those_asked_for_or_those_that_tell_most() -> None:
    rows = [
        {"id": "a", "status": "ok", "value": {"n": 1, "size": 2}, "text": "{..", "error": None,
         "prompt_tokens": 3, "size": 9, "reasoning": "so"},
    ]  # fmt: skip
    assert arranged(rows, None).columns == ("id", "status", "n", "value.size", "size", "reasoning")
    chosen = arranged(rows, ["n", "value.size", "prompt_tokens", "nothing"])
    assert [chosen.rows[0].get(name) for name in chosen.columns] == [1, 2, 3, None]
    rows.append({"id": "b", "status": "error", "value": None, "text": "no"})
    assert "text" in arranged(rows, None).columns


NASTY = "\x1b[31mred\x1b[0m \u202eback [bold]x[/bold] :smile: \r\nline\x07 漢字 \ud800 \u2028⟦x⟧"


@pytest.mark.parametrize("width", [20, 33, 80, 200])
def test_nothing_in_a_row_reaches_the_terminal_but_text(
    capsys: pytest.CaptureFixture[str], width: int
) -> None:
    rows = [
        {"id": n, "status": "ok", NASTY: NASTY * 9, "text": {"a": NASTY, "b": [NASTY]}}
        for n in range(3)
    ]
    print_layout(arranged(rows, None), width=width, is_terminal=False)
    shown = capsys.readouterr().out
    assert all(char == "\n" or char.isprintable() for char in shown)
    assert max(cell_len(line) for line in shown.splitlines()) <= width
    assert "[bold]" in shown.replace("\n", "") or width < 40
    if width == 200:
        assert "␛[31mred" in shown
        assert ":smile:" in shown
        assert "…" in shown


def test_a_table_that_does_not_fit_becomes_a_list_of_records(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = {"id": "r", "status": "ok"} | {f"column{n}": f"value {n} " * 9 for n in range(6)}
    print_layout(arranged([row], None), width=60, is_terminal=False)
    lines = capsys.readouterr().out.splitlines()
    assert next(line.split()[0] for line in lines if "value 3" in line) == "column3"
    print_layout(arranged([row], None), width=120, is_terminal=False)
    assert "column0" in capsys.readouterr().out.splitlines()[0]


def test_json_has_every_digit_and_no_control_character() -> None:
    value = {"n": Decimal("12345678901234567890.1234"), "t": NASTY, "l": [1, None, True]}
    text = to_json(value)
    assert "12345678901234567890.1234" in text
    assert text.isprintable()
    assert json.loads(text, parse_float=Decimal) == value
