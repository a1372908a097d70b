"""Input files as other tools write them: every row is answered, under its own id, or says why."""

from __future__ import annotations

import datetime
import gzip
import json
import os
import threading
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


def test_a_windows_file_reads_like_a_plain_one(
    enter: Callable[[str], Path], cli: Any, const: Any, files: ModuleType
) -> None:
    enter("in-01")
    model = const("a")
    assert Path("jobs.jsonl").read_bytes().startswith(b"\xef\xbb\xbf")
    for name in ("jobs", "plain"):
        ran = cli("run", f"{name}.jsonl", "--schema", "schema.json", "--model", model,
                  "-o", f"{name}.out.jsonl")  # fmt: skip
        assert ran.code == 0
    rows = files.read_rows("jobs.out.jsonl")
    assert rows == files.read_rows("plain.out.jsonl")
    assert [row["id"] for row in rows] == ["a1", "a2", "a3"]
    assert [row["value"] for row in rows] == [{"tag": "k"}] * 3
    assert [row["prompt_tokens"] for row in rows] == [13, 18, 19]


def test_a_byte_order_mark_is_dropped_at_the_start_of_a_file_only(
    folder: Path, cli: Any, prompt_of: Any, const: Any, files: ModuleType
) -> None:
    mark = b"\xef\xbb\xbf"
    files.write_jsonl(
        "jobs.jsonl",
        [
            mark + b'{"id": "\xef\xbb\xbfa", "prompt": "\xef\xbb\xbfx"}',
            mark + b'{"id": "b", "prompt": "y"}',
        ],
    )
    cli("run", "jobs.jsonl", "--model", const("a"), "--max-tokens", 1, "-o", "out.jsonl")
    first, second = files.read_rows("out.jsonl")
    assert (first["id"], first["prompt_tokens"]) == ("\ufeffa", 1 + 3 + 1)
    assert second["status"] == "error"
    assert prompt_of("jobs.jsonl", "--model", const("a")).endswith(
        "\\ufeffx"
    )  # as preview shows it


def test_blank_lines_a_missing_last_newline_a_pipe_and_an_empty_file(
    enter: Callable[[str], Path], cli: Any, const: Any, files: ModuleType
) -> None:
    enter("in-03")
    options = ["--schema", "schema.json", "--model", const("a")]
    for name in ("single", "jobs", "empty"):
        assert cli("run", f"{name}.jsonl", *options, "-o", f"{name}.arrow").code == 0
    pipe = Path("jobs.jsonl").read_bytes()
    assert cli("run", "-", *options, "-o", "pipe.arrow", stdin=pipe).code == 0
    assert files.column("single.arrow", "id") == ["only"]
    assert files.column("jobs.arrow", "id") == ["b1", "b2", "b3"]
    assert files.column("jobs.arrow", "status") == ["ok"] * 3
    assert files.read_rows("pipe.arrow") == files.read_rows("jobs.arrow")
    empty = files.read_table("empty.arrow")
    assert len(empty) == 0
    assert empty.schema.equals(files.read_table("jobs.arrow").schema)


def test_the_lines_that_messages_name_are_physical(
    folder: Path, cli: Any, const: Any, files: ModuleType
) -> None:
    files.write_jsonl("jobs.jsonl", ["", '{"id": "a"}', "   ", "", '{"id": "b"}'])
    cli("run", "jobs.jsonl", "--template", "{{id}}{{x}}", "--model", const("a"), "-o", "o.jsonl")
    files.write_jsonl("jobs.jsonl", ["", '{"id": "a", "x": 1}', "   ", "", '{"id": "b"}'])
    cli("run", "jobs.jsonl", "--template", "{{id}}{{x}}", "--model", const("a"),
        "--max-tokens", 1, "-o", "o.jsonl")  # fmt: skip
    error = files.read_rows("o.jsonl")[1]["error"]
    assert error["code"] == "missing_field"
    assert "line 5" in error["message"]
    assert "'x'" in error["message"]


