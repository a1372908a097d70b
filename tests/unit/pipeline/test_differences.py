"""Two tables of results beside each other: what is found is what was changed."""

from __future__ import annotations

import json
import tracemalloc
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchradix import pipeline
from batchradix.errors import InputError, OptionError
from batchradix.report.compare import same
from batchradix.report.diff import TableDiff
from batchradix.sink.columns import result_schema
from batchradix.sink.formats import open_writer
from batchradix.sink.results import Results
from batchradix.types import Cell

VALUE = pa.struct([("total", pa.float64()), ("kind", pa.string()), ("tags", pa.list_(pa.string()))])
EXTENSIONS = (".arrow", ".parquet", ".jsonl", ".csv")
KEEP = pa.schema([("size", pa.int64()), ("price", pa.decimal128(30, 4))])
SCHEMA = result_schema(id_type=pa.string(), value_type=VALUE, keep=KEEP, metadata={})
UNNESTED = result_schema(id_type=pa.string(), value_type=VALUE, keep=KEEP, unnest=True, metadata={})
Row = dict[str, Any]

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=6)


@st.composite
def result_rows(draw: st.DrawFn) -> list[Row]:
    ids = draw(st.lists(TEXTS.filter(bool), max_size=8))  # the same one may come again
    return [draw(result_row(number, id)) for number, id in enumerate(ids)]


@st.composite
def result_row(draw: st.DrawFn, number: int, id: str) -> Row:
    status = draw(st.sampled_from(["ok", "ok", "truncated", "error"]))
    is_ok = status == "ok"
    value = {
        "total": draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
        "kind": draw(st.none() | TEXTS.filter(bool)),
        "tags": draw(st.none() | st.lists(TEXTS, max_size=2)),
    }
    return {
        "id": id,
        "row": number,
        "status": status,
        "value": value if is_ok else None,
        "text": "no JSON " + draw(TEXTS),  # which JSON lines would have in the place of `value`
        "error": {"code": "bad_line", "message": draw(TEXTS)} if status == "error" else None,
        "finish_reason": draw(st.sampled_from(["stop", "length"])),
        "prompt_tokens": draw(st.integers(0, 999)),
        "cached_tokens": draw(st.integers(0, 999)),
        "completion_tokens": draw(st.integers(0, 999)),
        "size": draw(st.none() | st.integers(-(2**63), 2**63 - 1)),
        "price": draw(st.none() | st.decimals(-(10**20), 10**20, places=4)),
    }


def write(path: Path, rows: list[Row], schema: pa.Schema = SCHEMA) -> Path:
    if schema is UNNESTED:
        rows = [{**row, **(row["value"] or {})} for row in rows]
    writer = open_writer(path, path.suffix, schema)
    for begin in range(0, len(rows), 3):
        writer.write_batch(pa.RecordBatch.from_pylist(rows[begin : begin + 3], schema=schema))
    writer.close()
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tables")


FEW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@FEW
@given(rows=result_rows(), ends=st.tuples(*[st.sampled_from(EXTENSIONS)] * 2), data=st.data())
def test_a_table_is_equal_to_itself_in_any_format_and_order(
    folder: Path, rows: list[Row], ends: tuple[str, str], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(rows))))
    ids = [row["id"] for row in rows]
    if len(set(ids)) < len(ids):
        order = list(range(len(rows)))  # the n-th row of an id meets the n-th
    a = write(folder / f"a{ends[0]}", rows)
    b = write(folder / f"b{ends[1]}", [rows[place] for place in order])
    found = pipeline.diff(a, b)
    if rows:
        assert (found.equal, found.different, found.only_a, found.only_b) == (len(rows), 0, 0, 0)
        assert found.first == []
    if rows and all(row["status"] == "ok" for row in rows):
        assert found.is_equal


INJECTED: dict[str, Any] = {
    "text": "another text that is longer",
    "status": "lost",
    "prompt_tokens": 1000,
    "size": 2**62 + 1,
    "price": Decimal("123456789012345678901.0001"),
    "total": 0.30000000000000004,
    "kind": "another kind that is longer",
    "tags": ["a", "b", "c"],
}


