"""Every ok row of a finished table holds a valid value, whichever format it was written in.

The judge is a validator that the package does not use, on the table as it is read back.
"""

from __future__ import annotations

import datetime
import decimal
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jsonschema import Draft202012Validator

FORMATS = ("arrow", "parquet", "jsonl")
TEXTS = ("Dear sir, please find the invoice below.", "You are invited!", "Ünïcode 北京", "{", "1")
Command = Callable[..., int]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """Runs the command line in an empty folder; its exit code."""
    from batchradix.cli.main import main

    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["batchradix", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return ended.value.code

    return run


def read_rows(path: str) -> list[dict[str, Any]]:
    """The rows of a finished table of any format."""
    if path.endswith(".jsonl"):
        return [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]
    if path.endswith(".parquet"):
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return rows
    with pa.OSFile(path, "rb") as file:
        found: list[dict[str, Any]] = pa.ipc.open_file(file).read_all().to_pylist()
        return found


def is_cell_of(cell: Any, value: Any) -> bool:
    """Whether a cell, as Python reads it, holds a JSON value: optional fields that are absent
    are null, dates and times are typed, and what no column can type is its JSON text."""
    if isinstance(cell, Mapping) and isinstance(value, Mapping):
        return cell.keys() >= value.keys() and all(
            is_cell_of(cell[name], value.get(name)) for name in cell
        )
    if isinstance(cell, list) and isinstance(value, list):
        return len(cell) == len(value) and all(map(is_cell_of, cell, value))
    if isinstance(cell, datetime.datetime):
        return cell == datetime.datetime.fromisoformat(value.upper())
    if isinstance(cell, datetime.date | datetime.time):
        return cell.isoformat() == value
    if isinstance(cell, decimal.Decimal):
        return cell == value and not isinstance(value, bool)
    if isinstance(cell, str) and cell != value:  # the JSON text of what no column can type
        cell = json.loads(cell)
    return bool(cell == value) and isinstance(cell, bool) == isinstance(value, bool)


def check(path: str, schema: Any) -> int:
    """AssertionError unless every ok row holds a valid value; how many there are."""
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    num_ok = 0
    for row in read_rows(path):
        if row["status"] != "ok":
            assert row["value"] is None
            continue
        num_ok += 1
        value = json.loads(row["text"])
        validator.validate(value)
        if path.endswith(".jsonl"):
            assert row["value"] == value
        else:
            assert is_cell_of(row["value"], value), row
    return num_ok


def test_ok_rows_are_valid_over_all_schemas_and_formats(
    command: Command, constrained: ModuleType, tiny_model_folder: Any
) -> None:
    model = str(tiny_model_folder("random"))
    lines = [json.dumps({"prompt": text}) for text in TEXTS]
    Path("jobs.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    total = 0
    for number, schema in enumerate(constrained.SCHEMAS):
        Path("schema.json").write_text(constrained.source(schema), "utf-8")
        output = f"{number}.{FORMATS[number % len(FORMATS)]}"
        code = command(
            "run", "jobs.jsonl", "--schema", "schema.json", "--model", model,
            "--max-tokens", "120", "--temperature", "0.7", "--threads", "1", "--quiet",
            "-o", output,
        )  # fmt: skip
        num_ok = check(output, schema)
        assert code == (0 if num_ok == len(TEXTS) else 1 if num_ok else 3)
        total += num_ok
    assert total > len(TEXTS) * len(constrained.SCHEMAS) / 2


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1800)
def test_ok_rows_of_the_real_model_are_valid_over_all_schemas_and_formats(
    command: Command, constrained: ModuleType
) -> None:
    import batchradix

    lines = [json.dumps({"prompt": f"{text}\n\nIn JSON: "}) for text in TEXTS]
    Path("jobs.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    total = 0
    for number, schema in enumerate(constrained.SCHEMAS):
        output = f"{number}.{FORMATS[number % len(FORMATS)]}"
        batchradix.run(
            "jobs.jsonl",
            schema=schema,
            output=output,
            sampling=batchradix.SamplingOptions(max_tokens=64),
        )
        total += check(output, schema)
    assert total > len(TEXTS) * len(constrained.SCHEMAS) / 2