def test_ids_beyond_64_bits_and_numbers_that_are_none(
    enter: Callable[[str], Path], cli: Any, const: Any, files: ModuleType
) -> None:
    enter("in-05")
    ids = [
        "9007199254740992", "9007199254740993", "18446744073709551615",
        "123456789012345678901234567890", "n5", "n6",
    ]  # fmt: skip
    template = "item {{id}} s={{score}}"
    ran = cli("run", "jobs.jsonl", "--template", template, "--schema", "schema.json",
              "--model", const("a"), "--keep", "score", "-o", "out.jsonl")  # fmt: skip
    assert ran.code == 0
    rows = files.read_rows("out.jsonl")  # refuses a bare NaN
    assert [str(row["id"]) for row in rows] == ids
    assert [row["prompt_tokens"] for row in rows[:4]] == [26, 26, 30, 40]
    assert [row["score"] for row in rows[:4]] == [1, 1, 2, 2]


def test_infinite_numbers_are_spelt_out_in_prompts(
    enter: Callable[[str], Path], prompt_of: Any, const: Any
) -> None:
    enter("in-05")
    shown = {
        row: prompt_of("jobs.jsonl", "--template", "s={{score}}", "--model", const("a"),
                       "--row", row)
        for row in ("n5", "n6")
    }  # fmt: skip
    assert shown["n5"].endswith("s=NaN")
    assert shown["n6"].endswith("s=-Infinity")


def _late_types() -> list[dict[str, Any]]:
    """`note` is null for long, then text, then an object; `meta` gains a key late."""
    rows = []
    for i in range(40):
        note: Any = None if i < 35 else f"late {i}"
        meta: dict[str, Any] = {"src": "x"}
        if i >= 38:
            meta["extra"] = i
        rows.append({"id": f"r{i:02}", "note": {"k": 1} if i == 39 else note, "meta": meta,
                     "pad": "." * 65_000})  # fmt: skip
    return rows


def test_a_type_that_appears_late_in_a_long_file_is_kept(
    folder: Path, cli: Any, const: Any, files: ModuleType
) -> None:
    """Case in-07."""
    files.write_jsonl("jobs.jsonl", _late_types())
    assert os.stat("jobs.jsonl").st_size > 2_600_000
    ran = cli("run", "jobs.jsonl", "--template", "n={{note}} m={{meta}}", "--schema", "tag.json",
              "--model", const("a"), "--keep", "note,meta", "-o", "out.jsonl")  # fmt: skip
    assert ran.code == 1
    rows = files.read_rows("out.jsonl")
    assert [row["id"] for row in rows] == [f"r{i:02}" for i in range(40)]
    assert {row["error"]["code"] for row in rows[:35]} == {"null_field"}
    assert {row["status"] for row in rows[35:]} == {"ok"}
    lengths = [1 + len(f'n=late {i} m={{"src": "x"}}') for i in (35, 36, 37)]
    assert [row["prompt_tokens"] for row in rows[35:38]] == lengths
    assert rows[39]["prompt_tokens"] == 1 + len('n={"k": 1} m={"src": "x", "extra": 39}')
    notes = [row["note"] if isinstance(row["note"], str) else json.dumps(row["note"])
             for row in rows]  # fmt: skip
    assert set(notes[:35]) == {"null"}
    assert "late 36" in notes[36]
    assert '"k"' in notes[39]
    assert "extra" not in json.dumps(rows[37]["meta"])
    assert "38" in json.dumps(rows[38]["meta"])

    ran = cli("run", "jobs.jsonl", "--template", "n={{note}} m={{meta}}", "--schema", "tag.json",
              "--model", const("a"), "--null", "-", "-o", "filled.jsonl")  # fmt: skip
    assert ran.code == 0
    filled = files.read_rows("filled.jsonl")
    assert {row["status"] for row in filled} == {"ok"}
    assert filled[0]["prompt_tokens"] == 1 + len('n=- m={"src": "x"}')
    assert [row["prompt_tokens"] for row in filled[35:38]] == lengths