@FEW
@given(rows=result_rows(), ends=st.tuples(*[st.sampled_from(EXTENSIONS)] * 2), data=st.data())
def test_what_is_found_is_exactly_what_was_changed(
    folder: Path, rows: list[Row], ends: tuple[str, str], data: st.DataObject
) -> None:
    rows = [{**row, "id": f"{number}{row['id']}"} for number, row in enumerate(rows)]
    kept, expected = [], {}
    for number, row in enumerate(rows):
        if not data.draw(st.booleans(), "stays"):
            continue
        names = [n for n in INJECTED if n in row or row["value"] is not None]
        changed = data.draw(st.sets(st.sampled_from(names), max_size=3), "changed")
        new = {**row, "value": row["value"] and dict(row["value"])}
        for name in changed:
            (new if name in new else new["value"])[name] = INJECTED[name]
        if changed:
            expected[row["id"]] = changed
        kept.append(new)
        del number
    extra = [{**row, "id": f"extra {row['id']}"} for row in rows[:1]]
    a, b = write(folder / f"a{ends[0]}", rows), write(folder / f"b{ends[1]}", kept + extra)
    found = pipeline.diff(a, b, most_shown=1000)
    assert {row.id: set(row.fields) for row in found.first} == expected
    assert (found.only_a, found.only_b) == (len(rows) - len(kept), len(extra))
    assert (found.equal, found.different) == (len(kept) - len(expected), len(expected))
    for name, field in found.fields.items():
        assert field.different == sum(name in changed for changed in expected.values())


def one_row(**changes: Any) -> Row:
    value = {"total": 1.5, "kind": "x", "tags": ["t"]}
    row = dict.fromkeys(SCHEMA.names) | {
        "id": "r", "row": 0, "status": "ok", "value": value, "text": "t", "finish_reason": "stop",
        "prompt_tokens": 3, "cached_tokens": 1, "completion_tokens": 2, "size": 1,
    }  # fmt: skip
    return row | changes


def compared(folder: Path, a: Row, b: Row, **options: Any) -> TableDiff:
    return pipeline.diff(
        write(folder / "one.arrow", [a]), write(folder / "other.csv", [b]), **options
    )


def test_fields_of_answers_meet_the_columns_of_an_unnested_table(tmp_path: Path) -> None:
    rows = [one_row(), one_row(id="s", row=1)]
    nested = write(tmp_path / "a.jsonl", rows)
    for extension in EXTENSIONS:
        flat = write(tmp_path / f"b{extension}", rows, UNNESTED)
        found = pipeline.diff(nested, flat)
        assert found.is_equal
        assert {"total", "kind", "tags"} <= set(found.fields)


def test_a_field_with_the_name_of_a_kept_column_keeps_both(tmp_path: Path) -> None:
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    a.write_text('{"id": "x", "value": {"size": 1}, "size": 5}\n')
    b.write_text('{"id": "x", "value": {"size": 2}, "size": 5}\n')
    found = pipeline.diff(a, b)
    assert {name: one.different for name, one in found.fields.items()} == {
        "size": 0,
        "value.size": 1,
    }


def test_numbers_are_compared_exactly_or_within_the_tolerance(tmp_path: Path) -> None:
    one = one_row(value={"total": 0.1 + 0.2, "kind": "x", "tags": []})
    other = one_row(value={"total": 0.3, "kind": "x", "tags": []})
    found = compared(tmp_path, one, other)
    assert found.fields["total"].largest == Decimal("0.00000000000000004")
    assert not found.is_equal
    assert compared(tmp_path, one, other, tolerance=Decimal("1e-9")).is_equal
    assert not compared(tmp_path, one, one_row(size=2), tolerance=Decimal("0.5")).is_equal


def test_where_a_row_stands_is_compared_only_where_it_is_asked_for(tmp_path: Path) -> None:
    moved = one_row(row=7, cached_tokens=9)
    assert compared(tmp_path, one_row(), moved).is_equal
    assert not compared(tmp_path, one_row(), moved, columns=["cached_tokens"]).is_equal


def test_columns_are_chosen_and_left_out_by_their_names(tmp_path: Path) -> None:
    other = one_row(text="u", size=2)
    assert set(compared(tmp_path, one_row(), other, columns=["text", "kind"]).fields) == {
        "text",
        "kind",
    }
    assert compared(tmp_path, one_row(), other, ignore=["text", "size"]).is_equal
    found = compared(tmp_path, one_row(), other, columns=["value", "size"])
    assert set(found.fields) == {"total", "kind", "tags", "size"}
    assert set(compared(tmp_path, one_row(), other, ignore=["value", "text"]).fields) == {
        *SCHEMA.names
    } - {"id", "row", "cached_tokens", "value", "text"}
    with pytest.raises(OptionError, match="neither table has"):
        compared(tmp_path, one_row(), other, columns=["nothing"])


