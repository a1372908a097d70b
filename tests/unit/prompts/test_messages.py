"""The messages column: what is taken, and what becomes an error row."""

from __future__ import annotations

import json

import pytest

from batchradix.types import Row

CALL = {"type": "function", "function": {"name": "get", "arguments": '{"city":"Oslo"}'}}
DICTS_ONLY = (
    "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
PARTS_ONLY = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"


def text_of(builder, messages, **values):
    view = builder.explain(Row(index=0, values={"messages": messages, **values}))
    assert view.error is None, view.error
    return view.text


def test_text_parts_are_all_there_in_order(tiny, build, ids_of):
    parts = [{"type": "text", "text": "AB"}, {"type": "text", "text": "CD"}]
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": parts}]
    assert len(ids_of(build(tiny), messages=messages)) == 12
    assert "AB\nCD" in text_of(build(tiny), messages)


def test_a_template_that_wants_parts_gets_parts_from_text_and_lists(tiny, build):
    builder = build(tiny, chat_template=PARTS_ONLY)
    parts = [{"type": "text", "text": "a", "image_url": None}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "user", "content": "c"}]
    assert text_of(builder, messages) == "[a][b][c]"
    builder = build(tiny, chat_template=PARTS_ONLY, template="<{{t}}>", chat=True, system="s")
    assert text_of(builder, None, t=1) == "[s][<1>]"


def test_a_null_content_with_tool_calls_puts_no_none_into_the_prompt(tiny, build, ids_of):
    messages = [
        {"role": "user", "content": "w?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", **CALL}]},
        {"role": "tool", "tool_call_id": "c1", "content": "4C"},
    ]
    expected = '<bos><|user|>w?<|end|><|assistant|>get({"city":"Oslo"})<|end|>'
    expected += "<|tool|>4C<|end|><|assistant|>"
    assert text_of(build(tiny), messages) == expected
    assert len(ids_of(build(tiny), messages=messages)) == 32


def test_a_template_that_needs_some_content_gets_empty_text_for_a_missing_one(tiny, build):
    template = "{% for m in messages %}{{ m.content + '|' }}{{ m.tool_calls | length }}{% endfor %}"
    messages = [{"role": "assistant", "tool_calls": [CALL]}, {"role": "user", "content": "x"}]
    assert text_of(build(tiny, chat_template=template), messages) == "|1x|0"


def test_argument_strings_are_not_quoted_a_second_time(tiny, build):
    messages = [{"role": "assistant", "tool_calls": [CALL]}, {"role": "user", "content": ""}]
    assert text_of(build(tiny, chat_template=DICTS_ONLY), messages) == '{"city": "Oslo"}'


def test_null_filled_struct_keys_are_dropped_but_not_from_arguments(tiny, build):
    template = "{% for m in messages %}{{ m | tojson }}{% endfor %}{# tool_calls #}"
    call = {"id": None, "function": {"name": "f", "arguments": {"a": None}}}
    message = {"role": "user", "content": "c", "name": None, "tool_calls": [call]}
    shown = json.loads(text_of(build(tiny, chat_template=template), [message]))
    call = {"function": {"name": "f", "arguments": {"a": None}}}
    assert shown == {"role": "user", "content": "c", "tool_calls": [call]}


def test_json_text_of_a_list_is_taken_too(tiny, build):
    messages = [{"role": "user", "content": "hi"}]
    builder = build(tiny)
    assert text_of(builder, json.dumps(messages)) == text_of(builder, messages)


def test_tools_reach_a_template_that_reads_them_and_are_refused_by_one_that_does_not(
    tiny, build, error_of
):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"default": None}}}]
    template = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "hi"}]
    shown = text_of(build(tiny, chat_template=template), messages, tools=tools)
    assert shown == json.dumps(tools) + "hi"
    code, message = error_of(build(tiny), messages=messages, tools=tools)
    assert code == "unsupported_content"
    assert "'tools'" in message
    assert text_of(build(tiny), messages, tools=[]).endswith("hi<|end|><|assistant|>")


