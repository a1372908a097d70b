from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pytest

from batchradix.errors import OptionError, RowError, RowErrorCode
from batchradix.sink.columns import arrange, result_schema, results_to_batch, shard_schema


def test_columns_stand_in_the_promised_order_with_the_promised_types(job: SimpleNamespace) -> None:
    schema = result_schema(
        id_type=pa.int64(),
        value_type=job.value_type,
        keep=pa.schema([("title", pa.large_string())]),
        metadata={"model": "m"},
    )
    assert [(f.name, f.type) for f in schema] == [
        ("id", pa.int64()),
        ("row", pa.int64()),
        ("status", pa.string()),
        ("value", job.value_type),
        ("text", pa.large_string()),
        ("error", pa.struct([("code", pa.string()), ("message", pa.string())])),
        ("finish_reason", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("cached_tokens", pa.int32()),
        ("completion_tokens", pa.int32()),
        ("title", pa.large_string()),
    ]
    assert schema.metadata == {b"model": b"m"}


def test_without_a_schema_there_is_no_value_column(job: SimpleNamespace) -> None:
    schema = result_schema(id_type=pa.string(), value_type=None, metadata={})
    assert "value" not in schema.names
    batch = results_to_batch([job.result_of(0)], schema, None)
    assert batch.column("text").to_pylist() == ['{"row":0}']


def test_unnest_puts_the_fields_in_the_value_s_place_in_schema_order() -> None:
    value_type = pa.struct([pa.field("b", pa.int64(), nullable=False), ("a", pa.string())])
    schema = result_schema(id_type=pa.string(), value_type=value_type, unnest=True, metadata={})
    assert schema.names[:6] == ["id", "row", "status", "b", "a", "text"]
    assert schema.field("b").nullable


@pytest.mark.parametrize("value_type", [None, pa.list_(pa.int64()), pa.json_()])
def test_unnest_of_what_is_no_object_is_refused(value_type: pa.DataType | None) -> None:
    with pytest.raises(OptionError, match="unnest needs"):
        result_schema(id_type=pa.string(), value_type=value_type, unnest=True, metadata={})


def test_unnested_fields_with_names_of_result_columns_are_refused_by_name() -> None:
    value_type = pa.struct([("text", pa.string()), ("fine", pa.string()), ("id", pa.int64())])
    with pytest.raises(OptionError, match=r"id, text;"):
        result_schema(id_type=pa.string(), value_type=value_type, unnest=True, metadata={})


def test_kept_columns_with_names_of_result_columns_are_refused_by_name() -> None:
    keep = pa.schema([("status", pa.string()), ("url", pa.string())])
    with pytest.raises(OptionError, match=r"kept columns .* status;"):
        result_schema(id_type=pa.string(), value_type=None, keep=keep, metadata={})


def test_kept_columns_that_meet_an_unnested_field_are_refused() -> None:
    with pytest.raises(OptionError, match="url"):
        result_schema(
            id_type=pa.string(),
            value_type=pa.struct([("url", pa.string())]),
            keep=pa.schema([("url", pa.string())]),
            unnest=True,
            metadata={},
        )


def test_rows_that_all_failed_have_the_same_schema_as_rows_that_are_ok(
    job: SimpleNamespace,
) -> None:
    failed = [job.result_of(10), job.result_of(21)]
    good = [job.result_of(0), job.result_of(1)]
    a, b = (results_to_batch(r, job.shard_schema, job.encode_values) for r in (failed, good))
    assert a.schema.equals(b.schema, check_metadata=True)
    assert a.column("value").null_count == 2
    assert a.column("error").to_pylist()[0] == {
        "code": "prompt_too_long",
        "message": "row 10 is too long, by 3",
    }
    assert b.column("error").null_count == 2


def test_lone_surrogates_become_the_replacement_character(job: SimpleNamespace) -> None:
    result = job.result_of(
        0,
        id="\udc00x",
        text="a\ud800b \ud83d\ude00",
        error=RowError(RowErrorCode.BAD_LINE, "\udfff"),
    )
    batch = results_to_batch([result], job.shard_schema, job.encode_values)
    assert batch.column("text").to_pylist() == ["a\ufffdb \U0001f600"]
    assert batch.column("id").to_pylist() == ["\ufffdx"]
    assert batch.column("error").to_pylist()[0]["message"] == "\ufffd"


def test_shards_store_dictionary_encoded_values_plain(job: SimpleNamespace) -> None:
    plain = job.shard_schema.field("value").type.field("kind").type
    assert plain == pa.string()
    nested = shard_schema(
        id_type=pa.string(), value_type=pa.map_(pa.string(), pa.dictionary(pa.int8(), pa.string()))
    )
    assert nested.field("value").type == pa.map_(pa.string(), pa.string())


def test_unnesting_a_row_without_a_value_gives_nulls_in_every_field(job: SimpleNamespace) -> None:
    results = [job.result_of(10), job.result_of(1)]
    batch = results_to_batch(results, job.shard_schema, job.encode_values)
    schema = result_schema(id_type=pa.string(), value_type=job.value_type, unnest=True, metadata={})
    rows = arrange(batch, schema, unnest=True, kept=None).to_pylist()
    assert {rows[0][f.name] for f in job.value_type} == {None}
    assert {f.name: rows[1][f.name] for f in job.value_type} == job.value_of(1)


def test_a_value_its_type_cannot_hold_makes_one_error_row(job: SimpleNamespace) -> None:
    results = [job.result_of(0), job.result_of(1, value={"n": 2**63}), job.result_of(2)]
    batch = results_to_batch(results, job.shard_schema, job.encode_values)
    assert batch.column("status").to_pylist() == ["ok", "error", "ok"]
    assert [v is None for v in batch.column("value").to_pylist()] == [False, True, False]
    (error,) = [e for e in batch.column("error").to_pylist() if e]
    assert error["code"] == "not_representable"


def test_probabilities_stand_beside_the_names_of_their_choices(job: SimpleNamespace) -> None:
    choices = ["yes", 'no "é"']
    schema = shard_schema(id_type=pa.string(), value_type=None, choices=choices)
    results = [
        replace(job.result_of(row), probabilities=probabilities)
        for row, probabilities in enumerate([(0.25, 0.75), None, (1.0, 0.0), None])
    ]
    for given in (results, results[1:2], []):
        column = results_to_batch(given, schema, None).column("probabilities")
        column.validate(full=True)
        assert column.type == schema.field("probabilities").type
        assert column.to_pylist() == [
            r.probabilities
            and [
                {"choice": choice, "probability": p}
                for choice, p in zip(choices, r.probabilities, strict=True)
            ]
            for r in given
        ]
    assert "probabilities" not in shard_schema(id_type=pa.string(), value_type=None).names