def _dictionaries(path: str) -> None:
    """Parquet with a dictionary of its own in each row group, nulls, and large strings."""
    info = pa.struct([("sku", pa.large_string()), ("dims", pa.list_(pa.float32()))])

    def part(ids: list[str], colours: list[Any], n: list[int], skus: list[Any]) -> pa.Table:
        structs = [None if sku is None else {"sku": sku, "dims": [1.5]} for sku in skus]
        return pa.table(
            {
                "id": pa.array(ids, pa.large_string()),
                "colour": pa.array(colours).dictionary_encode(),
                "n": pa.array(n, pa.uint8()),
                "info": pa.array(structs, info),
            }
        )

    first = part(["e0", "e1", "e2"], ["red", "blue", "green"], [10, 11, 12], ["A1", "B2", "A1"])
    second = part(["e3", "e4", "e5"], ["blue", "red", None], [13, 14, 15], [None, "C3", "A1"])
    with pq.ParquetWriter(path, first.schema) as writer:
        writer.write_table(first)
        writer.write_table(second)


def test_dictionaries_of_row_groups_are_not_mixed_up(
    folder: Path, cli: Any, prompt_of: Any, const: Any, files: ModuleType
) -> None:
    """Case in-09."""
    _dictionaries("jobs.parquet")
    template = ["--template", "{{id}} {{colour}} {{n}} p={{info.sku}}", "--model", const("a")]
    cli("run", "jobs.parquet", *template, "--schema", "tag.json", "--keep", "all",
        "-o", "out.parquet")  # fmt: skip
    rows = files.read_rows("out.parquet")
    assert [row["prompt_tokens"] for row in rows] == [15, 16, 17, 0, 15, 0]
    assert [row["status"] for row in rows] == ["ok", "ok", "ok", "error", "ok", "error"]
    assert "info" in rows[3]["error"]["message"]
    assert "colour" in rows[5]["error"]["message"]
    assert [row["colour"] for row in rows] == ["red", "blue", "green", "blue", "red", None]
    assert [row["n"] for row in rows] == [10, 11, 12, 13, 14, 15]
    assert rows[4]["info"] == {"sku": "C3", "dims": [1.5]}
    assert prompt_of("jobs.parquet", *template, "--row", "e4").endswith("e4 red 14 p=C3")


def test_a_column_the_job_does_not_use_is_never_read(
    folder: Path, cli: Any, const: Any, files: ModuleType
) -> None:
    """Case in-11."""
    marker = b"0123456789 never to be decoded "
    table = pa.table(
        {
            "id": [f"r{i:02}" for i in range(16)],
            "text": [f"note {i}" for i in range(16)],
            "attachments": [[{"body": (marker * 40).decode()}]] * 16,
        }
    )
    pq.write_table(table, "jobs.parquet", compression="none")
    damaged = Path("jobs.parquet").read_bytes().replace(marker, b"\xff" * len(marker))
    Path("jobs.parquet").write_bytes(damaged)
    ran = cli("run", "jobs.parquet", "--template", "{{text}}", "--schema", "tag.json",
              "--model", const("a"), "-o", "out.arrow")  # fmt: skip
    assert ran.code == 0
    assert files.column("out.arrow", "id") == [f"r{i:02}" for i in range(16)]
    assert files.column("out.arrow", "status") == ["ok"] * 16