def test_a_system_option_goes_before_rows_that_have_no_system_message(tiny, build):
    builder = build(tiny, system="Be <|end|> brief")
    shown = text_of(builder, [{"role": "user", "content": "hi"}])
    assert shown.startswith("<bos><|system|>Be <|end|> brief<|end|><|user|>hi")
    messages = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    assert text_of(builder, messages) == text_of(build(tiny), messages)


def test_reasoning_is_found_under_the_name_a_template_reads(tiny, build):
    template = "{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}{% endfor %}"
    message = {"role": "assistant", "content": "b", "reasoning": "a"}
    messages = [message, {"role": "user", "content": "c"}]
    assert text_of(build(tiny, chat_template=template), messages) == "abc"


@pytest.mark.parametrize("part_type", ["image_url", "image", "input_audio", "video", "file", None])
def test_media_are_refused_and_not_answered_from_the_text_alone(tiny, build, error_of, part_type):
    parts = [{"type": "text", "text": "what"}, {"type": part_type, "image_url": {"url": "data:"}}]
    code, message = error_of(build(tiny), messages=[{"role": "user", "content": parts}])
    assert code == "unsupported_content"
    assert "images" in message
    assert "not supported" in message
    assert "messages[0].content[1]" in message


@pytest.mark.parametrize(
    ("messages", "code", "part"),
    [
        ([], "bad_value", "empty"),
        ("not json", "bad_value", "not JSON"),
        ('{"role": "user"}', "bad_value", "must be a list"),
        (7, "bad_value", "must be a list"),
        (["hi"], "bad_value", "messages[0]"),
        ([{"content": "x"}], "bad_value", "role of messages[0] is missing"),
        ([{"from": "human", "value": "x"}], "bad_value", "role of messages[0]"),
        ([{"role": "<|system|>", "content": "x"}], "bad_value", "one of system"),
        ([{"role": "user"}], "bad_value", "no content"),
        ([{"role": "user", "content": None}], "null_field", "no content"),
        ([{"role": "user", "content": 5}], "bad_value", "must be text"),
        ([{"role": "user", "content": [5]}], "bad_value", "content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "bad_value", "must be text"),
        ([{"role": "user", "content": "x", "photo": b"x"}], "bad_value", "photo"),
        ([{"role": "assistant", "tool_calls": [CALL]}], "unsupported_content", "to continue"),
        ([{"role": "assistant", "tool_calls": ["f"]}], "bad_value", "tool_calls[0]"),
    ],
)
def test_a_bad_shape_is_an_error_row_with_a_sentence(tiny, build, error_of, messages, code, part):
    found, message = error_of(build(tiny), messages=messages)
    assert (found, part in message) == (code, True), message
    assert message.startswith("row 3 (line 4): ")


def test_tool_calls_that_a_template_would_drop_are_refused(byte_bpe, build, error_of):
    messages = [{"role": "assistant", "content": "", "tool_calls": [CALL]}]
    code, message = error_of(build(byte_bpe), messages=messages)
    assert code == "unsupported_content"
    assert "tool calls" in message


def test_what_a_template_raises_becomes_the_row_s_error(tiny, build, error_of):
    template = "{% for m in messages %}{{ raise_exception('roles must alternate') }}{% endfor %}"
    builder = build(tiny, chat_template=template)
    code, message = error_of(builder, messages=[{"role": "user", "content": "x"}])
    assert code == "template_failed"
    assert "roles must alternate" in message


def test_a_prefill_that_a_template_changes_is_refused(tiny, build, error_of):
    template = "{% for m in messages %}{{ m.content | upper }}<|end|>{% endfor %}"
    hidden = "{% for m in messages[:-1] %}{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    assert error_of(build(tiny, chat_template=hidden), messages=messages)[0] == (
        "unsupported_content"
    )
    twice = template + template
    assert error_of(build(tiny, chat_template=twice), messages=messages)[0] == (
        "unsupported_content"
    )


def test_templates_are_told_one_time_for_all_rows(tiny, build):
    template = "{{ strftime_now('%H:%M:%S.%f') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    builder = build(tiny, chat_template=template)
    messages = [{"role": "user", "content": ""}]
    assert text_of(builder, messages) == text_of(builder, messages)
    assert any("date" in warning for warning in builder.warnings)
