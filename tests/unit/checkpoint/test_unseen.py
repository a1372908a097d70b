"""An unseen text can be placed and trimmed; whatever else is asked of it is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from batchradix.checkpoint.chat_template import (
    ChatTemplateRaised,
    compile_template,
    render_template,
)
from batchradix.checkpoint.unseen import AskedError, Unseen
from batchradix.errors import TemplateError

MARKS = ("\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3")

QUESTIONS: list[Callable[[Any], Any]] = [
    len,
    hash,
    list,
    repr,
    lambda text: text == "a",
    lambda text: text != "a",
    lambda text: "a" in text,
    lambda text: text in ["a"],
    lambda text: text < "a",
    lambda text: text[0],
    lambda text: text * 2,
    lambda text: text % 1,
    lambda text: "a" + text in ("a",),
    lambda text: f"{text:>9}",
    lambda text: text.upper(),
    lambda text: text.split("a"),
    lambda text: text.endswith("a"),
    lambda text: text.startswith("Say more"),
    lambda text: text.startswith("ay", 1),
    lambda text: text.strip("a"),
    lambda text: (text + " ").strip(),
    lambda text: text.encode(),
    lambda text: bool(Unseen(MARKS, "")),
]


@pytest.mark.parametrize("question", range(len(QUESTIONS)))
def test_a_question_about_the_text_is_noticed(question: int) -> None:
    with pytest.raises(AskedError):
        QUESTIONS[question](Unseen(MARKS, "Say"))


def test_it_can_be_placed_and_trimmed_and_has_a_known_beginning() -> None:
    text = Unseen(MARKS, "Say")
    assert str("<" + text + ">") == f"<{MARKS[0]}>"
    assert isinstance("<" + text, Unseen)
    assert str(text.lstrip().rstrip()) == str(text.strip()) == MARKS[3]
    assert text
    assert text.startswith("Sa")
    assert not text.startswith("<|")
    assert ("<|" + text).startswith("<|S")
    assert not Unseen(MARKS, "\n").strip().begins


def rendered(template: str) -> str:
    compiled = compile_template(template, unseen_marks="".join(MARKS))
    return render_template(compiled, {"text": Unseen(MARKS, "Say"), "role": "user", "keys": ["a"]})


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ '<' + text | trim ~ '>' }}", f"<{MARKS[3]}>"),
        ("{% if text is string and text %}{{ text }}{% endif %}{{ role | upper }}", MARKS[0]),
        ("{% set ns = namespace(t=text) %}{{ ns.t }}{{ 'a' in keys }}", f"{MARKS[0]}True"),
        ("{{ text or 'none' }}{{ '' if text.startswith('<tool') }}", MARKS[0]),
    ],
)
def test_a_template_that_only_places_the_text_is_rendered(template: str, expected: str) -> None:
    assert rendered(template).replace("USER", "") == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ text | tojson }}",
        "{{ [text] | tojson }}",
        "{{ text | e }}",
        "{{ text | int }}",
        "{{ text is lower }}",
        "{{ text is in 'abc' }}",
        "{{ text in 'abc' }}",
        "{{ 'abc'.startswith(text) }}",
        "{{ 'abc'.replace('a', text) }}",
        "{{ [text] | join | upper }}",
        "{{ {text: 1} }}",
        "{% set t %}{{ text }}{% endset %}{{ t[0] }}",
        "{% macro f() %}{{ text }}{% endmacro %}{{ f()[0] }}",
        "{% filter upper %}{{ text }}{% endfilter %}",
    ],
)
def test_a_template_that_looks_into_the_text_is_not(template: str) -> None:
    with pytest.raises((TemplateError, ChatTemplateRaised)):
        rendered(template)
