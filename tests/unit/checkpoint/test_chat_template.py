from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from batchradix.checkpoint import chat_template
from batchradix.checkpoint.chat_template import (
    ChatTemplateRaised,
    compile_template,
    render_chat,
    render_template,
)
from batchradix.errors import TemplateError

CHATML = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {%- if message.role == 'system' and not loop.first %}\n"
    "        {{- raise_exception('System message must be first, not ' ~ loop.index) }}\n"
    "    {%- endif %}\n"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MESSAGES = [{"role": "user", "content": " a <b> & 'ü' "}, {"role": "assistant", "content": "no"}]
TEMPLATES = [
    CHATML,
    "{{ messages | tojson }}{{ tools | tojson(indent=2) }}",
    "{% for m in messages if m.role == 'user' %}{{ loop.length }}{% else %}-{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% if ns.n > 1 %}{% break %}{% endif %}{{ loop.last }}{{ loop.revindex }}{% endfor %}"
    "{{ ns.n }}",
    "{% macro f(x) %}[{{ x ~ 1 ~ none if x else x }}]{% endmacro %}{{ f(messages[0].content) }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}",
    "{{ nothing }}|{{ messages[0].tool_calls is defined }}|{{ enable_thinking }}|{{ documents }}",
    "{% for k, v in messages[0].items() %}{{ loop.changed(v) }}{{ loop.previtem }}{% endfor %}",
    "{% for m in messages | reverse %}{{ loop.index0 }}{{ m.role }}{% endfor %}",
    "{{ messages[::-1] }}{% for x in nothing %}{{ x }}{% else %}none{% endfor %}",
    "{% set x %}{{ '%05d' % 7 }}{% endset %}{{ x * 3 }}{{ dict(a=1) | tojson }}",
    "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{% endfor %}",
    "  {% if true %}\n  x\n  {% endif %}\n y {{- 'z' }}\n",
]


def checkpoint(template: str | None) -> Any:
    return SimpleNamespace(
        name="m", chat_template=template, special_texts={"bos_token": "<s>", "eos_token": "</s>"}
    )


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_template_renders_as_transformers_renders_it(
    template: str, add_generation_prompt: bool
) -> None:
    theirs = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [*MESSAGES, {"role": "tool", "content": "x", "reasoning": "because"}]
    tools = [{"type": "function", "function": {"name": "f", "description": "<ü>"}}]
    [expected], _ = theirs.render_jinja_template(
        conversations=[messages],
        tools=tools,
        chat_template=template,
        add_generation_prompt=add_generation_prompt,
        bos_token="<s>",
        eos_token="</s>",
        enable_thinking=False,
    )
    rendered = render_chat(
        checkpoint(template),
        messages,
        add_generation_prompt=add_generation_prompt,
        tools=tools,
        enable_thinking=False,
    )
    assert rendered == expected


def test_what_a_template_raises_reaches_the_row_with_its_message() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    with pytest.raises(ChatTemplateRaised, match=r"^System message must be first, not 2$"):
        render_chat(checkpoint(CHATML), messages)


@pytest.mark.parametrize(
    "template", ["{{ messages[0].content.nothing.more }}", "{{ 1 / 0 }}", "{{ messages + 1 }}"]
)
def test_a_template_that_fails_on_a_row_says_why(template: str) -> None:
    with pytest.raises(ChatTemplateRaised, match=r"."):
        render_chat(checkpoint(template), MESSAGES)


def test_a_model_without_a_template_says_what_to_give_instead() -> None:
    with pytest.raises(TemplateError, match="no chat template; give prompts"):
        render_chat(checkpoint(None), MESSAGES)


@pytest.mark.parametrize("template", ["{% for %}", "{{ a", "{% endif %}", "{{ x | nofilter }}"])
def test_a_syntax_error_is_found_when_the_template_is_compiled(template: str) -> None:
    with pytest.raises(TemplateError, match="malformed"):
        compile_template(template)


