"""Functions that answers call: how they are given, and what finished answers are read as."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchradix.errors import OptionError, RowErrorCode, SchemaError
from batchradix.schema.answer_format import answer_format
from batchradix.schema.answers import InvalidAnswer
from batchradix.schema.tool_styles import STYLES, detect_style
from batchradix.schema.tools import ToolFormat, ToolSet
from batchradix.sink.json_text import json_texts

WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer", "multipleOf": 3}},
        "required": ["city"],
    },
}
CLOCK = {"name": "clock"}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": CLOCK}]
PARIS = {"name": "weather", "arguments": '{"city": "Paris"}'}
NOW = {"name": "clock", "arguments": "{}"}


def format_of(style: str, **options: Any) -> ToolFormat:
    return ToolSet(TOOLS, style=style, **options).format_for("m", None)


@pytest.mark.parametrize(
    ("style", "text", "calls"),
    [
        ("hermes", "It rains.", []),
        ("hermes", "", []),
        (
            "hermes",
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
            [PARIS],
        ),
        (
            "hermes",
            'Let me see.\n<tool_call>{"name":"weather","arguments":{"city": "Paris"}}</tool_call>\n'
            '\n<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>\n',
            [PARIS, NOW],
        ),
        ("llama3", "It rains.", []),
        ("llama3", '{"name": "weather", "parameters": {"city": "Paris"}}', [PARIS]),
        ("mistral", "It rains [TOOL].", []),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}, '
            '{"name": "clock", "arguments": {}}]',
            [PARIS, NOW],
        ),
        (
            "json",
            '[{"name":"clock","arguments":{}},{"name":"weather","arguments":{"city": "Paris"}}]',
            [NOW, PARIS],
        ),
    ],
)
def test_each_format_is_read_as_models_write_it(
    style: str, text: str, calls: list[dict[str, str]]
) -> None:
    assert format_of(style).parse(text) == calls


@pytest.mark.parametrize(
    ("style", "text", "code", "sentence"),
    [
        ("hermes", '<tool_call>\n{"name": "clock"', "invalid_json", "expected ', \"arguments\":'"),
        ("hermes", '<tool_call>{"name": 1, "arguments": {}}</tool_call>', "invalid_json", "name"),
        ("mistral", "[TOOL_CALLS][]", "invalid_json", "expected"),
        ("json", '[{"name":"clock","arguments":{}}] more', "invalid_json", "goes on"),
        ("json", '[{"name":"clock","arguments":nonsense}]', "invalid_json", "expected JSON"),
        ("json", "It rains.", "invalid_json", "expected '['"),
        ("llama3", '{"name": "sing", "parameters": {}}', "schema_mismatch", "/0/name: 'sing'"),
        (
            "llama3",
            '{"name": "weather", "parameters": {"city": 1}}',
            "schema_mismatch",
            "/0/arguments/city",
        ),
        (
            "json",
            '[{"name":"clock","arguments":{}},'
            '{"name":"weather","arguments":{"city":"a","days":4}}]',
            "schema_mismatch",
            "/1/arguments/days",
        ),
        (
            "json",
            '[{"name":"weather","arguments":{"city":"a","city":"b"}}]',
            "invalid_json",
            "/0/arguments: an object has the key 'city' twice",
        ),
    ],
)
def test_a_broken_call_is_named_with_its_place(
    style: str, text: str, code: str, sentence: str
) -> None:
    with pytest.raises(InvalidAnswer) as caught:
        format_of(style).parse(text)
    assert caught.value.code == RowErrorCode(code)
    assert sentence in str(caught.value)


def test_what_was_not_allowed_is_a_mismatch() -> None:
    two = '[{"name":"clock","arguments":{}},{"name":"clock","arguments":{}}]'
    for options, text, sentence in [
        ({"style": "hermes", "choice": "required"}, "It rains.", "it calls no function"),
        ({"style": "json", "parallel": False}, two, "more than one function"),
        ({"style": "json", "choice": "clock"}, two, "more than one function"),
        ({"style": "llama3", "choice": "weather"}, '{"name":"clock","parameters":{}}', "'clock'"),
    ]:
        with pytest.raises(InvalidAnswer, match=sentence) as caught:
            format_of(**options).parse(text)
        assert caught.value.code is RowErrorCode.SCHEMA_MISMATCH


def test_arguments_keep_every_digit_they_were_written_with() -> None:
    tools = [{"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}}]
    found = ToolSet(tools, style="json").format_for("m", None)
    text = '[{"name":"f","arguments":{"n":123456789012345678901234567890}}]'
    [call] = found.parse(text)
    assert call["arguments"] == '{"n":123456789012345678901234567890}'


def test_values_are_a_list_of_structs_whose_arguments_are_marked_as_json() -> None:
    found = format_of("hermes")
    text = pa.string()
    assert found.arrow_type == pa.list_(pa.struct([("name", text), ("arguments", text)]))
    array = found.to_arrow([[PARIS, NOW], [], None])
    assert array.to_pylist() == [[PARIS, NOW], [], None]
    lines = [json.loads(line) for line in json_texts(array, found.arrow_field("value"))]
    assert lines[0][0] == {"name": "weather", "arguments": {"city": "Paris"}}
    assert lines[1:] == [[], None]


def test_a_file_text_bare_functions_and_openai_s_list_are_the_same(tmp_path: Path) -> None:
    file = tmp_path / "tools.json"
    file.write_text(json.dumps(TOOLS))
    for given in (str(file), file, json.dumps(TOOLS), TOOLS, [WEATHER, CLOCK],
                  [{"type": "function", **WEATHER}, CLOCK]):  # fmt: skip
        assert ToolSet(given).json == TOOLS


@pytest.mark.parametrize(
    ("tools", "sentence"),
    [
        ("missing.json", "the file missing.json does not exist"),
        ("[1", "the list is not JSON"),
        ([], "there are none"),
        (7, "expected a list of functions, not int"),
        ([7], "number 0 is no object"),
        ([{"type": "web_search"}], "of type 'web_search'"),
        ([{"type": "function", "function": 1}], "no object at 'function'"),
        ([{"description": "?"}], "the function of number 0 has no name"),
        ([CLOCK, CLOCK], "two functions called 'clock'"),
        ([{"name": "f", "description": "\ud800"}], "half of a surrogate pair"),
        ([{"name": "f", "parameters": 1}], "the parameters of 'f' must be a JSON Schema"),
        ([{"name": "f", "parameters": {"type": "array"}}], "must describe an object, not 'array'"),
        (
            [{"name": "f", "parameters": {"properties": {"a": {"type": "nope"}}}}],
            "tools: the parameters of 'f': type at #/properties/a/type",
        ),
    ],
)
def test_tools_that_cannot_be_used_are_refused(tools: Any, sentence: str) -> None:
    with pytest.raises(SchemaError, match=r"^tools: ") as caught:
        ToolSet(tools)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"choice": "sing"}, r"tool_choice must be .* \(weather, clock\), not 'sing'"),
        ({"style": "xml"}, "tool_format must be hermes, llama3, mistral or json, not 'xml'"),
        ({"parallel": 1}, "parallel_tool_calls must be True or False"),
        ({"style": "json", "choice": "auto"}, "the format json has no marker"),
        ({"style": "llama3", "parallel": True}, "cannot be had in the format llama3"),
        ({}, "not known for model m, which has no chat template; give tool_format"),
    ],
)
def test_what_cannot_be_had_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        ToolSet(TOOLS, **options).format_for("m", None)


def test_options_of_tools_need_tools_and_tools_exclude_a_schema() -> None:
    with pytest.raises(OptionError, match="tool_choice needs tools"):
        answer_format(tool_choice="auto")
    with pytest.raises(OptionError, match="regex and tools exclude each other"):
        answer_format(regex="a", tools=TOOLS)


def test_openai_s_object_names_the_function_to_call() -> None:
    choice = {"type": "function", "function": {"name": "clock"}}
    assert format_of("json", choice=choice).kind == "tool_calls json clock single"


@pytest.mark.parametrize(
    ("template", "style"),
    [
        (
            r"{{- '<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}' }}",
            "hermes",
        ),
        ("{{ '[TOOL_CALLS][' }}", "mistral"),
        (
            """{{ 'Respond in the format {"name": function name, "parameters": dictionary}' }}""",
            "llama3",
        ),
        ("<tool_call>\n<function=example>\narguments", None),
        ("[TOOL_CALLS]name[ARGS]{}", None),
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_the_format_is_told_from_the_chat_template(template: str | None, style: str | None) -> None:
    found = detect_style(template)
    assert found == (None if style is None else STYLES[style])


def test_what_is_not_enforced_is_said_with_the_function() -> None:
    tags = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    tools = [CLOCK, {"name": "file", "parameters": {"properties": {"tags": tags}}}]
    [notice] = ToolSet(tools, style="json").format_for("m", None).notices
    assert notice.startswith("function file: not enforced while decoding")
    assert "uniqueItems at #/properties/tags" in notice
