"""Answers beside the columns of Polars frames."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

import batchradix.integrations.polars  # noqa: F401  # adds the namespaces
from batchradix.engine.core import RadixEngine
from batchradix.errors import OptionError
from batchradix.plan import order

LONG = "x" * 600


@pytest.fixture
def frame() -> pl.DataFrame:
    return pl.DataFrame(
        {"text": ["a", None, "c", LONG, "e"], "k": pl.Series([1, 2, 3, 4, 5], dtype=pl.Int8)}
    )


def test_a_frame_gets_its_answers_behind_its_own_columns(
    options: dict[str, Any], frame: pl.DataFrame
) -> None:
    found = frame.batchradix.run(**options)  # type: ignore[attr-defined]
    assert found.columns[:5] == ["text", "k", "status", "value", "answer_text"]
    assert found.select(frame.columns).equals(frame)
    assert found.schema["k"] == pl.Int8
    assert found["status"].to_list() == ["ok", "error", "ok", "error", "ok"]
    assert found["value"].to_list() == [
        {"n": 7, "note": "b"}, None, {"n": 7, "note": "b"}, None, {"n": 7, "note": "b"},
    ]  # fmt: skip


def test_a_lazy_frame_gives_what_the_frame_gives(
    options: dict[str, Any], frame: pl.DataFrame, tmp_path: Path
) -> None:
    wanted = frame.batchradix.run(unnest=True, **options)  # type: ignore[attr-defined]
    lazy = frame.lazy().batchradix.run(batch_rows=2, unnest=True, **options)  # type: ignore[attr-defined]
    assert lazy.collect_schema() == wanted.schema
    assert lazy.collect().equals(wanted)
    assert lazy.collect(engine="streaming").equals(wanted)
    lazy.sink_parquet(tmp_path / "answers.parquet")
    assert pl.read_parquet(tmp_path / "answers.parquet")["n"].to_list() == wanted["n"].to_list()


def test_what_is_asked_of_a_lazy_frame_later_is_heeded(
    options: dict[str, Any], frame: pl.DataFrame
) -> None:
    lazy = frame.lazy().batchradix.run(batch_rows=2, unnest=True, **options)  # type: ignore[attr-defined]
    assert lazy.filter(pl.col("n") == 7, pl.col("k") > 1).select("k").collect()["k"].to_list() == [
        3,
        5,
    ]
    assert lazy.head(3).collect()["n"].to_list() == [7, None, 7]
    assert lazy.select("note", "k").collect().columns == ["note", "k"]


def test_a_lazy_frame_starts_one_engine_and_only_when_it_is_collected(
    options: dict[str, Any], frame: pl.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = []
    begin = RadixEngine.__init__

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        starts.append(1)
        begin(self, *args, **kwargs)

    monkeypatch.setattr(RadixEngine, "__init__", counted)
    lazy = frame.lazy().batchradix.run(batch_rows=1, **options)  # type: ignore[attr-defined]
    assert not starts
    lazy.collect()
    lazy.collect()
    assert starts == [1]


def test_batches_that_polars_sorts_inside_of_its_own_run_come_to_an_end(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "FEW_ROWS", 0)
    frame = pl.DataFrame({"text": [str(i % 7) for i in range(3000)]})
    lazy = frame.lazy().batchradix.run(batch_rows=1000, unnest=True, **options)  # type: ignore[attr-defined]
    assert lazy.collect(engine="streaming")["n"].to_list() == [7] * 3000


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"batch_rows": 0}, "batch_rows must be at least 1"),
        ({"unnest": True, "schema": {"type": "integer"}}, "whose top is an object"),
        ({"templat": "x"}, "did you mean template"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_collected(
    options: dict[str, Any], frame: pl.DataFrame, given: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(OptionError, match=sentence):
        frame.lazy().batchradix.run(**options | given)  # type: ignore[attr-defined]
