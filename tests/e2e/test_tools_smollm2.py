"""Tool calls by the real model, which was never told how to write them."""

from __future__ import annotations

import json

import pytest

import batchradix
from batchradix.config import EngineOptions, SamplingOptions

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
}
TOOLS = [
    {"name": "weather", "description": "The weather of a city.", "parameters": WEATHER},
    {"name": "clock", "description": "The time now."},
]
ASKED = ["What is the weather in Paris?", "Is it cold in Oslo?", "What time is it?"]


def test_every_answer_is_calls_of_the_functions_with_arguments_of_their_schemas() -> None:
    result = batchradix.run(
        [{"asked": asked} for asked in ASKED],
        model="smollm2-135m",
        instruction="Call the right function.",
        column="asked",
        tools=TOOLS,
        tool_format="json",
        sampling=SamplingOptions(max_tokens=96),
        engine=EngineOptions(dtype="float32"),
    )
    rows = result.to_arrow().to_pylist()
    assert [row["status"] for row in rows] == ["ok"] * len(ASKED)
    for row in rows:
        calls = json.loads(row["text"])
        assert [{**call, "arguments": json.loads(call["arguments"])} for call in row["value"]] == (
            calls
        )
        for call in calls:
            if call["name"] == "clock":
                assert call["arguments"] == {}
            else:
                assert call["name"] == "weather"
                assert call["arguments"].keys() == {"city", "unit"}
    assert result.summary.usage.forced_tokens > result.summary.usage.decode_steps
