"""OpenAI batch files: requests as rows, what is refused as a whole, and what is an error row."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from batchradix.errors import InputError
from batchradix.jobs import open_job
from batchradix.jobs.base import JobSource
from batchradix.jobs.openai_request import seed_of_choice
from batchradix.types import Row

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]

Write = Callable[..., Path]


def request(custom_id: Any = "a", url: str = CHAT, **body: Any) -> dict[str, Any]:
    if url == CHAT:
        body = {"messages": MESSAGES} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def lines(*rows: Any, name: str = "batch.jsonl") -> Path:
        texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / name).write_text("\n".join(texts) + "\n")
        return tmp_path / name

    return lines


def rows_of(source: JobSource, columns: Collection[str] | None = None) -> list[Row]:
    return [row for batch in source.batches(columns) for row in batch]


def only(write: Write, **body: Any) -> Row:
    """The row of a file with one good request before this one."""
    with open_job(write(request("good"), request(**body))) as source:
        return rows_of(source)[1]


def test_a_body_s_parameters_become_the_columns_of_its_row(write: Write) -> None:
    body = {
        "model": "m", "max_completion_tokens": 7, "max_tokens": 9, "temperature": 0.5,
        "top_p": 0.9, "stop": ["x"], "seed": 3, "presence_penalty": 1, "frequency_penalty": -1,
        "response_format": {"type": "text"}, "user": "u", "metadata": {"a": "b"}, "n": 1,
        "logprobs": False, "top_logprobs": None, "stream": False, "store": True,
    }  # fmt: skip
    with open_job(write(request(**body))) as source:
        [row] = rows_of(source)
    assert row.error is None
    assert row.id == "a"
    assert row.values == {
        "messages": MESSAGES, "continue_final_message": False, "max_tokens": 7,
        "temperature": 0.5, "top_p": 0.9, "stop": ["x"], "seed": 3, "presence_penalty": 1,
        "frequency_penalty": -1, "response_format": {"type": "text"},
    }  # fmt: skip


def test_nulls_are_as_good_as_absent(write: Write) -> None:
    body = dict.fromkeys(["max_tokens", "n", "stop", "seed", "tools", "logprobs", "foo"])
    row = only(write, **body)
    assert row.error is None
    assert row.values.keys() == {"messages", "continue_final_message"}


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ({"logprobs": True}, "unsupported_parameter", "'logprobs'"),
        ({"top_logprobs": 3}, "unsupported_parameter", "'top_logprobs'"),
        ({"logit_bias": {"5": 1}}, "unsupported_parameter", "'logit_bias'"),
        ({"stream": True}, "unsupported_parameter", "'stream'"),
        ({"stream": 0}, "unsupported_parameter", "'stream'"),
        ({"functions": [{"name": "f"}]}, "unsupported_parameter", "'functions'"),
        ({"modalities": ["text", "audio"]}, "unsupported_parameter", "'modalities'"),
        ({"no_such_thing": 1}, "unsupported_parameter", "'no_such_thing'"),
        ({"prompt": "x"}, "unsupported_parameter", "'prompt'"),
        ({"n": 0}, "bad_setting", "'n' must be an integer from 1"),
        ({"n": 129}, "bad_setting", "to 128, not 129"),
        ({"n": True}, "bad_setting", "'n'"),
        ({"n": 2.0}, "bad_setting", "'n'"),
        ({"tool_choice": "required"}, "bad_setting", "'tool_choice' needs 'tools'"),
        ({"messages": None}, "missing_field", "'messages'"),
        ({"messages": "hi"}, "bad_value", "'messages'"),
        ({"model": 5}, "bad_value", "'model'"),
    ],
)  # fmt: skip
def test_what_a_chat_cannot_ask_for_is_an_error_row(
    write: Write, body: dict[str, Any], code: str, words: str
) -> None:
    row = only(write, **body)
    assert row.error is not None
    assert row.id == "a"
    assert row.error.code == code
    assert words in row.error.message
    assert row.error.message.startswith("row 1 (line 2): ")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({}, "missing_field"),
        ({"prompt": 5}, "bad_value"),
        ({"prompt": [5, 6]}, "unsupported_parameter"),
        ({"prompt": ["a", "b"]}, "unsupported_parameter"),
        ({"prompt": "x", "logprobs": 0}, "unsupported_parameter"),
        ({"prompt": "x", "echo": True}, "unsupported_parameter"),
        ({"prompt": "x", "suffix": "y"}, "unsupported_parameter"),
        ({"prompt": "x", "best_of": 3}, "unsupported_parameter"),
        ({"prompt": "x", "messages": MESSAGES}, "unsupported_parameter"),
        ({"prompt": "x", "tools": []}, "unsupported_parameter"),
    ],
)
def test_what_a_completion_cannot_ask_for_is_an_error_row(
    write: Write, body: dict[str, Any], code: str
) -> None:
    row = only(write, url=COMPLETIONS, **body)
    assert row.error is not None
    assert row.error.code == code


def test_a_list_of_one_prompt_and_a_neutral_best_of_are_a_completion(write: Write) -> None:
    row = only(write, url=COMPLETIONS, prompt=["x"], best_of=1, echo=False, suffix="")
    assert row.error is None
    assert row.values == {"prompt": "x"}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"url": "/v1/embeddings"}, "unsupported_endpoint"),
        ({"method": "GET"}, "unsupported_endpoint"),
        ({"body": []}, "bad_value"),
        ({"body": None}, "missing_field"),
        ({"url": None}, "missing_field"),
        ({"url": ["x"]}, "unsupported_endpoint"),
    ],
)
def test_a_line_that_is_no_such_request_is_an_error_row(
    write: Write, changes: dict[str, Any], code: str
) -> None:
    with open_job(write(request("good"), request("bad") | changes)) as source:
        row = rows_of(source)[1]
    assert row.error is not None
    assert row.error.code == code


def test_a_broken_line_is_an_error_row_without_an_id(write: Write) -> None:
    with open_job(write(request("a"), '{"custom_id": "b', request("c"))) as source:
        rows = rows_of(source)
    assert [row.id for row in rows] == ["a", None, "c"]
    assert rows[1].error is not None
    assert rows[1].error.code == "bad_line"
    assert "batch.jsonl line 2" in rows[1].error.message


def test_ids_that_are_there_twice_are_refused_with_their_lines(write: Write) -> None:
    path = write(request("x"), request("twin"), request("Twin"), request("twin "), request("twin"))
    with open_job(path) as source, pytest.raises(InputError) as refused:
        source.scan()
    message = str(refused.value)
    assert f"'twin' in line 2 of {path} and line 5 of {path}" in message
    assert "line 3" not in message
    assert "line 4" not in message


def test_ids_are_told_apart_over_all_files(write: Write, tmp_path: Path) -> None:
    write(request("a"), name="1.jsonl")
    write("", request("b"), request("a"), name="2.jsonl")
    with (
        open_job(tmp_path / "*.jsonl") as source,
        pytest.raises(InputError, match=r"'a' in line 1 of .*1\.jsonl and line 3 of .*2\.jsonl"),
    ):
        source.scan()


@pytest.mark.parametrize(
    ("custom_id", "words"),
    [("", "an empty one"), (None, "has none"), (7, "'7', which is no text"), ("\ud800", "half")],
)
def test_an_id_that_is_none_is_refused_with_its_line(
    write: Write, custom_id: Any, words: str
) -> None:
    path = write(request("a"), "", request(custom_id))
    with open_job(path) as source, pytest.raises(InputError, match=words) as refused:
        source.scan()
    assert f"line 3 of {path}" in str(refused.value)


def test_a_missing_id_is_refused_and_many_are_counted(write: Write) -> None:
    nameless = {name: value for name, value in request().items() if name != "custom_id"}
    with open_job(write(request(), *[nameless] * 9)) as source:
        with pytest.raises(InputError, match=r"line 6 of .* and 4 more") as refused:
            source.scan()
        assert "line 7" not in str(refused.value)


def test_different_models_in_a_file_are_refused_with_lines(write: Write) -> None:
    path = write(request("a", model="m"), request("b"), request("c", model="other"))
    with open_job(path) as source, pytest.raises(InputError) as refused:
        source.scan()
    assert f"'m' in line 1 of {path}; 'other' in line 3 of {path}" in str(refused.value)


def test_the_model_that_all_requests_name_is_known(write: Write) -> None:
    with open_job(write(request("a"), request("b", model="m"))) as source:
        source.scan()
        assert source.requested_model == "m"


def test_a_request_for_several_answers_is_as_many_rows(write: Write) -> None:
    path = write(request("a"), request("b", n=3, seed=5), request("c", n=0), request("d", n=2))
    with open_job(path) as source:
        rows = rows_of(source)
        assert source.num_rows == 4
        assert source.starts is not None
        assert source.starts.tolist() == [0, 1, 4, 5, 7]
    assert [row.id for row in rows] == list("abbbcdd")
    assert [row.index for row in rows] == list(range(7))
    assert [row.number for row in rows] == [0, 1, 1, 1, 2, 3, 3]
    seeds = [row.values["seed"] for row in rows[1:4]]
    assert seeds[0] == 5
    assert len(set(seeds)) == 3
    assert "seed" not in rows[5].values
    assert rows[4].error is not None


def test_seeds_of_choices_differ_among_neighbours_and_fit_64_bits() -> None:
    seeds = {seed_of_choice(seed, number) for seed in range(-20, 20) for number in range(20)}
    assert len(seeds) == 800
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert seed_of_choice("x", 1) == "x"  # refused by whoever reads it


def test_without_several_answers_each_request_is_its_row(write: Write) -> None:
    with open_job(write(request("a"), request("b", n=1))) as source:
        assert source.starts is None


def test_batches_break_anywhere_and_a_limit_counts_requests(write: Write) -> None:
    path = write(*(request(f"r{i}", n=4) for i in range(3)))
    with open_job(path, limit=2) as source:
        batches = list(source.batches({"messages"}, 3))
        assert [len(batch) for batch in batches] == [3, 3, 2]
        assert [row.index for batch in batches for row in batch] == list(range(8))
        assert {tuple(row.values) for batch in batches for row in batch} == {("messages",)}
        assert source.num_rows == 2


def test_tools_that_may_not_be_called_are_not_there(write: Write) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert "tools" not in only(write, tools=tools, tool_choice="none").values
    assert only(write, tools=tools).values["tool_choice"] == "auto"


def test_a_last_assistant_message_is_continued_on_request_only(write: Write) -> None:
    row = only(write, continue_final_message=True, add_generation_prompt=False)
    assert row.values["continue_final_message"] is True
    row = only(write, continue_final_message=False, add_generation_prompt=True)
    assert row.values["continue_final_message"] is False
    row = only(write, add_generation_prompt=False)
    assert row.error is not None


def test_the_lines_themselves_are_the_columns_to_keep(write: Write) -> None:
    with open_job(write(request("a", n=2), request("b", max_tokens=3))) as source:
        table = [batch.to_pydict() for batch in source.keep_batches(["custom_id", "body"])]
        kinds = [batch.to_pydict() for batch in source.kind_batches()]
    assert table[0]["custom_id"] == ["a", "b"]
    assert json.loads(table[0]["body"][1]) == {"messages": MESSAGES, "max_tokens": 3}
    assert kinds == [{"request": ["chat", "chat"]}]


def test_requests_are_known_compressed_and_by_another_name(tmp_path: Path) -> None:
    data = f"{json.dumps(request('a'))}\r\n".encode()
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + data))
    (tmp_path / "b.txt").write_bytes(b"\n" + data)
    for name in ("b.jsonl.gz", "b.txt"):
        with open_job(tmp_path / name) as source:
            assert source.is_requests
            assert [row.id for row in rows_of(source)] == ["a"]


def test_files_of_rows_and_of_requests_do_not_mix(write: Write, tmp_path: Path) -> None:
    write({"id": "a", "prompt": "x"}, name="1.jsonl")
    write(request("a"), name="2.jsonl")
    with pytest.raises(InputError, match=r"mixes OpenAI batch files \(.*2\.jsonl\)"):
        open_job(tmp_path / "*.jsonl")


def test_another_column_of_ids_is_refused(write: Write) -> None:
    with pytest.raises(InputError, match="custom_ids; leave out the id column 'url'"):
        open_job(write(request("a")), id_column="url")