@pytest.mark.slow
def test_a_list_column_of_two_gigabytes_is_no_burden_unless_it_is_kept(
    folder: Path, processes: Any, const: Any, files: ModuleType
) -> None:
    """Case in-11."""
    body = "lorem ipsum dolor " * (150 * 1024 * 1024 // 18)
    one = pa.array([[{"mime": "text/plain", "body": body}]])
    ids = [f"r{i:02}" for i in range(16)]
    table = pa.table(
        {
            "id": pa.chunked_array([[name] for name in ids]),
            "text": pa.chunked_array([[f"note {i}"] for i in range(16)]),
            "attachments": pa.chunked_array([one] * 16),
        }
    )
    pq.write_table(table, "jobs.parquet", row_group_size=16, compression="zstd")
    ran = processes.run("run", "jobs.parquet", "--template", "{{text}}", "--schema", "tag.json",
                        "--model", const("a"), "-o", "out.arrow", "--json")  # fmt: skip
    assert ran.code == 0, ran.err
    assert ran.summary["peak_rss_bytes"] < 1_000_000_000
    assert files.column("out.arrow", "id") == ids


def _line(identity: str, prompt: str = "x") -> bytes:
    return json.dumps({"id": identity, "prompt": prompt}).encode()


BAD_LINES = {
    "another encoding": b'{"id": "bad", "prompt": "caf\xe9"}',
    "a trailing comma": _line("bad") + b",",
    "half a record": _line("bad")[:-5],
    "two records": _line("bad") + _line("worse"),
    "a list": b"[1, 2]",
    "a bare string": b'"bad"',
    "null": b"null",
    "nested ten thousand deep": b'{"id": "bad", "prompt": "x", "d": ' + b"[" * 10_000,
    "an integer of 5,000 digits": b'{"id": "bad", "prompt": "x", "n": ' + b"9" * 5000 + b"}",
    "a null byte": b'{"id": "bad", "prompt": "x"\x00}',
}


@pytest.mark.parametrize("bad", BAD_LINES)
def test_a_line_that_is_no_record_is_one_error_row_with_its_line(
    folder: Path, cli: Any, const: Any, files: ModuleType, bad: str
) -> None:
    files.write_jsonl("jobs.jsonl", [_line("a"), BAD_LINES[bad], _line("c")])
    ran = cli("run", "jobs.jsonl", "--schema", "tag.json", "--model", const("a"), "-o", "o.jsonl")
    assert ran.code == 1
    rows = files.read_rows("o.jsonl")
    assert [row["status"] for row in rows] == ["ok", "error", "ok"]
    assert [rows[0]["id"], rows[2]["id"]] == ["a", "c"]
    assert rows[1]["error"]["code"] == "bad_line"
    assert "line 2" in rows[1]["error"]["message"]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("jobs.jsonl", _line("a").decode().encode("utf-16"), "UTF-16"),
        ("jobs.jsonl", json.dumps([{"id": "a"}], indent=1).encode(), "many lines"),
        ("jobs.jsonl.gz", gzip.compress(_line("a") * 1000)[:-12], "damaged or cut short"),
        ("jobs.parquet", _line("a"), "not Parquet"),
        ("jobs.parquet", b"", "empty"),
        ("jobs.csv", b"id;prompt\n1;x\n", "id;prompt"),
        ("jobs.xlsx", b"PK\x03\x04", "known are"),
    ],
)
def test_a_file_that_cannot_be_read_at_all_is_refused_by_name(
    folder: Path, cli: Any, const: Any, name: str, content: bytes, sentence: str
) -> None:
    Path(name).write_bytes(content)
    ran = cli("run", name, "--model", const("a"), "-o", "out.jsonl")
    assert ran.code == 2
    assert sentence in ran.err
    assert not Path("out.jsonl").exists()


def test_carriage_returns_alone_never_pass_for_line_ends_in_silence(
    folder: Path, cli: Any, const: Any, files: ModuleType
) -> None:
    Path("jobs.jsonl").write_bytes(_line("a") + b"\r" + _line("b") + b"\r")
    assert cli("run", "jobs.jsonl", "--model", const("a"), "-o", "o.jsonl").code == 3
    assert files.column("o.jsonl", "status") == ["error"]


