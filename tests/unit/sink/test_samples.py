"""Samples of one input row are folded alike, wherever batches break."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from batchradix.errors import RowError, RowErrorCode
from batchradix.sink.columns import result_schema, results_to_batch, shard_schema
from batchradix.sink.finalise import zip_columns
from batchradix.sink.samples import Samples
from batchradix.types import FinishReason, Result, Status

STARTS = np.array([0, 1, 4, 6])
STATUSES = [Status.OK, Status.OK, Status.ERROR, Status.OK, Status.TRUNCATED, Status.OK]


def results() -> list[Result]:
    return [
        Result(
            row=row,
            id="x",
            status=status,
            value=None if status is Status.ERROR else row,
            text=None if status is Status.ERROR else f"text {row}",
            error=RowError(RowErrorCode.ROW_TIMEOUT, "late") if status is Status.ERROR else None,
            finish_reason=FinishReason.STOP,
            prompt_tokens=7,
            cached_tokens=row,
            completion_tokens=10**row,
            content_key=bytes(16),
        )
        for row, status in enumerate(STATUSES)
    ]


def folded(*cuts: int) -> list[dict[str, Any]]:
    schema = shard_schema(id_type=pa.string(), value_type=pa.int64())
    batch = results_to_batch(results(), schema, lambda values: pa.array(values, pa.int64()))
    ends = [*cuts, batch.num_rows]
    pieces = [batch.slice(start, end - start) for start, end in zip([0, *cuts], ends, strict=True)]
    folds = (Samples(STARTS),)
    finished = result_schema(id_type=pa.string(), value_type=pa.int64(), folds=folds, metadata={})
    batches = zip_columns(
        iter(pieces), finished, None, num_rows=batch.num_rows, unnest=False, folds=folds
    )
    return [row for piece in batches for row in piece.to_pylist()]


def test_a_row_is_as_bad_as_its_worst_sample_and_shows_it() -> None:
    first, second, third = folded()
    assert (first["status"], first["value"], first["text"]) == ("ok", 0, "text 0")
    assert (second["status"], second["value"]) == ("error", None)
    assert second["error"] == {"code": "row_timeout", "message": "late"}
    assert (third["status"], third["value"], third["text"]) == ("truncated", None, "text 4")


def test_tokens_of_answers_are_added_and_those_of_the_prompt_are_not() -> None:
    rows = folded()
    assert [row["completion_tokens"] for row in rows] == [1, 1110, 110000]
    assert [row["prompt_tokens"] for row in rows] == [7, 7, 7]
    assert [row["cached_tokens"] for row in rows] == [0, 1, 4]


def test_every_sample_is_in_its_list_in_order() -> None:
    rows = folded()
    assert [[one["text"] for one in row["samples"]] for row in rows] == [
        ["text 0"],
        ["text 1", None, "text 3"],
        ["text 4", "text 5"],
    ]
    assert [one["value"] for one in rows[2]["samples"]] == [None, 5]
    assert [one["status"] for one in rows[1]["samples"]] == ["ok", "error", "ok"]


@pytest.mark.parametrize("cuts", [(1,), (2,), (3,), (4,), (5,), (1, 2, 3), (2, 3, 5), (3, 3)])
def test_it_does_not_matter_where_batches_break(cuts: tuple[int, ...]) -> None:
    assert folded(*cuts) == folded()
