"""JSON lines: what a line is, what a bad line does, which values come out."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchradix.errors import InputError, RowErrorCode
from batchradix.jobs import open_job
from batchradix.jobs.files import InputFile
from batchradix.jobs.jsonl import JsonlSource, parse_line
from batchradix.types import Row


def rows_of(path: Path, columns: list[str] | None = None, **settings_: object) -> list[Row]:
    with open_job(path, **settings_) as source:  # type: ignore[arg-type]
        return [row for batch in source.batches(columns) for row in batch]


def write(tmp_path: Path, data: bytes, name: str = "jobs.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


def zstd(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)  # type: ignore[no-any-return]


def test_a_byte_order_mark_and_crlf_leave_no_trace(tmp_path: Path) -> None:
    text = '{"id": "a1", "prompt": "naïve café"}\n{"id": "a2", "prompt": "line\\ntwo"}\n'
    plain = write(tmp_path, text.encode(), "plain.jsonl")
    windows = write(tmp_path, b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert rows_of(windows) == rows_of(plain)
    assert [r.values for r in rows_of(windows)][1] == {"id": "a2", "prompt": "line\ntwo"}


def test_a_byte_order_mark_elsewhere_is_data(tmp_path: Path) -> None:
    path = write(tmp_path, '{"\ufeffid": "\ufeffx"}\n\ufeff{"id": 1}\n'.encode())
    first, second = rows_of(path)
    assert first.values == {"\ufeffid": "\ufeffx"}
    assert second.error is not None
    assert "byte order mark" in second.error.message


def test_blank_lines_are_skipped_and_counted_in_line_numbers(tmp_path: Path) -> None:
    path = write(tmp_path, b'\n{"id":"b1"}\n   \n{"id":"b2"}\n\r\n\n{"id":"b3"}')
    rows = rows_of(path)
    assert [(r.index, r.line, r.id) for r in rows] == [(0, 2, "b1"), (1, 4, "b2"), (2, 7, "b3")]


@pytest.mark.parametrize("data", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_a_file_without_records_has_no_rows_and_text_ids(tmp_path: Path, data: bytes) -> None:
    with open_job(write(tmp_path, data), id_column="key") as source:
        assert source.columns is None
        assert list(source.batches(None)) == []
        assert (source.columns, source.num_rows, source.id_type) == ((), 0, pa.string())
        assert source.keep_schema("all") == pa.schema([])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"id": "x", "prompt": "cut', "Unterminated string"),
        (b'{"a": 1} {"a": 2}', "Extra data (column 10)"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', "not UTF-8"),
        (b"[1, 2]", "a list"),
        (b'"text"', "a string"),
        (b"null", "null"),
        (b"12", "a number"),
        (b'{"a": ' + b"9" * 5000 + b"}", "thousands of digits"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deep"),
        (b'{"a": ' + b"[" * 300 + b"]" * 300 + b"}", "more than 200 levels"),
        (b"\x00\x00\x00", "not JSON"),
        (b"{'a': 1}", "not JSON"),
    ],
)
def test_a_bad_line_is_an_error_row_between_good_ones(
    tmp_path: Path, line: bytes, words: str
) -> None:
    path = write(tmp_path, b'{"id": "a"}\n\n' + line + b'\n{"id": "c"}\n')
    first, bad, last = rows_of(path)
    assert (first.id, last.id, last.index, last.line) == ("a", "c", 2, 4)
    assert bad.error is not None
    assert bad.error.code is RowErrorCode.BAD_LINE
    assert words in bad.error.message
    assert f"{path} line 3" in bad.error.message
    assert (bad.index, bad.line, bad.id, bad.values) == (1, 3, None, {})


def test_wide_values_with_many_brackets_are_not_called_deep() -> None:
    wide = json.dumps({"a": [{"b": [1]}] * 500}).encode()
    assert parse_line(wide, "here") == {"a": [{"b": [1]}] * 500}


def test_other_line_separators_of_unicode_do_not_end_a_line(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\x85d"
    escaped = json.dumps({"prompt": text, "nul": "\x00\x0b\x0c\x1c"}, ensure_ascii=False)
    (row,) = rows_of(write(tmp_path, escaped.encode()))
    assert row.values == {"prompt": text, "nul": "\x00\x0b\x0c\x1c"}


def test_numbers_keep_every_digit_and_nan_stays_a_float(tmp_path: Path) -> None:
    digits = [
        "9007199254740992",
        "9007199254740993",
        "18446744073709551615",
        "123456789012345678901234567890",
    ]
    lines = [f'{{"id":{d},"score":{d}}}' for d in digits]
    lines += [
        '{"id":"n5","score":NaN}',
        '{"id":"n6","score":-Infinity}',
        '{"id":1.5,"score":1e400}',
    ]
    rows = rows_of(write(tmp_path, "\n".join(lines).encode()))
    assert [r.id for r in rows] == [*digits, "n5", "n6", "1.5"]
    assert [str(r.values["score"]) for r in rows[:4]] == digits
    assert math.isnan(rows[4].values["score"])
    assert [r.values["score"] for r in rows[5:]] == [-math.inf, math.inf]


def test_the_last_of_equal_keys_counts() -> None:
    assert parse_line(b'{"a": 1, "a": 2}', "here") == {"a": 2}


def test_lone_surrogates_reach_the_prompt_room_and_never_an_arrow_table(tmp_path: Path) -> None:
    path = write(tmp_path, b'{"a": "x\\ud83d", "b": ["\\ud83d"]}\n')
    with open_job(path) as source:
        (rows,) = source.batches(None)
        assert rows[0].values == {"a": "x\ud83d", "b": ["\ud83d"]}
        (kept,) = source.keep_batches("all")
        assert kept.to_pylist() == [{"a": "x\ufffd", "b": '["\\ud83d"]'}]


def test_ids_without_a_text_form_make_error_rows(tmp_path: Path) -> None:
    path = write(tmp_path, b'{"id":{"a":1}}\n{"id":[1]}\n{"id":"\\ud800"}\n{"id":null}\n{"x":1}\n')
    rows = rows_of(path)
    codes = [r.error and r.error.code for r in rows]
    assert codes == [RowErrorCode.BAD_VALUE] * 3 + [None, None]
    assert [r.id for r in rows] == [None] * 5


def test_without_an_id_column_the_row_number_is_the_id(tmp_path: Path) -> None:
    rows = rows_of(write(tmp_path, b'{"a":1}\nbroken\n{"a":2}\n'))
    assert [r.id for r in rows] == ["0", "1", "2"]


def test_a_named_id_column_must_be_in_some_row(tmp_path: Path) -> None:
    path = write(tmp_path, b'{"a":1}\n{"b":2, "key": "k"}\n')
    assert [r.id for r in rows_of(path, id_column="key")] == [None, "k"]
    with open_job(path, id_column="kee") as source:
        for _ in range(2):
            with pytest.raises(InputError, match=r"no column 'kee' .* a, b, key"):
                source.scan()


def test_equal_ids_are_counted_as_text_and_all_rows_stay(tmp_path: Path) -> None:
    path = write(tmp_path, b'{"id":1}\n{"id":"1"}\n{"id":"Twin"}\n{"id":"twin"}\n{"id":null}\n')
    with open_job(path) as source:
        assert source.num_duplicate_ids == 1
        assert source.num_rows == 5


def test_only_the_columns_asked_for_are_in_the_values(tmp_path: Path) -> None:
    path = write(tmp_path, b'{"id":1,"a":null,"b":2}\n{"id":2,"b":3}\n')
    assert [r.values for r in rows_of(path, ["a", "none"])] == [{"a": None}, {}]


def test_columns_are_the_union_over_the_whole_file_in_order_of_appearance(tmp_path: Path) -> None:
    lines = [b'{"id":%d,"note":null}' % i for i in range(3000)] + [b'{"note":"late","extra":1}']
    with open_job(write(tmp_path, b"\n".join(lines))) as source:
        source.scan()
        assert source.columns == ("id", "note", "extra")
        rows = [row for batch in source.batches(["note"]) for row in batch]
        assert rows[-1].values == {"note": "late"}
        kept = pa.Table.from_batches(source.keep_batches(["extra", "note"]))
        assert kept.schema == pa.schema([("extra", pa.int64()), ("note", pa.string())])
        assert kept.num_rows == 3001


def test_a_limit_is_as_if_the_file_ended_there(tmp_path: Path) -> None:
    path = write(tmp_path, b'{"a":1}\nbad\n{"a":"x","b":1}\n')
    with open_job(path, limit=2) as source:
        assert [r.index for batch in source.batches(None) for r in batch] == [0, 1]
        assert (source.num_rows, source.columns) == (2, ("a",))
        assert source.keep_schema("all") == pa.schema([("a", pa.int64())])
    assert rows_of(path, limit=0) == []


@pytest.mark.parametrize(
    ("values", "type_", "kept"),
    [
        (["true", "null", "false"], pa.bool_(), [True, None, False]),
        (["1", "-9223372036854775808"], pa.int64(), [1, -(2**63)]),
        (["1", "2.5", "9007199254740992"], pa.float64(), [1.0, 2.5, 2.0**53]),
        (["9007199254740993", "2.5"], pa.string(), ["9007199254740993", "2.5"]),
        (["9223372036854775808", "1"], pa.string(), ["9223372036854775808", "1"]),
        (['"x"', "null"], pa.string(), ["x", None]),
        (['"x"', "1", '{"k": [1, "é"]}'], pa.string(), ['"x"', "1", '{"k":[1,"é"]}']),
        (["true", "1"], pa.string(), ["true", "1"]),
        (["null", "null"], pa.string(), [None, None]),
    ],
)
def test_a_kept_column_has_the_narrowest_type_that_holds_all_its_values(
    tmp_path: Path, values: list[str], type_: pa.DataType, kept: list[object]
) -> None:
    lines = [f'{{"c": {v}}}' for v in values] + ["bad", "{}"]
    with open_job(write(tmp_path, "\n".join(lines).encode())) as source:
        table = pa.Table.from_batches(source.keep_batches(["c"]))
    assert table.schema == pa.schema([("c", type_)])
    assert table["c"].to_pylist() == [*kept, None, None]


def test_gzip_and_zstandard_are_read_like_plain_files(tmp_path: Path) -> None:
    data = b'{"id":"a","p":"x"}\n{"id":"b","p":"y"}\n'
    expected = [(r.id, r.line) for r in rows_of(write(tmp_path, data))]
    half = len(data) // 2
    gz = write(tmp_path, gzip.compress(data[:half]) + gzip.compress(data[half:]), "j.jsonl.gz")
    zst = write(tmp_path, zstd(data[:half]) + zstd(data[half:]), "j.jsonl.zst")
    for path in (gz, zst):
        assert [(r.id, r.line) for r in rows_of(path)] == expected


@pytest.mark.parametrize("name", ["j.jsonl.gz", "j.jsonl.zst"])
def test_a_compressed_file_cut_short_is_refused_by_name(tmp_path: Path, name: str) -> None:
    data = "".join(json.dumps({"p": str(i * 7919)}) + "\n" for i in range(20000)).encode()
    whole = gzip.compress(data) if name.endswith("gz") else zstd(data)
    path = write(tmp_path, whole[: len(whole) // 2], name)
    with pytest.raises(InputError, match=rf"{name} is damaged or cut short after line \d{{4,}}:"):
        open_job(path).scan()


def test_a_member_of_a_gzip_file_cut_short_is_told_by_the_lines_before_it(tmp_path: Path) -> None:
    """Zeros behind the end are no member: tapes and some writers pad so."""
    lines = b'{"id":"a"}\n{"id":"b"}\n'
    path = write(tmp_path, gzip.compress(lines) + bytes(500), "j.jsonl.gz")
    assert [row.id for row in rows_of(path)] == ["a", "b"]
    for rest in (gzip.compress(lines)[:-9], b"no gzip"):
        write(tmp_path, gzip.compress(lines) + rest, "j.jsonl.gz")
        with pytest.raises(InputError, match=r"cut short after line [24]:"), open_job(path) as job:
            job.scan()


def test_a_file_that_changes_between_passes_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, b'{"a":1}\n')
    with open_job(path) as source:
        source.scan()
        write(tmp_path, b'{"a":1}\n{"a":2}\n')
        with pytest.raises(InputError, match="changed"):
            list(source.batches(None))


def test_passes_can_run_side_by_side(tmp_path: Path) -> None:
    path = write(tmp_path, b"".join(b'{"id":%d,"a":%d}\n' % (i, i) for i in range(10)))
    with open_job(path) as source:
        pairs = zip(source.batches(["a"], 3), source.keep_batches(["a"], 3), strict=True)
        for rows, kept in pairs:
            assert [r.values["a"] for r in rows] == kept["a"].to_pylist()


def test_long_lines_end_a_batch_early(tmp_path: Path) -> None:
    line = b'{"a":"' + b"x" * (9 << 20) + b'"}\n'
    with open_job(write(tmp_path, line * 6)) as source:
        assert [len(batch) for batch in source.batches(["a"])] == [4, 2]


def test_several_files_are_one_input_and_lines_count_from_each_start(tmp_path: Path) -> None:
    one = write(tmp_path, b'\xef\xbb\xbf{"a":1}\n{"a":2}', "1.jsonl")
    two = write(tmp_path, b'\xef\xbb\xbf{"a":3}\nbad', "2.jsonl")
    source = JsonlSource("both", [InputFile.at(one), InputFile.at(two)])
    (rows,) = source.batches(None)
    assert [(r.index, r.line) for r in rows] == [(0, 1), (1, 2), (2, 1), (3, 2)]
    assert rows[3].error is not None
    assert "2.jsonl line 2" in rows[3].error.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60)
@given(
    records=st.lists(st.dictionaries(st.text(max_size=4), JSON, max_size=4), max_size=8),
    ascii_=st.booleans(),
    batch_rows=st.integers(1, 5),
)
def test_what_json_writes_is_read_back(
    records: list[dict[str, object]],
    ascii_: bool,
    batch_rows: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("j") / "j.jsonl"
    text = "\n".join(json.dumps(r, ensure_ascii=ascii_) for r in records)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with open_job(path) as source:
        rows = [row for batch in source.batches(None, batch_rows) for row in batch]
        assert [r.index for r in rows] == list(range(len(records)))
        for row, record in zip(rows, records, strict=True):
            if row.error is None or row.error.code is RowErrorCode.BAD_VALUE:
                assert row.values == record
        kept = sum(b.num_rows for b in source.keep_batches("all", batch_rows))
        assert kept == source.num_rows == len(records)