def test_line_separators_of_unicode_do_not_end_a_line(
    folder: Path, cli: Any, const: Any, files: ModuleType
) -> None:
    text = "a\u2028b\u2029c\u0085d\x0be"
    files.write_jsonl("jobs.jsonl", [json.dumps({"id": "u", "prompt": text}, ensure_ascii=False)])
    cli("run", "jobs.jsonl", "--model", const("a"), "--max-tokens", 1, "--keep", "prompt",
        "-o", "o.jsonl")  # fmt: skip
    (row,) = files.read_rows("o.jsonl")
    assert (row["id"], row["prompt"]) == ("u", text)
    assert row["prompt_tokens"] == 1 + len(text.encode())


def test_ids_of_every_kind_stay_apart(
    folder: Path, cli: Any, const: Any, files: ModuleType
) -> None:
    ids = ["x", "X", "x ", "", "\u00e9", "e\u0301", 1, 1.0, 1.5, -0.0, True, None, "null", "1"]
    files.write_jsonl("jobs.jsonl", [{"id": i, "prompt": "x"} for i in ids] + [{"prompt": "x"}])
    ran = cli("run", "jobs.jsonl", "--schema", "tag.json", "--model", const("a"), "-o", "o.jsonl")
    found = files.column("o.jsonl", "id")
    assert found[:6] == ids[:6]
    assert found[6:11] == ["1", "1.0", "1.5", "-0.0", "true"]
    assert found[11:] == [None, "null", "1", None]
    assert "id that an earlier row has" in ran.err


def test_equal_ids_are_told_and_each_row_is_answered(
    folder: Path, cli: Any, markov: Path, files: ModuleType
) -> None:
    files.write_jsonl("jobs.jsonl", [_line("twin", "a"), _line("one", "c"), _line("twin", "f")])
    ran = cli("run", "jobs.jsonl", "--model", markov, "--max-tokens", 2, "-o", "o.jsonl")
    assert "id that an earlier row has" in ran.err
    rows = files.read_rows("o.jsonl")
    assert [(r["id"], r["row"], r["text"]) for r in rows] == [
        ("twin", 0, "bc"), ("one", 1, "de"), ("twin", 2, "gh"),
    ]  # fmt: skip


def test_half_characters_are_mended_and_said(
    folder: Path, cli: Any, const: Any, files: ModuleType
) -> None:
    files.write_jsonl("jobs.jsonl", [r'{"id": "a", "prompt": "x\ud800y"}', _line("b")])
    ran = cli("run", "jobs.jsonl", "--model", const("a"), "--max-tokens", 1, "--keep", "prompt",
              "-o", "o.jsonl")  # fmt: skip
    assert ran.code == 0
    assert "surrogate" in ran.err
    assert files.column("o.jsonl", "prompt_tokens") == [1 + 5, 2]


def test_csv_keeps_quotes_line_breaks_and_leading_zeros(
    folder: Path, cli: Any, markov: Path, files: ModuleType
) -> None:
    Path("jobs.csv").write_bytes(
        b'\xef\xbb\xbfid,prompt,max_tokens\r\n007,"a ""q"", b",2\r\n1e3,"l1\r\nl2",\r\nNA,,3\r\n'
    )
    cli("run", "jobs.csv", "--model", markov, "--max-tokens", 4, "--keep", "prompt",
        "-o", "o.jsonl")  # fmt: skip
    rows = files.read_rows("o.jsonl")
    assert [row["id"] for row in rows] == ["007", "1e3", "NA"]
    assert [row["prompt"] for row in rows] == ['a "q", b', "l1\r\nl2", None]
    assert [row["text"] for row in rows] == ["cd", "3456", None]
    assert rows[2]["error"]["code"] == "null_field"


