"""For text that holds no added token, ids are those of `transformers`."""

from __future__ import annotations

import pytest

TEXTS = [
    "plain",
    "The answer is 42.",
    "  two spaces in front, and a line\n\nbelow\t ",
    "Grüße aus München, 東京から 👩‍👩‍👧 привет 12345",
    '{"answer": [1, 2.5, null]} <tag> a<b b>a [x] |> <|',
    "e\u0301 \u200b\u202e zero\x00one",
    "x",
]
TURNS = [
    [("user", 0)],
    [("system", 1), ("user", 2)],
    [("user", 3), ("assistant", 4), ("user", 5)],
    [("user", 6), ("assistant", 1), ("user", 0), ("assistant", 3), ("user", 4)],
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_raw_prompt_has_the_ids_of_the_tokenizer_called_on_it(kind, build, ids_of, text):
    assert ids_of(build(kind), prompt=text) == kind.oracle(text).input_ids


@pytest.mark.parametrize("text", TEXTS)
def test_a_raw_template_has_the_ids_of_the_tokenizer_called_on_the_rendered_text(
    kind, build, ids_of, text
):
    builder = build(kind, template='Text: {{text}}, as {"a": 1}.\n{{ text }}')
    rendered = f'Text: {text}, as {{"a": 1}}.\n{text}'
    assert ids_of(builder, text=text) == kind.oracle(rendered).input_ids


@pytest.mark.parametrize("turns", TURNS)
def test_a_chat_has_the_ids_of_apply_chat_template(kind, build, ids_of, turns):
    messages = [{"role": role, "content": TEXTS[i]} for role, i in turns]
    expected = kind.oracle.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert ids_of(build(kind), messages=messages) == expected


@pytest.mark.parametrize("text", [*TEXTS, "trailing  "])
def test_a_prefill_has_the_ids_of_continue_final_message(kind, build, ids_of, text):
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": text}]
    expected = kind.oracle.apply_chat_template(
        messages, continue_final_message=True, return_dict=False
    )
    assert ids_of(build(kind), messages=messages) == expected


@pytest.mark.parametrize(
    "template", ["<|im_start|>user\n{{t}}<|im_end|>\n<think>!{{t}}", "{{t}} <mask> {{t}}<mask>\n"]
)
def test_a_template_s_own_added_tokens_are_matched_as_the_tokenizer_does(
    byte_bpe, build, ids_of, template
):
    rendered = template.replace("{{t}}", "some text ")
    expected = byte_bpe.oracle(rendered).input_ids
    assert ids_of(build(byte_bpe, template=template), t="some text ") == expected


@pytest.mark.parametrize(
    "template", ["[INST]{{t}}[/INST]{{t}}", "<s>{{t}}</s>", "{{t}}[INST] {{t}}"]
)
@pytest.mark.parametrize("name", ["metaspace", "legacy"])
def test_text_after_a_token_gets_the_space_that_the_tokenizer_gives_it(
    request, build, ids_of, name, template
):
    kind = request.getfixturevalue(name)
    oracle = kind.oracle(template.replace("{{t}}", "name")).input_ids
    if template.startswith("<s>"):  # the tokenizer would put a second one
        oracle = oracle[1:]
    assert ids_of(build(kind, template=template), t="name") == oracle


@pytest.mark.parametrize("template", ["a whole {{t}}", "{{t}}whole", "a whole{{t}}", "{{t}}whole "])
@pytest.mark.parametrize("text", ["x", " ", "-"])
def test_a_single_word_token_is_matched_only_between_word_boundaries(
    byte_bpe, build, ids_of, template, text
):
    expected = byte_bpe.oracle(template.replace("{{t}}", text)).input_ids
    assert ids_of(build(byte_bpe, template=template), t=text) == expected


def test_tool_calls_and_tool_turns_have_the_ids_of_apply_chat_template(tiny, build, ids_of):
    call = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"x":"y"}'}}
    messages = [
        {"role": "user", "content": "w?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "4C"},
    ]
    expected = tiny.oracle.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert ids_of(build(tiny), messages=messages) == expected
