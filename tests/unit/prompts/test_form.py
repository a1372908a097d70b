"""A job's prompts are cut once: what a batch makes of its rows is what each row alone makes."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchradix.prompts import chat
from batchradix.types import Row

PIECES = [
    "<|end|>", "<|im_start|>", "<|im_end|>", "<bos>", "<s>", "</s>", "[INST]", "[/INST]", "<|",
    "<", "|>", "end|>", "<|en", "d|>", "[", "INST]", " ", "  ", "\n", "\t", "a", "Grüße", "東京",
    "e\u0301", "\ufdd0", "\ufdd1", "\ufdd4", "\ud800", "\udc00", "word", "<tool_response>",
    "{{ b }}", "\\", '"', "'", "&", "%s", "\x00", "\u00a0", "\u2028", "<mask>", " whole ",
]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
RELAXED = settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
THINKING = (
    "{% for m in messages %}{% set content = m.content if m.content is string else '' %}"
    "{% if m.role == 'user' and m.content.startswith('<tool_response>') %}TOOL{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' ~ 'assistant\n' }}{% endif %}"
)
NAMESPACE = (
    "{% set ns = namespace(text='') %}{% for m in messages %}"
    "{% set ns.text = ns.text ~ '[INST] ' ~ m['content'] | trim ~ ' [/INST]' %}{% endfor %}"
    "{{ 'Chat: ' + ns.text }}"
)
JOBS = {
    "prompt": {},
    "template": {"template": "<|user|>{{a}}<|{{ b }}|> [INST] {{a}}{{b}}<|end|> {{a}}"},
    "template-beginning-with-data": {"template": "{{a}}<bos>{{b}} "},
    "template-of-schema": {"template": "{{ schema }}{{a}}{{b}}"},
    "template-chat": {"template": "{{a}} of <|end|>{{b}}", "chat": True},
    "instruction": {"instruction": "Say what it is.", "column": "a"},
    "instruction-like-a-token": {"instruction": "Say <|im_end|>", "column": "a"},
    "instruction-and-system": {"instruction": "Say.", "column": "a", "system": "Be <|brief"},
}


def assert_alike(builder, rows):
    batch = builder.encode(rows)
    for position, row in enumerate(rows):
        alone = builder.explain(row)
        ids = [i for span in alone.spans for i in span.ids]
        assert batch.tokens[position].tolist() == ids
        assert batch.errors.get(position) == alone.error


@pytest.mark.parametrize("job", JOBS)
@RELAXED
@given(data=st.lists(st.tuples(texts, st.none() | texts), min_size=1, max_size=4))
def test_a_batch_has_the_ids_of_each_row_alone(kind, build, job, data):
    columns = ["prompt"] if job == "prompt" else ["a", "b"]
    builder = build(kind, columns, '{"<|end|>": 1}', **JOBS[job])
    rows = [
        Row(index=i, values={"prompt": b} if job == "prompt" else {"a": a, "b": b})
        for i, (a, b) in enumerate(data)
    ]
    assert_alike(builder, rows)


@pytest.mark.parametrize("template", [THINKING, NAMESPACE])
@RELAXED
@given(data=st.lists(texts, min_size=1, max_size=4))
def test_chat_templates_that_gather_text_have_the_ids_of_each_row_alone(
    byte_bpe, build, template, data
):
    builder = build(
        byte_bpe, ["a"], chat_template=template, instruction="Name it:", column="a", system="Hi"
    )
    assert_alike(builder, [Row(index=i, values={"a": text}) for i, text in enumerate(data)])


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}{{ m.content | upper }}{% endfor %}",
        "{% for m in messages %}{{ m.content | length }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m | tojson }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% if m.content in 'abc' %}x{% endif %}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% if 'b' in m.content %}x{% endif %}{% endfor %}",
        "{% for m in messages %}{{ m.content.split('b')[-1] }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% set t %}{{ m.content }}{% endset %}{{ t | length }}{{ t }}"
        "{% endfor %}",
        "{% macro f(t) %}{{ t }}{% endmacro %}{% for m in messages %}{{ f(m.content) | upper }}"
        "{{ m.content }}{% endfor %}",
        "{% macro f() %}{{ messages[0].content }}{% endmacro %}{{ f() }}{{ f().endswith('b') }}",
        "{% for m in messages %}{{ m.content }}{{ m.content | int }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ m.content is lower }}{% endfor %}",
        "{% for m in messages %}{{ '%s' % m.content }}{{ (m.content + 'x')[-2] }}{% endfor %}",
        "{% for m in messages %}{{ (m.content + ' ') | trim | e }}{{ m.content }}{% endfor %}",
    ],
)
def test_a_chat_template_that_looks_into_a_text_sees_that_of_each_row(byte_bpe, build, template):
    builder = build(byte_bpe, ["a"], chat_template=template, template="{{ a }}", chat=True)
    data = ["a", "b", "abc", " Ab ", "4", '"', "<", "&\n"]
    assert_alike(builder, [Row(index=i, values={"a": text}) for i, text in enumerate(data)])


@pytest.mark.parametrize("template", [None, THINKING, NAMESPACE])
def test_a_job_s_chat_template_does_not_run_for_each_row(byte_bpe, build, template, monkeypatch):
    chosen = {} if template is None else {"chat_template": template}
    builder = build(byte_bpe, ["a"], instruction="Name it:", column="a", **chosen)
    builder.encode([Row(index=0, values={"a": "x"})])
    calls = []
    monkeypatch.setattr(chat, "render_template", lambda *args: calls.append(args) or "")
    batch = builder.encode([Row(index=i, values={"a": f"row {i}"}) for i in range(50)])
    assert not calls
    assert len({tuple(batch.tokens[i].tolist()) for i in range(50)}) == 50