def test_a_template_is_compiled_once() -> None:
    assert compile_template("{{ 1 }}") is compile_template("{{ 1 }}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ dict.__call__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['datetime'] }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ ''.format_map.__self__.__class__ }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    ],
)
def test_the_sandbox_holds(template: str) -> None:
    try:
        rendered = render_chat(checkpoint(template), MESSAGES)
    except ChatTemplateRaised:
        return
    assert rendered == ""


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(9999) %}{% for b in range(9999) | map('int') %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
        "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%.9999999999f' % 1 }}",
        "{{ '%*d' % (10 ** 10, 1) }}",
        "{{ '%(a)9999999999s' % {'a': 1} }}",
        "{{ ('%s' * 1000) % ((('x' * 10000,) * 1000)) }}",
        "{{ 'x'.center(10 ** 10) }}",
        "{{ 'x'.ljust(10 ** 10, '-') }}",
        "{{ 'x' | attr('rjust') }}{{ ('x' | attr('rjust'))(10 ** 10) }}",
        "{{ '1'.zfill(10 ** 10) }}",
        "{{ (1).to_bytes(10 ** 10) }}",
        "{{ '\\t'.expandtabs(10 ** 10) }}",
        "{{ 'x'.encode().center(10 ** 10) }}",
        "{{ '{:>9999999999}'.format('x') }}",
        "{{ '{:{}}'.format('x', 10 ** 10) }}",
        "{{ '{a:9999999999}'.format_map({'a': 1}) }}",
        "{{ ('x' * 10000).replace('x', 'y' * 10000) }}",
        "{{ ('x' * 10000).replace('', 'y' * 10000) }}",
        "{{ ('x' * 10000).translate({120: 'y' * 10000}) }}",
        "{{ ('x' * 10000).join(range(10000) | map('string')) }}",
        "{{ range(10000) | join('x' * 10000) }}",
        "{{ 'x' | center(10 ** 10) }}",
        "{{ 'x' | indent(10 ** 10, true) }}",
        "{{ '%9999999999d' | format(1) }}",
        "{{ ('x' * 10000) | replace('x', 'y' * 10000) }}",
        "{{ ('x ' * 10000) | wordwrap(1, true, 'y' * 10000) }}",
        "{{ [1] | batch(10 ** 10, 1) | list }}",
        "{{ [1] | slice(10 ** 10) | list }}",
        "{{ [[1]] | tojson(indent=10 ** 10) }}",
        "{{ [0] * 10 ** 10 }}",
        "{% set n = namespace(x='x') %}{% for i in range(99) %}"
        "{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='x') %}{% for i in range(99) %}"
        "{% set n.x = n.x + n.x %}{% endfor %}",
    ],
)
def test_no_template_runs_without_end(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_STEPS", 100_000)
    monkeypatch.setattr(chat_template, "MAX_CHARACTERS", 1_000_000)
    began = time.monotonic()
    with pytest.raises(ChatTemplateRaised):
        render_template(compile_template(template), {})
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ '%5.1f|%s' % (1, 'a') }}", "  1.0|a"),
        ("{{ 7 % 4 }}", "3"),
        ("{{ '{:>3}|{a} 99999999999'.format('x', a='b') }}", "  x|b 99999999999"),
        ("{{ 'x'.center(3) }}|{{ '7'.zfill(3) }}|{{ ' a '.strip() }}", " x |007|a"),
        ("{{ 'aXb'.replace('X', '--') }}|{{ 'a,b'.split(',') | join('+') }}", "a--b|a+b"),
        ("{{ ['a', 'b'] | map('upper') | join }}|{{ ','.join(['a', 'b']) }}", "AB|a,b"),
        ("{{ 'a\nb' | indent(2) }}|{{ 'x' | center(3) }}", "a\n  b| x "),
        ("{{ [1, 2, 3] | batch(2, 0) | list }}|{{ '%s!' | format('a') }}", "[[1, 2], [3, 0]]|a!"),
        ("{{ [{'n': 'a'}] | join(',', attribute='n') }}|{{ 'a b' | wordwrap(1) }}", "a|a\nb"),
        ("{{ {'a': [1]} | tojson(indent=2) }}", '{\n  "a": [\n    1\n  ]\n}'),
    ],
)
def test_what_a_template_may_build_it_builds(template: str, text: str) -> None:
    assert render_template(compile_template(template), {}) == text


def test_a_long_chat_is_within_the_bounds() -> None:
    messages = [{"role": "user", "content": "word " * 200}] * 2000
    assert len(render_chat(checkpoint(CHATML), messages)) > 2_000_000
