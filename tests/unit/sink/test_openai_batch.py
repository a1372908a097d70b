"""Rows of results as lines of OpenAI's output and error files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai_shapes
import pyarrow as pa
import pytest

from batchradix.errors import RowErrorCode
from batchradix.sink.columns import result_schema
from batchradix.sink.openai_batch import REQUEST, OpenAIBatchWriter

CALL = [{"name": "add", "arguments": '{"n":7}'}]
ROW = {
    "id": "a",
    "row": 0,
    "status": "ok",
    "value": None,
    "text": "hi",
    "error": None,
    "finish_reason": "stop",
    "prompt_tokens": 3,
    "cached_tokens": 1,
    "completion_tokens": 2,
    "request": "chat",
}


def written(tmp_path: Path, *rows: dict[str, Any], style: str = "hermes") -> tuple[list[Any], ...]:
    """The parsed lines of the output and of the error file."""
    schema = result_schema(
        id_type=pa.string(),
        value_type=pa.string(),
        keep=pa.schema([REQUEST]),
        metadata={
            "batchradix.model": "m",
            "batchradix.model_hash": "0123456789abcdef",
            "batchradix.created": "5",
            "batchradix.table": "t",
            "batchradix.tool_style": style,
        },
    )
    writer = OpenAIBatchWriter(tmp_path / "out.jsonl", schema)
    writer.write_batch(pa.RecordBatch.from_pylist([ROW | row for row in rows], schema=schema))
    writer.close()
    return tuple(
        [openai_shapes.parsed(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in (writer.path, writer.errors)
    )


def test_a_chat_has_its_text_counts_and_what_made_it(tmp_path: Path) -> None:
    [(line, body)], errors = written(tmp_path, {"text": 'a\u2028\n"é'})
    assert errors == []
    assert (line.custom_id, line.error, line.response.status_code) == ("a", None, 200)
    assert body.choices[0].message.content == 'a\u2028\n"é'
    assert (body.model, body.created) == ("m", 5)
    assert body.system_fingerprint == "fp_0123456789ab"
    usage = body.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 2, 5)
    assert usage.prompt_tokens_details.cached_tokens == 1


@pytest.mark.parametrize(
    ("style", "text", "content"),
    [
        ("hermes", 'I call.\n<tool_call>\n{"name"', "I call."),
        ("hermes", '<tool_call>\n{"name"', None),
        ("mistral", 'So: [TOOL_CALLS][{"name"', "So:"),
        ("llama3", '{"name": "add"', None),
        ("json", '[{"name":"add"', None),
    ],
)
def test_the_text_before_calls_is_the_content(
    tmp_path: Path, style: str, text: str, content: str | None
) -> None:
    row = {"request": "tools", "value": json.dumps(CALL * 2), "text": text}
    [(_, body)], _ = written(tmp_path, row, style=style)
    [choice] = body.choices
    assert choice.message.content == content
    assert [call.function.arguments for call in choice.message.tool_calls] == ['{"n":7}'] * 2
    assert choice.message.tool_calls[0].id != choice.message.tool_calls[1].id
    assert choice.finish_reason == "tool_calls"


def test_a_chat_that_calls_nothing_is_text(tmp_path: Path) -> None:
    answers = [("[]", "stop"), (None, "length")]
    rows = [
        {"request": "tools", "value": value, "finish_reason": reason} for value, reason in answers
    ]
    answered, _ = written(tmp_path, *rows)
    for (_, reason), (_, body) in zip(answers, answered, strict=True):
        [choice] = body.choices
        assert (choice.message.content, choice.finish_reason) == ("hi", reason)
        assert choice.message.tool_calls == []


def test_a_list_in_an_answer_under_a_schema_is_no_call(tmp_path: Path) -> None:
    row = {"request": "chat", "value": json.dumps(CALL), "text": json.dumps(CALL)}
    [(_, body)], _ = written(tmp_path, row)
    assert body.choices[0].message.content == json.dumps(CALL)


def test_what_went_round_in_circles_was_cut_by_length(tmp_path: Path) -> None:
    row = {"status": "truncated", "finish_reason": "repetition", "request": "completion"}
    [(_, body)], _ = written(tmp_path, row)
    assert (body.object, body.choices[0].text) == ("text_completion", "hi")
    assert body.choices[0].finish_reason == "length"


@pytest.mark.parametrize("code", list(RowErrorCode))
def test_every_error_has_a_line_of_its_own_in_the_error_file(
    tmp_path: Path, code: RowErrorCode
) -> None:
    error = {"code": code.value, "message": "why"}
    answered, [(line, body)] = written(tmp_path, {"status": "error", "error": error, "id": None})
    assert answered == []
    assert line.custom_id is None
    assert (line.error.code, body.error.code, body.error.message) == (code, code, "why")
    is_ours = line.response.status_code == 500
    assert body.error.type == ("server_error" if is_ours else "invalid_request_error")
    assert is_ours == (code in ("engine_failed", "row_timeout", "non_finite_logits",
                                "kv_pool_too_small", "invalid_json", "schema_mismatch",
                                "not_representable"))  # fmt: skip


def test_names_are_those_of_a_row_and_the_same_each_time(tmp_path: Path) -> None:
    first, _ = written(tmp_path, {}, {"row": 1})
    again, _ = written(tmp_path, {}, {"row": 1})
    ids = [line.id for line, _ in first]
    assert ids == [line.id for line, _ in again]
    assert len(set(ids)) == 2
