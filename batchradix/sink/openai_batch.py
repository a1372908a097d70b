"""The output and error files of OpenAI's Batch API: a response a line, in input order.

Requests that were answered go to the output, those that failed to a file beside it
(``Writer.errors``). All that stands in them comes from the rows and the schema's metadata, so the
files are the same each time they are written.

Metadata read (``batchradix.`` before each): ``model``, ``model_hash``, ``created`` (seconds since
1970), ``table`` (what sets this table's ids apart), ``tool_style``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchradix.errors import RowErrorCode
from batchradix.schema.tool_styles import STYLES
from batchradix.sink.base import Writer
from batchradix.types import FinishReason, Status

REQUEST = pa.field("request", pa.string())
"""The column, beside those of results, that says what kind of response a request wants: chat,
tools (a chat that may call them) or completion; null for what is none of these."""

# What befell a request for reasons that are not in it.
_SERVER_CODES = frozenset(
    {
        RowErrorCode.KV_POOL_TOO_SMALL,
        RowErrorCode.INVALID_JSON,
        RowErrorCode.SCHEMA_MISMATCH,
        RowErrorCode.NOT_REPRESENTABLE,
        RowErrorCode.NON_FINITE_LOGITS,
        RowErrorCode.ROW_TIMEOUT,
        RowErrorCode.ENGINE_FAILED,
    }
)

# Scripts split such files by ``str.splitlines``, which takes these for ends of lines too.
_LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\u0085\u2028\u2029"}


class OpenAIBatchWriter(Writer):
    """The rows of results, with `REQUEST` and perhaps ``samples``, as responses."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        super().__init__(path, schema)
        facts = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
        self._model = facts.get("batchradix.model", "")
        self._fingerprint = f"fp_{facts.get('batchradix.model_hash', '')[:12]}"
        self._created = int(facts.get("batchradix.created", 0))
        self._table = facts.get("batchradix.table", "")
        self._style = STYLES[facts.get("batchradix.tool_style", "json")]
        self.errors = path.with_name(f"{path.name}.errors")
        self._file = open(path, "wb")  # noqa: SIM115 - closed in close()
        self._error_file = open(self.errors, "wb")  # noqa: SIM115 - closed in close()

    def write_batch(self, batch: pa.RecordBatch) -> None:
        for row in batch.to_pylist():
            is_error = row["status"] == Status.ERROR
            line = self._failed(row) if is_error else self._answered(row)
            text = json.dumps(line, ensure_ascii=False, separators=(",", ":"))
            text = text.translate(_LINE_ENDS)
            (self._error_file if is_error else self._file).write(text.encode() + b"\n")

    def close(self) -> None:
        self._file.close()
        self._error_file.close()

    def _name(self, row: dict[str, Any], *more: int) -> str:
        """A name of 24 hexadecimal digits that belongs to this row of this table alone."""
        text = json.dumps([self._table, row["row"], *more])
        return blake2b(text.encode(), digest_size=12).hexdigest()

    def _line(self, row: dict[str, Any], code: int, body: Any, error: Any) -> dict[str, Any]:
        name = self._name(row)
        return {
            "id": f"batch_req_{name}",
            "custom_id": row["id"],
            "response": {"status_code": code, "request_id": f"req_{name}", "body": body},
            "error": error,
        }

    def _failed(self, row: dict[str, Any]) -> dict[str, Any]:
        code, message = row["error"]["code"], row["error"]["message"]
        is_ours = code in _SERVER_CODES
        kind = "server_error" if is_ours else "invalid_request_error"
        error = {"message": message, "type": kind, "param": None, "code": code}
        return self._line(
            row, 500 if is_ours else 400, {"error": error}, {"code": code, "message": message}
        )

    def _answered(self, row: dict[str, Any]) -> dict[str, Any]:
        is_completion = row[REQUEST.name] == "completion"
        choice_of = self._completion_choice if is_completion else self._chat_choice
        prompt, completion = row["prompt_tokens"], row["completion_tokens"]
        body = {
            "id": f"{'cmpl' if is_completion else 'chatcmpl'}-{self._name(row)}",
            "object": "text_completion" if is_completion else "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": [
                choice_of(row, number, sample) for number, sample in enumerate(_samples(row))
            ],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
                "prompt_tokens_details": {"cached_tokens": row["cached_tokens"]},
                **_thinking_usage(row),
            },
            "system_fingerprint": self._fingerprint,
        }
        return self._line(row, 200, body, None)

    @staticmethod
    def _completion_choice(
        row: dict[str, Any], number: int, sample: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "index": number,
            "text": sample["text"],
            "logprobs": None,
            "finish_reason": _finish_reason(sample),
        }

    def _chat_choice(
        self, row: dict[str, Any], number: int, sample: dict[str, Any]
    ) -> dict[str, Any]:
        message = {"role": "assistant", "content": sample["text"], "refusal": None}
        if sample.get("reasoning") is not None:
            message["reasoning_content"] = sample["reasoning"]
        reason = _finish_reason(sample)
        calls = list(self._calls(row, number, sample))
        if calls:
            message |= {"content": self._before_calls(sample["text"]), "tool_calls": calls}
            reason = "tool_calls"
        return {"index": number, "message": message, "logprobs": None, "finish_reason": reason}

    def _calls(
        self, row: dict[str, Any], number: int, sample: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        if row[REQUEST.name] != "tools" or sample.get("value") is None:
            return
        for place, call in enumerate(json.loads(sample["value"])):
            yield {
                "id": f"call_{self._name(row, number, place)}",
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }

    def _before_calls(self, text: str) -> str | None:
        marker = self._style.marker
        return text[: text.find(marker)].strip() or None if marker else None


def _thinking_usage(row: dict[str, Any]) -> dict[str, Any]:
    num_tokens = row.get("reasoning_tokens")
    return {"completion_tokens_details": {"reasoning_tokens": num_tokens}} if num_tokens else {}


def _samples(row: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = row.get("samples", [row])
    return found


def _finish_reason(sample: dict[str, Any]) -> str:
    """What the API has a word for: an answer that was cut is one of too great a length."""
    return "stop" if sample["finish_reason"] == FinishReason.STOP else "length"
