"""The published shapes of OpenAI's batch responses, for where the package `openai` is not
installed; stricter than its own models: no field beside those."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Function(Shape):
    name: str
    arguments: str


class ToolCall(Shape):
    id: str
    type: Literal["function"]
    function: Function


class Message(Shape):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: list[ToolCall] = Field(default_factory=list)


class Choice(Shape):
    index: int
    message: Message
    logprobs: None
    finish_reason: Literal["stop", "length", "tool_calls", "content_filter"]


class PromptTokensDetails(Shape):
    cached_tokens: int


class Usage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Body(Shape):
    id: str
    created: int
    model: str
    usage: Usage
    system_fingerprint: str


class ChatCompletion(Body):
    object: Literal["chat.completion"]
    choices: list[Choice]


class CompletionChoice(Shape):
    index: int
    text: str
    logprobs: None
    finish_reason: Literal["stop", "length", "content_filter"]


class Completion(Body):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class Error(Shape):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Shape):
    error: Error


class LineError(Shape):
    code: str
    message: str


class Response(Shape):
    status_code: int
    request_id: str
    body: dict[str, Any]


class Line(Shape):
    id: str
    custom_id: str | None
    response: Response
    error: LineError | None


def parsed(text: str) -> tuple[Line, Any]:
    """A line of an output or error file, and its body; raises what pydantic raises."""
    line = Line.model_validate(json.loads(text))
    body = line.response.body
    if line.response.status_code != 200:
        return line, ErrorBody.model_validate(body)
    kinds = {"chat.completion": ChatCompletion, "text_completion": Completion}
    return line, kinds[body["object"]].model_validate(body)