def test_a_column_of_one_table_alone_is_named_and_makes_them_differ(tmp_path: Path) -> None:
    a = tmp_path / "a.jsonl"
    b = tmp_path / "b.jsonl"
    a.write_text('{"id": "x", "text": "t", "reasoning": "r"}\n')
    b.write_text('{"id": "x", "text": "t"}\n')
    found = pipeline.diff(a, b)
    assert (found.equal, found.columns_only_a, found.is_equal) == (1, ("reasoning",), False)
    assert pipeline.diff(a, b, columns=["text"]).is_equal


def test_rows_of_one_id_meet_in_their_order(tmp_path: Path) -> None:
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    a.write_text("".join(f'{{"id": "x", "text": "{t}"}}\n' for t in "pqr"))
    b.write_text("".join(f'{{"id": "x", "text": "{t}"}}\n' for t in "pz"))
    found = pipeline.diff(a, b)
    assert (found.equal, found.different, found.only_a) == (1, 1, 1)


def test_answers_of_the_batch_api_are_compared_by_their_custom_id(tmp_path: Path) -> None:
    def response(id: str, text: str) -> str:
        body = {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}
        return json.dumps({"custom_id": id, "response": {"body": body}, "error": None})

    api = tmp_path / "results.jsonl"
    api.write_text("\n".join([response("r", "t"), response("s", "u")]))
    failed = {"custom_id": "z", "response": None, "error": {"code": "c", "message": "m"}}
    (tmp_path / "results.errors.jsonl").write_text(json.dumps(failed))
    error = {"code": "c", "message": "m"}
    rows = [
        one_row(),
        one_row(id="z", status="error", text=None, error=error),
        one_row(id="s", text="v"),
    ]
    found = pipeline.diff(
        api, write(tmp_path / "b.arrow", rows), columns=["text", "status", "error"]
    )
    assert (found.equal, found.different) == (2, 1)
    assert found.first[0].fields == {"text": ("u", "v")}


@pytest.mark.parametrize("content", [b"\x00broken", b'{"id": 1}\n{', b"[1]\n", b'{"a": 1}\n'])
def test_what_cannot_be_read_is_refused(tmp_path: Path, content: bytes) -> None:
    good = write(tmp_path / "good.arrow", [one_row()])
    for extension in (".jsonl", ".arrow", ".parquet"):
        bad = tmp_path / f"bad{extension}"
        bad.write_bytes(content)
        with pytest.raises(InputError):
            pipeline.diff(good, bad)
    with pytest.raises(InputError, match="no result file"):
        pipeline.diff(good, tmp_path / "missing.csv")
    ragged = tmp_path / "ragged.csv"
    ragged.write_text("id,text\nx\n")
    with pytest.raises(InputError, match="line 2"):
        pipeline.diff(good, ragged)


def test_tables_of_one_order_are_not_held(tmp_path: Path) -> None:
    rows = [one_row(id=f"r{n}", row=n, text=f"{n} " + "x" * 2000) for n in range(3000)]
    a, b = write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", rows[::3])
    del rows
    tracemalloc.start()
    try:
        assert pipeline.diff(a, b).equal == 1000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < a.stat().st_size / 4


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        (1, Decimal("1.0"), True),
        (True, 1, False),
        ("1", 1, False),
        (Cell("1.0"), 1, True),
        (Cell("true"), True, True),
        (Cell(""), None, True),
        (Cell(""), "", True),
        (Cell("x"), None, False),
        (Cell('{"a":1,"b":null}'), {"a": 1}, True),
        (Cell("1"), Cell("1.0"), False),
        ({"a": 1}, {"a": 1, "b": None}, True),
        ([1, 2], [1], False),
        (2**63 + 1, 2**63, False),
        (Decimal("0.1"), Decimal("0.1000000000000000000000000000000001"), False),
    ],
)
def test_values_are_the_same_or_not(one: Any, other: Any, is_same: bool) -> None:
    assert same(one, other) is is_same
    assert same(other, one) is is_same


def test_a_table_that_grows_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": "x", "text": "t"}\n')
    passes = []

    def lines(self: Results, columns: Any = None) -> Any:
        passes.append(columns)
        for number in range(len(passes)):
            yield {"id": f"{number}", "text": "t"}

    monkeypatch.setattr(Results, "rows", lines)
    with pytest.raises(InputError, match="changed while it was read"):
        pipeline.diff(path, path)