@pytest.mark.parametrize("how", ["gzip", "fifo", "parquet through a pipe", "a folder", "a glob"])
def test_rows_come_from_wherever_they_are(
    folder: Path, cli: Any, const: Any, files: ModuleType, how: str
) -> None:
    content = b"".join(_line(name) + b"\n" for name in "ab")
    name, stdin = "jobs.jsonl", None
    if how == "gzip":
        name = "jobs.jsonl.gz"
        Path(name).write_bytes(gzip.compress(content))
    elif how == "fifo":
        os.mkfifo(name)
        threading.Thread(target=Path(name).write_bytes, args=(content,)).start()
    elif how == "a glob":
        for part in "ab":
            Path(f"{part}.jsonl").write_bytes(_line(part))  # no line break between the files
        name = "*.jsonl"
    else:
        Path("rows").mkdir()
        pq.write_table(pa.table({"id": ["a", "b"], "prompt": ["x", "x"]}), "rows/1.parquet")
        name = "rows"
        if how == "parquet through a pipe":
            name, stdin = "-", Path("rows/1.parquet").read_bytes()
    Path("out").mkdir()
    ran = cli("run", name, "--model", const("a"), "--max-tokens", 1, "-o", "out/o.jsonl",
              stdin=stdin)  # fmt: skip
    assert ran.code == 0, ran.err
    assert files.column("out/o.jsonl", "id") == ["a", "b"]


def test_the_input_is_never_written_over(
    folder: Path, cli: Any, const: Any, files: ModuleType
) -> None:
    files.write_jsonl("jobs.jsonl", [_line("a")])
    Path("link.jsonl").symlink_to("jobs.jsonl")
    before = Path("jobs.jsonl").read_bytes()
    for source, output in (
        ("jobs.jsonl", "jobs.jsonl"), ("jobs.jsonl", "link.jsonl"), ("*.jsonl", "./jobs.jsonl"),
    ):  # fmt: skip
        ran = cli("run", source, "--model", const("a"), "-o", output, "--restart")
        assert ran.code == 2
        assert output.removeprefix("./") in ran.err
        assert Path("jobs.jsonl").read_bytes() == before


def test_an_output_among_the_inputs_is_refused_the_second_time_too(
    folder: Path, cli: Any, const: Any, files: ModuleType
) -> None:
    files.write_jsonl("jobs.jsonl", [_line("a")])
    options = ["--model", const("a"), "--max-tokens", 1, "-o", "z.jsonl"]
    assert cli("run", "*.jsonl", *options).code == 0
    before = Path("z.jsonl").read_bytes()
    assert cli("run", "*.jsonl", *options).code == 2
    assert Path("z.jsonl").read_bytes() == before


def test_kept_columns_of_every_type_come_through(
    folder: Path, cli: Any, const: Any, files: ModuleType
) -> None:
    moment = datetime.datetime(2024, 2, 29, 12, 30, 0, 5, tzinfo=datetime.UTC)
    table = pa.table(
        {
            "id": pa.array([1, 2], pa.int64()),
            "prompt": ["a", "b"],
            "day": [datetime.date(2024, 2, 29), None],
            "at": pa.array([moment, None], pa.timestamp("us", "UTC")),
            "price": pa.array([Decimal("12345678901234567890.10"), None], pa.decimal128(38, 2)),
            "list": [[1, None], []],
            "map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int32())),
            "bytes": [b"\x00\xff", None],
            "big": pa.array([2**64 - 1, None], pa.uint64()),
        }
    )
    pq.write_table(table, "jobs.parquet")
    options = ["--model", const("a"), "--max-tokens", 1, "--keep", "all"]
    for ending in ("parquet", "arrow", "jsonl", "csv"):
        assert cli("run", "jobs.parquet", *options, "-o", f"o.{ending}").code == 0
    kept = [name for name in table.column_names if name != "id"]
    for ending in ("parquet", "arrow"):
        out = files.read_table(f"o.{ending}")
        assert out.select(kept).to_pylist() == table.select(kept).to_pylist()
        assert out.schema.field("id").type == pa.int64()
    first = Path("o.jsonl").read_text("utf-8").splitlines()[0]
    assert '"price":12345678901234567890.10' in first
    assert '"big":18446744073709551615' in first
    assert "12345678901234567890.10" in Path("o.csv").read_text("utf-8")
